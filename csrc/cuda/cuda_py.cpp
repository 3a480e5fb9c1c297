// Python's view of the kernels and of the gate; `pdlink/_cuda.pyi` is its manual. Nothing here needs CUDA: launches
// are made and, on a CPU, run here; on a GPU the driver is called by `pdlink/cuda/driver.py`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/gate_py.h"
#include "common/native_py.h"
#include "cuda/copier.h"
#include "cuda/fatbin.h"
#include "cuda/launcher.h"
#include "cuda/launches.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::cuda {
namespace {

Rows make_rows(std::uint64_t base, std::uint64_t table, std::uint64_t alignment, std::int64_t layer_stride,
               std::int64_t part_stride, std::int64_t block_stride, std::int64_t token_stride,
               std::int64_t head_stride, std::uint32_t block_tokens, std::uint64_t slots, std::int64_t first_slot,
               std::int64_t num_slots) {
    if (block_tokens == 0 || block_tokens > 1u << 31) throw std::invalid_argument("block_tokens must be 1 .. 2^31");
    Rows rows;
    rows.alignment = alignment;
    rows.side = {base,        table, layer_stride, part_stride, block_stride,         token_stride,
                 head_stride, slots, first_slot,   num_slots,   Divider(block_tokens)};
    return rows;
}

std::vector<Launch> plan(const Rows& src, const Rows& dst, std::uint64_t num_tokens, std::uint32_t num_layers,
                         std::uint32_t num_parts, std::uint32_t num_heads, std::uint64_t head_nbytes,
                         std::uint64_t refused, std::uint32_t max_strands) {
    Request request;
    request.src = src;
    request.dst = dst;
    request.num_tokens = num_tokens;
    request.num_layers = num_layers;
    request.num_parts = num_parts;
    request.num_heads = num_heads;
    request.head_nbytes = head_nbytes;
    request.refused = refused;
    request.max_strands = max_strands;
    return plan_reshape(request);
}

using Extents = std::vector<std::tuple<std::uint64_t, std::uint64_t>>;

std::vector<Extent> extents_of(const Extents& given) {
    std::vector<Extent> extents;
    extents.reserve(given.size());
    for (const auto& [base, nbytes] : given) extents.push_back({base, nbytes});
    return extents;
}

RunQueue* make_queue(const std::vector<PyRunList>& lists, const Extents& local, const Extents& remote) {
    const auto views = views_of(lists);
    const std::vector<Extent> from = extents_of(local), to = extents_of(remote);
    const nb::gil_scoped_release release;
    return new RunQueue(join_runs(views, from, to));
}

// What failed, and the driver's number for it; "" and 0 if nothing did.
std::tuple<const char*, int> told(const Failure& failure) {
    return {failure.call ? failure.call : "", failure.number};
}

// As `Launches.slots` of pdlink/cuda/launches.py gives it.
using PySlot = std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uintptr_t>;

Slot slot_of(const PySlot& given) {
    const auto& [host, device, nbytes, copy, event] = given;
    return {{reinterpret_cast<KernelRun*>(host), device, nbytes / sizeof(KernelRun), copy}, event};
}

PyGate invite(GpuCopier& copier, const std::string& peer) {
    GateName gate;
    {
        const nb::gil_scoped_release release;
        gate = copier.invite(peer);
    }
    return py_gate(gate);
}

using Pairs = std::vector<std::tuple<std::uintptr_t, std::uintptr_t>>;

GpuCopier* make_copier(const KernelLauncher& launcher, const std::vector<PySlot>& given, const Pairs& streams,
                       std::uint64_t launch_nbytes) {
    std::vector<Slot> slots;
    for (const PySlot& one : given) slots.push_back(slot_of(one));
    std::vector<LineStreams> lines;
    for (const auto& [work, bell] : streams) lines.push_back({work, bell});
    return new GpuCopier(launcher, std::move(slots), lines, launch_nbytes);
}

std::uint64_t submit_after(GpuCopier& copier, const std::string& peer, const std::vector<PyRunList>& lists,
                           double timeout_s, const Pairs& after) {
    const std::vector<RunList> views = views_of(lists);
    std::vector<Mark> marks;
    for (const auto& [event, stream] : after) marks.push_back({event, stream});
    const nb::gil_scoped_release release;
    return copier.submit(peer, views, timeout_s, std::move(marks));
}

}  // namespace
}  // namespace pdlink::cuda

NB_MODULE(_cuda, m) {
    using namespace pdlink;
    using namespace pdlink::cuda;

    add_engine<GpuCopier>(m, "GpuCopier")
        .def(nb::new_(&make_copier), "launcher"_a, "slots"_a, "streams"_a, "launch_nbytes"_a)
        .def("submit_after", &submit_after, "peer"_a, "lists"_a.noconvert(), "timeout_s"_a, "after"_a)
        .def("add_region", &GpuCopier::add_region, "ptr"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("invite", &invite, "peer"_a)
        .def(
            "connect",
            [](GpuCopier& copier, const std::string& peer, std::int64_t pid, const Extents& regions,
               const PyGate& gate) {
                const GateName name = gate_name(gate);
                std::vector<Extent> extents = extents_of(regions);
                const nb::gil_scoped_release release;
                copier.connect(peer, pid, std::move(extents), name);
            },
            "peer"_a, "pid"_a, "regions"_a, "gate"_a)
        .def(
            "close",
            [](GpuCopier& copier, double grace_s) {
                copier.close(grace_s);
                return copier.idle();
            },
            "grace_s"_a, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<Rows>(m, "Rows").def(nb::new_(&make_rows), nb::kw_only(), "base"_a = 0, "table"_a = 0,
                                    "alignment"_a = 0, "layer_stride"_a = 0, "part_stride"_a = 0, "block_stride"_a,
                                    "token_stride"_a, "head_stride"_a = 0, "block_tokens"_a, "slots"_a = 0,
                                    "first_slot"_a = 0, "num_slots"_a);
    nb::class_<Launch>(m, "Launch")
        .def_ro("kernel", &Launch::kernel)
        .def_prop_ro("grid", [](const Launch& launch) { return std::make_tuple(launch.grid_x, launch.grid_y); })
        .def_prop_ro("argument",
                     [](const Launch& launch) { return nb::bytes(launch.argument.data(), launch.argument.size()); });
    m.def("plan_reshape", &plan, "src"_a, "dst"_a, nb::kw_only(), "num_tokens"_a, "num_layers"_a = 1,
          "num_parts"_a = 1, "num_heads"_a = 1, "head_nbytes"_a, "refused"_a = 0, "max_strands"_a = 0x7fffffff);
    m.def("plan_runs", &plan_runs, "runs"_a, "num_runs"_a, "longest_nbytes"_a, "max_blocks"_a = kAnyBlocks);
    m.def("run_on_cpu", &run_on_cpu, "launch"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("kernel_names", &kernel_names);
    m.def("fatbin", [] { return nb::bytes(fatbin().data(), fatbin().size()); });
    m.def(
        "divide", [](std::uint32_t divisor, std::int64_t n) { return Divider(divisor).divide_any(n); }, "divisor"_a,
        "n"_a);
    m.attr("THREADS") = kThreads;

    nb::class_<RunQueue>(m, "RunQueue").def(nb::new_(&make_queue), "lists"_a.noconvert(), "local"_a, "remote"_a);
    nb::class_<KernelLauncher>(m, "KernelLauncher")
        .def(nb::init<const std::string&, std::uintptr_t, std::uintptr_t, std::uint32_t>(), "library"_a, "context"_a,
             "kernel"_a, "max_blocks"_a = kAnyBlocks)
        .def(
            "launch_runs",
            [](const KernelLauncher& launcher, RunQueue& runs, std::uint64_t launch_nbytes, const PySlot& given,
               std::uintptr_t work) {
                const Slot slot = slot_of(given);
                const nb::gil_scoped_release release;
                return told(launcher.launch_runs(runs, launch_nbytes, slot.list, slot.event, work));
            },
            "runs"_a, "launch_nbytes"_a, "slot"_a, "work"_a)
        .def(
            "ring_after",
            [](const KernelLauncher& launcher, std::uintptr_t event, int fd, std::uintptr_t bell) {
                const nb::gil_scoped_release release;
                return told(launcher.ring_after(event, fd, bell));
            },
            "event"_a, "fd"_a, "bell"_a);
}
