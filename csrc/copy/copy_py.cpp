// Python's view of the copier and of the stores; `pdlink/_copy.pyi` is its manual.
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/gate_py.h"
#include "common/native_py.h"
#include "copy/copier.h"
#include "copy/stores.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using File = std::tuple<int, std::uint64_t, std::uint64_t, std::uint64_t>;

PeerFile peer_file(const File& file) {
    return {std::get<0>(file), std::get<1>(file), std::get<2>(file), std::get<3>(file)};
}

void connect(Copier& copier, const std::string& peer, std::int64_t pid, const std::vector<File>& regions,
             const PyGate& gate) {
    std::vector<PeerFile> files;
    for (const File& region : regions) files.push_back(peer_file(region));
    const GateName name = gate_name(gate);
    const nb::gil_scoped_release release;
    copier.connect(peer, pid, files, name);
}

PyGate invite(Copier& copier, const std::string& peer) { return py_gate(copier.invite(peer)); }

// Copy runs in the calling thread, the way `pdlink bench` measures a ceiling.
void copy_runs(const WritableBytes& dst, const Bytes& src, const PyRuns& runs, const StoreKind& kind) {
    std::byte* to = reinterpret_cast<std::byte*>(dst.data());
    const std::byte* from = reinterpret_cast<const std::byte*>(src.data());
    const std::int64_t* run = runs.data();
    const std::size_t num_runs = runs.shape(0), dst_nbytes = dst.shape(0), src_nbytes = src.shape(0);
    const nb::gil_scoped_release release;
    const auto fits = [](std::int64_t at, std::int64_t nbytes, std::size_t limit) {
        return at >= 0 && nbytes >= 0 && static_cast<std::size_t>(at) <= limit &&
               static_cast<std::size_t>(nbytes) <= limit - static_cast<std::size_t>(at);
    };
    for (std::size_t i = 0; i < num_runs; ++i)
        if (!fits(run[3 * i], run[3 * i + 2], src_nbytes) || !fits(run[3 * i + 1], run[3 * i + 2], dst_nbytes))
            throw std::invalid_argument("run " + std::to_string(i) + " is outside its buffer");
    for (std::size_t i = 0; i < num_runs; ++i, run += 3) {
        if (i + kPrefetchAhead < num_runs) {
            const std::int64_t* ahead = run + 3 * kPrefetchAhead;
            prefetch_run(from + ahead[0], static_cast<std::size_t>(ahead[2]));
        }
        kind.stream(to + run[1], from + run[0], static_cast<std::size_t>(run[2]));
    }
    store_fence();
}

void memcpy_runs(const WritableBytes& dst, const Bytes& src, const PyRuns& runs) {
    copy_runs(dst, src, runs, store_kinds().back());
}

void nt_runs(const WritableBytes& dst, const Bytes& src, const PyRuns& runs, const std::string& kind) {
    if (kind.empty()) return copy_runs(dst, src, runs, store_kinds().front());
    for (const StoreKind& candidate : store_kinds())
        if (kind == candidate.name) return copy_runs(dst, src, runs, candidate);
    throw std::invalid_argument("this CPU has no stores of kind " + kind);
}

std::vector<std::string> kinds() {
    std::vector<std::string> names;
    for (const StoreKind& kind : store_kinds()) names.emplace_back(kind.name);
    return names;
}

}  // namespace
}  // namespace pdlink

NB_MODULE(_copy, m) {
    using namespace pdlink;
    add_errors<PeerUnusable, NameTaken>(m);

    nb::class_<Copier>(m, "Copier")
        .def(nb::init<int>(), "num_threads"_a = 1)
        .def(
            "add_region",
            [](Copier& copier, std::uintptr_t ptr, std::size_t nbytes) {
                return copier.add_region(reinterpret_cast<std::byte*>(ptr), nbytes);
            },
            "ptr"_a, "nbytes"_a)
        .def("invite", &invite, "peer"_a)
        .def("connect", &connect, "peer"_a, "pid"_a, "regions"_a, "gate"_a)
        .def("submit", &submit<Copier>, "peer"_a, "pieces"_a.noconvert(), "timeout_s"_a)
        .def("computing", &Copier::computing, "on"_a)
        .def("slices_taken",
             [](Copier& copier) {
                 const auto taken = copier.slices_taken();
                 return nb::make_tuple(taken[0], taken[1]);
             })
        .def("connected", &Copier::connected, "peer"_a)
        .def("poll", &poll<Copier>)
        .def("fileno", &Copier::fd)
        .def("close_peer", &Copier::close_peer, "peer"_a)
        .def("close", &Copier::close, "grace_s"_a, nb::call_guard<nb::gil_scoped_release>());

    m.def("memcpy_runs", &memcpy_runs, "dst"_a, "src"_a, "runs"_a.noconvert());
    m.def("nt_runs", &nt_runs, "dst"_a, "src"_a, "runs"_a.noconvert(), "kind"_a = "");
    m.def("store_kinds", &kinds);
}
