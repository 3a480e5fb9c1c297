// Python's view of the copier and of the stores; `pdlink/_copy.pyi` is its manual.
#include <nanobind/stl/shared_ptr.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/gate_py.h"
#include "common/native_py.h"
#include "copy/copier.h"
#include "copy/stores.h"
#include "copy/sums.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::copy {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PyIndices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PySums = nb::ndarray<std::uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
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

// Begin and length of each region of a peer's, as this process has it.
std::vector<std::tuple<std::uintptr_t, std::size_t>> regions_of(PeerMemory& memory) {
    bool grew = false;
    std::vector<std::tuple<std::uintptr_t, std::size_t>> found;
    for (const Extent& extent : memory.extents(grew)) found.emplace_back(extent.base, extent.nbytes);
    return found;
}

PyGate invite(Copier& copier, const std::string& peer) { return py_gate(copier.invite(peer)); }

// Raises for a run that is not inside both buffers.
void check_runs(const std::int64_t* run, std::size_t num_runs, std::size_t dst_nbytes, std::size_t src_nbytes) {
    const auto fits = [](std::int64_t at, std::int64_t nbytes, std::size_t limit) {
        return at >= 0 && nbytes >= 0 && static_cast<std::size_t>(at) <= limit &&
               static_cast<std::size_t>(nbytes) <= limit - static_cast<std::size_t>(at);
    };
    for (std::size_t i = 0; i < num_runs; ++i)
        if (!fits(run[3 * i], run[3 * i + 2], src_nbytes) || !fits(run[3 * i + 1], run[3 * i + 2], dst_nbytes))
            throw std::invalid_argument("run " + std::to_string(i) + " is outside its buffer");
}

void prefetch_ahead(const std::byte* from, const std::int64_t* run, std::size_t i, std::size_t num_runs) {
    if (i + kPrefetchAhead >= num_runs) return;
    const std::int64_t* ahead = run + 3 * kPrefetchAhead;
    prefetch_run(from + ahead[0], static_cast<std::size_t>(ahead[2]));
}

// Copy runs in the calling thread, the way `pdlink bench` measures a ceiling.
void copy_runs(const WritableBytes& dst, const Bytes& src, const PyRuns& runs, const StoreKind& kind) {
    std::byte* to = reinterpret_cast<std::byte*>(dst.data());
    const std::byte* from = reinterpret_cast<const std::byte*>(src.data());
    const std::int64_t* run = runs.data();
    const std::size_t num_runs = runs.shape(0), dst_nbytes = dst.shape(0), src_nbytes = src.shape(0);
    const nb::gil_scoped_release release;
    check_runs(run, num_runs, dst_nbytes, src_nbytes);
    for (std::size_t i = 0; i < num_runs; ++i, run += 3) {
        prefetch_ahead(from, run, i, num_runs);
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

const SumKind& sum_kind(const std::string& name) {
    if (name.empty()) return sum_kinds().front();
    for (const SumKind& kind : sum_kinds())
        if (name == kind.name) return kind;
    throw std::invalid_argument("this CPU has no sums of kind " + name);
}

// The runs of several records, one after the other: of record i those up to ends[i]; its lines begin at starts[i] of
// the buffer that has records.
void nt_runs_summed(const WritableBytes& dst, const Bytes& src, const PyRuns& runs, const PyIndices& ends,
                    const PyIndices& starts, const PySums& sums, bool into_records, const std::string& name) {
    std::byte* to = reinterpret_cast<std::byte*>(dst.data());
    const std::byte* from = reinterpret_cast<const std::byte*>(src.data());
    const std::int64_t* run = runs.data();
    const std::size_t num_runs = runs.shape(0), dst_nbytes = dst.shape(0), src_nbytes = src.shape(0);
    const std::size_t num_records = ends.shape(0);
    if (starts.shape(0) != num_records || sums.shape(0) != num_records)
        throw std::invalid_argument("ends, starts and sums are of different numbers of records");
    const SumKind& kind = sum_kind(name);
    const nb::gil_scoped_release release;
    check_runs(run, num_runs, dst_nbytes, src_nbytes);
    std::size_t i = 0;
    for (std::size_t record = 0; record < num_records; ++record) {
        const auto end = static_cast<std::size_t>(ends.data()[record]);
        if (end < i || end > num_runs) throw std::invalid_argument("ends do not ascend to the number of runs");
        for (const std::int64_t* one = run + 3 * i; i < end; ++i, one += 3)
            if ((one[2] | (one[into_records] - starts.data()[record])) % static_cast<int>(kSumLineNbytes) != 0 ||
                one[into_records] < starts.data()[record])
                throw std::invalid_argument("run " + std::to_string(i) + " is not of whole lines of its record");
    }
    if (i != num_runs) throw std::invalid_argument("ends do not ascend to the number of runs");
    i = 0;
    for (std::size_t record = 0; record < num_records; ++record) {
        Lanes lanes;
        for (; i < static_cast<std::size_t>(ends.data()[record]); ++i, run += 3) {
            prefetch_ahead(from, run, i, num_runs);
            const auto at = static_cast<std::uint64_t>(run[into_records] - starts.data()[record]);
            kind.copy(to + run[1], from + run[0], static_cast<std::size_t>(run[2]), at / kSumLineNbytes, lanes);
        }
        const Sums of_record = lanes.folded();
        sums.data()[2 * record] += of_record.product;
        sums.data()[2 * record + 1] += of_record.plain;
    }
    store_fence();
}

std::tuple<std::uint64_t, std::uint64_t> sum_bytes_py(const Bytes& data, const std::string& name) {
    const SumKind& kind = sum_kind(name);
    const nb::gil_scoped_release release;
    const Sums sums = sum_bytes(kind, reinterpret_cast<const std::byte*>(data.data()), data.shape(0));
    return {sums.product, sums.plain};
}

std::vector<std::string> sum_kind_names() {
    std::vector<std::string> names;
    for (const SumKind& kind : sum_kinds()) names.emplace_back(kind.name);
    return names;
}

std::vector<std::string> kinds() {
    std::vector<std::string> names;
    for (const StoreKind& kind : store_kinds()) names.emplace_back(kind.name);
    return names;
}

}  // namespace
}  // namespace pdlink::copy

NB_MODULE(_copy, m) {
    using namespace pdlink;
    using namespace pdlink::copy;

    nb::class_<PeerMemory>(m, "PeerMemory")
        .def_prop_ro("regions", &regions_of)
        .def("enter", [](PeerMemory& memory) { return memory.gate().enter(); })
        .def("leave", [](PeerMemory& memory) { memory.gate().leave(); });

    add_engine<Copier>(m, "Copier")
        .def(nb::init<int>(), "num_threads"_a = 1)
        .def("add_region", &Copier::add_region, "ptr"_a, "nbytes"_a)
        .def("invite", &invite, "peer"_a)
        .def("connect", &connect, "peer"_a, "pid"_a, "regions"_a, "gate"_a)
        .def("memory_of", &Copier::memory_of, "peer"_a)
        .def("computing", &Copier::computing, "on"_a)
        .def("ranges_taken",
             [](Copier& copier) {
                 const auto taken = copier.ranges_taken();
                 return nb::make_tuple(taken[0], taken[1]);
             })
        .def(
            "close", [](Copier& copier, double grace_s) { copier.close(grace_s); }, "grace_s"_a,
            nb::call_guard<nb::gil_scoped_release>());

    m.def("memcpy_runs", &memcpy_runs, "dst"_a, "src"_a, "runs"_a.noconvert());
    m.def("nt_runs", &nt_runs, "dst"_a, "src"_a, "runs"_a.noconvert(), "kind"_a = "");
    m.def("store_kinds", &kinds);
    m.def("nt_runs_summed", &nt_runs_summed, "dst"_a, "src"_a, "runs"_a.noconvert(), "ends"_a.noconvert(),
          "starts"_a.noconvert(), "sums"_a.noconvert(), "into_records"_a, "kind"_a = "");
    m.def("sum_bytes", &sum_bytes_py, "data"_a, "kind"_a = "");
    m.def("sum_kinds", &sum_kind_names);
}
