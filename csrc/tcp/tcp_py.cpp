// Python's view of the tcp engine; `pdlink/_tcp.pyi` is its manual.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "tcp/engine.h"
#include "tcp/sockets.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::tcp {
namespace {

using Runs = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Piece = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, Runs>;

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

std::uint64_t submit(Engine& engine, const std::string& peer, const std::vector<Piece>& pieces, double timeout_s) {
    std::vector<ucx::Piece> views;
    views.reserve(pieces.size());
    for (const auto& [src_region, src_base, dst_region, dst_base, runs] : pieces)
        views.push_back({src_region, src_base, dst_region, dst_base, runs.data(), runs.shape(0)});
    const nb::gil_scoped_release release;
    return engine.submit(peer, views, timeout_s);
}

nb::list poll(Engine& engine) {
    nb::list out;
    for (const Report& report : engine.poll())
        out.append(nb::make_tuple(kind_name(report.kind), report.peer, report.ticket, outcome_name(report.outcome),
                                  report.nbytes, report.submitted_s, report.done_s, report.detail));
    return out;
}

}  // namespace
}  // namespace pdlink::tcp

NB_MODULE(_tcp, m) {
    using namespace pdlink::tcp;
    nb::exception<PeerUnusable>(m, "PeerUnusable", PyExc_RuntimeError);
    nb::exception<NameTaken>(m, "NameTaken", PyExc_ValueError);
    nb::register_exception_translator(
        [](const std::exception_ptr& error, void*) {
            try {
                std::rethrow_exception(error);
            } catch (const std::system_error& failure) {
                const nb::object args = nb::make_tuple(failure.code().value(), failure.what());
                PyErr_SetObject(PyExc_OSError, args.ptr());
            }
        },
        nullptr);

    nb::class_<Engine>(m, "Engine")
        .def(
            "__init__",
            [](Engine* at, std::string host, std::uint16_t streams, std::string congestion, double connect_timeout_s,
               double hello_timeout_s) {
                new (at)
                    Engine({std::move(host), streams, std::move(congestion), connect_timeout_s, hello_timeout_s});
            },
            "host"_a, "streams"_a, "congestion"_a, "connect_timeout_s"_a, "hello_timeout_s"_a)
        .def("port", &Engine::port)
        .def(
            "add_region",
            [](Engine& engine, std::uintptr_t ptr, std::size_t nbytes) {
                return engine.add_region(reinterpret_cast<std::byte*>(ptr), nbytes);
            },
            "ptr"_a, "nbytes"_a)
        .def("invite", &invite, "peer"_a)
        .def("connect", &connect, "peer"_a, "host"_a, "port"_a, "session"_a, "token"_a, "regions"_a)
        .def("submit", &submit, "peer"_a, "pieces"_a.noconvert(), "timeout_s"_a)
        .def("connected", &Engine::connected, "peer"_a)
        .def("congestion", &Engine::congestion, "peer"_a)
        .def("strangers_dropped", &Engine::strangers_dropped)
        .def("poll", &poll)
        .def("fileno", &Engine::fd)
        .def("close_peer", &Engine::close_peer, "peer"_a)
        .def("close", &Engine::close, "grace_s"_a, nb::call_guard<nb::gil_scoped_release>());

    m.def("congestion_usable", &congestion_usable, "name"_a);
    m.attr("MAX_STREAMS") = kMaxStreams;
    m.attr("TOKEN_NBYTES") = kTokenNbytes;
}
