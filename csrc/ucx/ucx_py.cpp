// The Python face of the engine; its manual is pdlink/_ucx.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <tuple>

#include "gate_py.h"
#include "ucx/engine.h"

namespace nb = nanobind;
using namespace pdlink;
using namespace pdlink::ucx;

namespace {

using Runs = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using PyRegion = std::tuple<std::uint64_t, std::uint64_t, nb::bytes>;
using PyPiece = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, nb::object>;

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }
std::string to_string(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }

Runs to_runs(const nb::object& array, std::size_t piece) {
    Runs runs;
    // Without conversion: a float array silently cast to integers would be the wrong bytes.
    if (!nb::try_cast(array, runs, false))
        throw nb::value_error(
            ("submit: runs of piece " + std::to_string(piece) + " must be a C-contiguous int64 array [n, 3]")
                .c_str());
    return runs;
}

std::uint64_t submit_pieces(Engine& engine, const std::string& peer, const std::vector<PyPiece>& given,
                            double timeout_s) {
    std::vector<Runs> arrays;
    std::vector<Piece> pieces;
    for (const auto& [src_region, src_base, dst_region, dst_base, array] : given) {
        arrays.push_back(to_runs(array, arrays.size()));
        pieces.push_back({src_region, src_base, dst_region, dst_base, arrays.back().data(), arrays.back().shape(0)});
    }
    const nb::gil_scoped_release release;
    return engine.submit(peer, pieces, timeout_s);
}

void connect_peer(Engine& engine, const std::string& peer, const nb::bytes& address,
                  const std::vector<PyRegion>& regions, std::int64_t pid, std::uint64_t born,
                  const std::optional<PyGate>& gate, const PyRegion& ring) {
    Remote remote{.address = to_string(address), .regions = {}, .ring = {}, .pid = pid, .born = born, .gate = {}};
    remote.ring = {std::get<0>(ring), std::get<1>(ring), to_string(std::get<2>(ring))};
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

nb::tuple invite_peer(Engine& engine, const std::string& peer) {
    Opening opening;
    {
        const nb::gil_scoped_release release;
        opening = engine.invite(peer);
    }
    return nb::make_tuple(to_bytes(opening.address), py_gate(opening.gate),
                          nb::make_tuple(opening.ring_base, opening.ring_nbytes, to_bytes(opening.ring_rkey)));
}

}  // namespace

NB_MODULE(_ucx, m) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;

    nb::exception<Unavailable>(m, "Unavailable", PyExc_RuntimeError);
    nb::exception<PeerError>(m, "PeerError", PyExc_RuntimeError);

    nb::class_<Library>(m, "Library")
        .def_static("load", &Library::load, nb::arg("chosen"), nb::arg("wheel"))
        .def_ro("path", &Library::path)
        .def_prop_ro("version", &Library::version);

    nb::class_<Event> event(m, "Event");
    nb::enum_<Event::Kind>(event, "Kind")
        .value("BATCH_DONE", Event::Kind::BATCH_DONE)
        .value("PEER_FAILED", Event::Kind::PEER_FAILED)
        .value("PEER_CLOSED", Event::Kind::PEER_CLOSED);
    nb::enum_<Status>(event, "Status")
        .value("OK", Status::OK)
        .value("TIMEOUT", Status::TIMEOUT)
        .value("PEER_FAILED", Status::PEER_FAILED)
        .value("CANCELLED", Status::CANCELLED);
    event.def_ro("kind", &Event::kind)
        .def_ro("peer", &Event::peer)
        .def_ro("ticket", &Event::ticket)
        .def_ro("status", &Event::status)
        .def_ro("nbytes", &Event::nbytes)
        .def_ro("submitted_s", &Event::submitted_s)
        .def_ro("done_s", &Event::done_s)
        .def_ro("detail", &Event::detail);

    nb::class_<Engine>(m, "Engine")
        .def(
            "__init__",
            [](Engine* self, Library library, std::string tls, std::string devices,
               std::map<std::string, std::uint64_t> stage_below) {
                new (self)
                    Engine(std::move(library), Choice{std::move(tls), std::move(devices), std::move(stage_below)});
            },
            nb::arg("library"), nb::arg("tls"), nb::arg("devices") = "",
            nb::arg("stage_below") = std::map<std::string, std::uint64_t>(), Unlocked())
        .def("register_memory", &register_memory, nb::arg("address"), nb::arg("nbytes"), nb::arg("cuda_context") = 0)
        .def("invite", &invite_peer, nb::arg("peer"))
        .def("connect", &connect_peer, nb::arg("peer"), nb::arg("address"), nb::arg("regions"), nb::arg("pid"),
             nb::arg("born"), nb::arg("gate").none(), nb::arg("ring"))
        .def("submit", &submit_pieces, nb::arg("peer"), nb::arg("pieces"), nb::arg("timeout_s"))
        .def("poll", &Engine::poll)
        .def("fileno", &Engine::fileno)
        .def("notes_refused", &Engine::notes_refused)
        .def("lane", &Engine::lane, nb::arg("peer"), Unlocked())
        .def("close_peer", &Engine::close_peer, nb::arg("peer"), Unlocked())
        .def("close", &Engine::close, Unlocked());

    m.attr("MAX_STAGE_BELOW") = kMaxStageBelow;
    m.attr("RING_NBYTES") = kNumSlots * kSlotNbytes;
    m.def("process_born", &process_born, nb::arg("pid"));
}
