// Python's view of the ucx engine; `pdlink/_ucx.pyi` is its manual.
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/gate_py.h"
#include "common/native_py.h"
#include "ucx/engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::ucx {
namespace {

// How long `close` waits beyond its grace for a thread that UCX holds up.
constexpr double kEndLimit_s = 0.4;

using PyRegion = std::tuple<std::uint64_t, std::uint64_t, nb::bytes>;

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }
std::string to_string(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }

void connect_peer(Engine& engine, const std::string& peer, const nb::bytes& address,
                  const std::vector<PyRegion>& regions, std::int64_t pid, std::uint64_t born,
                  const std::optional<PyGate>& gate) {
    Remote remote{.address = to_string(address), .regions = {}, .pid = pid, .born = born, .gate = {}};
    for (const auto& [base, nbytes, rkey] : regions) remote.regions.push_back({base, nbytes, to_string(rkey)});
    if (gate) remote.gate = gate_name(*gate);
    const nb::gil_scoped_release release;
    engine.connect(peer, std::move(remote));
}

nb::tuple register_memory(Engine& engine, std::uintptr_t address, std::uint64_t nbytes, std::uintptr_t cuda_context) {
    Registered region;
    {
        const nb::gil_scoped_release release;
        region = engine.register_memory(address, nbytes, cuda_context);
    }
    return nb::make_tuple(region.index, to_bytes(region.rkey));
}

nb::tuple invite(Engine& engine, const std::string& peer) {
    Opening opening;
    {
        const nb::gil_scoped_release release;
        opening = engine.invite(peer);
    }
    return nb::make_tuple(to_bytes(opening.address), py_gate(opening.gate));
}

}  // namespace
}  // namespace pdlink::ucx

NB_MODULE(_ucx, m) {
    using namespace pdlink::ucx;
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;

    nb::exception<Unavailable>(m, "Unavailable", PyExc_RuntimeError);

    nb::class_<Library>(m, "Library")
        .def_static("loaded", &Library::loaded)
        .def_static("load", &Library::load, "path"_a, nb::kw_only(), "hooks"_a)
        .def_ro("path", &Library::path)
        .def_prop_ro("version", &Library::version);

    pdlink::add_engine<Engine>(m, "TransferEngine")
        .def(
            "__init__",
            [](Engine* self, Library library, std::string tls, std::string devices) {
                new (self) Engine(std::move(library), {std::move(tls), std::move(devices)});
            },
            "library"_a, "tls"_a, "devices"_a = "", Unlocked())
        .def("register_memory", &register_memory, "address"_a, "nbytes"_a, "cuda_context"_a = 0)
        .def("invite", &invite, "peer"_a)
        .def("connect", &connect_peer, "peer"_a, "address"_a, "regions"_a, "pid"_a, "born"_a, "gate"_a.none())
        .def("lane", &Engine::lane, "peer"_a, Unlocked())
        .def(
            "close",
            [](nb::handle self, double grace_s) {
                Engine& engine = nb::cast<Engine&>(self);
                bool ended = false;
                {
                    const nb::gil_scoped_release release;
                    ended = engine.close(grace_s, grace_s + kEndLimit_s);
                }
                if (!ended) self.inc_ref();  // never freed: the thread ends when UCX lets it
            },
            "grace_s"_a);

    m.def("process_born", &pdlink::process_born, "pid"_a);
}
