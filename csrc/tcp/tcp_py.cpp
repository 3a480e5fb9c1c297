// Python's view of the tcp engine; `pdlink/_tcp.pyi` is its manual.
#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/native_py.h"
#include "tcp/engine.h"
#include "tcp/sockets.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::tcp {
namespace {

nb::tuple invite(Engine& engine, const std::string& peer) {
    const Invitation made = engine.invite(peer);
    return nb::make_tuple(made.session, nb::bytes(made.token.data(), made.token.size()), made.regions);
}

void connect(Engine& engine, const std::string& peer, const std::string& host, std::uint16_t port,
             std::uint64_t session, const nb::bytes& token, std::vector<std::uint64_t> regions) {
    Invitation there{session, {}, std::move(regions)};
    if (token.size() != there.token.size()) throw std::invalid_argument("the token has the wrong size");
    std::copy_n(reinterpret_cast<const std::uint8_t*>(token.c_str()), token.size(), there.token.begin());
    const nb::gil_scoped_release release;
    engine.connect(peer, {host, port}, there);
}

using Blocks = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bands = nb::ndarray<const std::int64_t, nb::shape<-1, 6>, nb::c_contig, nb::device::cpu>;

void guard(Engine& engine, const Bands& given, std::uint64_t num_blocks) {
    std::vector<Band> bands;
    for (std::size_t i = 0; i < given.shape(0); ++i) {
        const std::int64_t* row = given.data() + 6 * i;
        if (std::any_of(row, row + 6, [](std::int64_t number) { return number < 0; }))
            throw std::invalid_argument("a band of blocks has a negative number");
        const auto at = [row](std::size_t column) { return static_cast<std::uint64_t>(row[column]); };
        bands.push_back({at(0), at(1), at(2), at(3), at(4), at(5)});
    }
    engine.guard(std::move(bands), num_blocks);
}

template <void (Engine::*change)(const std::string&, std::span<const std::int64_t>)>
void on_blocks(Engine& engine, const std::string& peer, const Blocks& blocks) {
    const std::span<const std::int64_t> ids(blocks.data(), blocks.shape(0));
    const nb::gil_scoped_release release;
    (engine.*change)(peer, ids);
}

}  // namespace
}  // namespace pdlink::tcp

NB_MODULE(_tcp, m) {
    using namespace pdlink::tcp;
    pdlink::add_engine<Engine>(m, "TransferEngine")
        .def(
            "__init__",
            [](Engine* at, std::string host, std::uint16_t streams, std::string congestion, double connect_timeout_s,
               double hello_timeout_s, std::uint64_t pack_below) {
                new (at) Engine({std::move(host), streams, std::move(congestion), connect_timeout_s, hello_timeout_s,
                                 pack_below});
            },
            "host"_a, "streams"_a, "congestion"_a, "connect_timeout_s"_a, "hello_timeout_s"_a, "pack_below"_a = 0)
        .def("port", &Engine::port)
        .def("add_region", &Engine::add_region, "ptr"_a, "nbytes"_a)
        .def("guard", &guard, "bands"_a.noconvert(), "num_blocks"_a)
        .def("open_blocks", &on_blocks<&Engine::open_blocks>, "peer"_a, "blocks"_a.noconvert())
        .def("close_blocks", &on_blocks<&Engine::close_blocks>, "peer"_a, "blocks"_a.noconvert())
        .def("invite", &invite, "peer"_a)
        .def("connect", &connect, "peer"_a, "host"_a, "port"_a, "session"_a, "token"_a, "regions"_a)
        .def("congestion", &Engine::congestion, "peer"_a)
        .def("strangers_dropped", &Engine::strangers_dropped)
        .def(
            "close", [](Engine& engine, double grace_s) { engine.close(grace_s); }, "grace_s"_a,
            nb::call_guard<nb::gil_scoped_release>());

    m.def("congestion_usable", &congestion_usable, "name"_a);
    m.attr("MAX_PACK_BELOW") = kMaxPackBelow;
    m.attr("MAX_STREAMS") = kMaxStreams;
    m.attr("TOKEN_NBYTES") = kTokenNbytes;
}
