// Python's view of the anchors; `benchmarks/pdlink_bench/_anchors.pyi` is its manual.
#include <string>
#include <vector>

#include "anchors/sockets.h"
#include "common/native_py.h"
#ifdef PDLINK_ANCHORS_UCX
#include "anchors/puts.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::anchors {
namespace {

template <typename Writer>
std::uint32_t declare(Writer& writer, const PyRuns& runs) {
    std::vector<Run> found;
    found.reserve(runs.shape(0));
    for (std::size_t i = 0; i < runs.shape(0); ++i) {
        const std::int64_t* run = runs.data() + 3 * i;
        found.push_back({static_cast<std::uint64_t>(run[0]), static_cast<std::uint64_t>(run[1]),
                         static_cast<std::uint64_t>(run[2]), 0, 0});
    }
    const nb::gil_scoped_release release;
    return writer.declare(found);
}

std::string text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

}  // namespace
}  // namespace pdlink::anchors

NB_MODULE(_anchors, m) {
    using namespace pdlink::anchors;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    pdlink::translate_system_errors();
    nb::class_<SocketReader>(m, "SocketReader")
        .def(nb::init<std::uintptr_t, std::uint64_t, std::string>(), "base"_a, "nbytes"_a, "congestion"_a)
        .def_prop_ro("port", &SocketReader::port);
    nb::class_<SocketWriter>(m, "SocketWriter")
        .def(nb::init<std::uintptr_t, std::uint64_t, std::uint16_t, const std::string&>(), "base"_a, "nbytes"_a,
             "port"_a, "congestion"_a, Release())
        .def("declare", &declare<SocketWriter>, "runs"_a)
        .def("push", &SocketWriter::push, "batch"_a, "timeout_s"_a, Release())
        .def_prop_ro("congestion", &SocketWriter::congestion);
#ifdef PDLINK_ANCHORS_UCX
    nb::class_<PutTarget>(m, "PutTarget")
        .def(nb::init<const std::string&, const std::string&, std::uintptr_t, std::uint64_t>(), "library"_a, "tls"_a,
             "base"_a, "nbytes"_a)
        .def_prop_ro("address",
                     [](const PutTarget& self) { return nb::bytes(self.address().data(), self.address().size()); })
        .def_prop_ro("rkey", [](const PutTarget& self) { return nb::bytes(self.rkey().data(), self.rkey().size()); });
    nb::class_<PutSource>(m, "PutSource")
        .def(
            "__init__",
            [](PutSource* at, const std::string& library, const std::string& tls, std::uintptr_t base,
               std::uint64_t nbytes, const nb::bytes& address, const nb::bytes& rkey, std::uintptr_t remote_base) {
                new (at) PutSource(library, tls, base, nbytes, text(address), text(rkey), remote_base);
            },
            "library"_a, "tls"_a, "base"_a, "nbytes"_a, "address"_a, "rkey"_a, "remote_base"_a)
        .def("declare", &declare<PutSource>, "runs"_a)
        .def("push", &PutSource::push, "batch"_a, "timeout_s"_a, Release());
#endif
}
