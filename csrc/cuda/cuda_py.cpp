// Python's view of the kernels and of the gate; `pdlink/_cuda.pyi` is its manual. Nothing here needs CUDA: launches
// are made and, on a CPU, run here; on a GPU the driver is called by `pdlink/cuda/driver.py`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <span>
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
#include "cuda/moves.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::cuda {
namespace {

Rows make_rows(std::uint64_t base, std::uint64_t table, std::uint64_t alignment, std::int64_t layer_stride,
               std::int64_t part_stride, std::int64_t block_stride, std::int64_t token_stride,
               std::int64_t head_stride, std::uint32_t block_tokens, std::uint64_t slots, std::uint32_t slot_step,
               std::int64_t first_slot, std::int64_t num_slots) {
    if (block_tokens == 0 || block_tokens > 1u << 31) throw std::invalid_argument("block_tokens must be 1 .. 2^31");
    Rows rows;
    rows.alignment = alignment;
    rows.side = {base,        table, layer_stride, part_stride, block_stride,          token_stride,
                 head_stride, slots, first_slot,   num_slots,   Divider(block_tokens), slot_step};
    return rows;
}

Request request_of(const Rows& src, const Rows& dst, std::uint64_t num_tokens, std::uint32_t num_layers,
                   std::uint32_t num_parts, std::uint32_t num_heads, std::uint64_t head_nbytes) {
    Request request;
    request.src = src;
    request.dst = dst;
    request.num_tokens = num_tokens;
    request.num_layers = num_layers;
    request.num_parts = num_parts;
    request.num_heads = num_heads;
    request.head_nbytes = head_nbytes;
    return request;
}

std::vector<Launch> plan(const Rows& src, const Rows& dst, std::uint64_t num_tokens, std::uint32_t num_layers,
                         std::uint32_t num_parts, std::uint32_t num_heads, std::uint64_t head_nbytes,
                         std::uint64_t refused, std::uint32_t max_strands, std::uint32_t max_blocks) {
    Request request = request_of(src, dst, num_tokens, num_layers, num_parts, num_heads, head_nbytes);
    request.refused = refused;
    request.max_strands = max_strands;
    request.max_blocks = max_blocks;
    return plan_reshape(request);
}

using Extents = std::vector<std::tuple<std::uint64_t, std::uint64_t>>;

std::vector<Extent> extents_of(const Extents& given) {
    std::vector<Extent> extents;
    extents.reserve(given.size());
    for (const auto& [base, nbytes] : given) extents.push_back({base, nbytes});
    return extents;
}

Moves* moves_of_runs(const std::vector<PyRunList>& lists, const Extents& local, const Extents& remote) {
    const auto views = views_of(lists);
    const std::vector<Extent> from = extents_of(local), to = extents_of(remote);
    const nb::gil_scoped_release release;
    return new Moves(views, from, to, {});
}

using PyUnits = nb::ndarray<const std::int32_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
// As `LayerClass.strided` and `LayerTemplate.parts` of pdlink/kv/plan.py: heads and their bytes, then tokens of a
// block and strides of blocks, tokens and heads of the source and of the destination; region and offset of both.
using PyShape = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                           std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using PyParts = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>>;
using PyLayers = std::vector<std::tuple<PyShape, PyParts>>;

PlanOfLayers plan_of(const PyUnits& pairs, std::int64_t unit_tokens, std::int64_t skip, std::int64_t num_tokens,
                     const PyLayers& layers) {
    PlanOfLayers plan{{pairs.data(), 2 * pairs.shape(0)}, unit_tokens, skip, num_tokens, {}};
    for (const auto& [shape, parts] : layers) {
        const auto& [heads, head_nbytes, src_tokens, src_block, src_token, src_head, dst_tokens, dst_block, dst_token,
                     dst_head] = shape;
        PlanLayer& layer = plan.layers.emplace_back();
        layer.shape = {heads,
                       head_nbytes,
                       {src_tokens, src_block, src_token, src_head},
                       {dst_tokens, dst_block, dst_token, dst_head}};
        for (const auto& [src_region, src_offset, dst_region, dst_offset] : parts)
            layer.parts.push_back({src_region, src_offset, dst_region, dst_offset});
    }
    return plan;
}

Moves moves_of_plan(const PyUnits& pairs, std::int64_t unit_tokens, std::int64_t skip, std::int64_t num_tokens,
                    const PyLayers& layers, const Extents& local, const Extents& remote) {
    const PlanOfLayers plan = plan_of(pairs, unit_tokens, skip, num_tokens, layers);
    const std::vector<Extent> from = extents_of(local), to = extents_of(remote);
    const nb::gil_scoped_release release;
    return Moves(plan, from, to, {});
}

using PyPairs = nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

Moves moves_of_pairs(const Rows& src, const Rows& dst, const PyPairs& pairs, std::uint32_t unit_tokens,
                     std::uint32_t skip, std::uint64_t num_tokens, std::uint32_t num_parts, std::uint32_t num_heads,
                     std::uint64_t head_nbytes) {
    Request request = request_of(src, dst, num_tokens, 1, num_parts, num_heads, head_nbytes);
    request.unit_tokens = unit_tokens;
    request.skip = skip;
    if (unit_tokens == 0 || request.num_units() > pairs.shape(0))
        throw std::invalid_argument("the pairs do not cover all tokens");
    request.src.side.list_step = request.dst.side.list_step = 16;
    request.dst.side.list = 8;
    MovePart part{{}, true, {request}, num_tokens * num_parts * num_heads * head_nbytes};
    const auto bytes = std::as_bytes(std::span(pairs.data(), 2 * pairs.shape(0)));
    part.list.assign(bytes.begin(), bytes.end());
    return Moves(std::move(part));
}

// What failed; "" if nothing did.
const char* call_of(const Failure& failure) { return failure.call ? failure.call : ""; }

// As `Launches.slots` of pdlink/cuda/launches.py gives it.
using PySlot = std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uintptr_t>;

Slot slot_of(const PySlot& given) {
    const auto& [host, device, nbytes, copy, event] = given;
    return {{reinterpret_cast<std::byte*>(host), device, nbytes, copy}, event};
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

std::uint64_t submit_plan(GpuCopier& copier, const std::string& peer, const PyUnits& pairs, std::int64_t unit_tokens,
                          std::int64_t skip, std::int64_t num_tokens, const PyLayers& layers, double timeout_s,
                          const Pairs& after) {
    const PlanOfLayers plan = plan_of(pairs, unit_tokens, skip, num_tokens, layers);
    std::vector<Mark> marks;
    for (const auto& [event, stream] : after) marks.push_back({event, stream});
    const nb::gil_scoped_release release;
    return copier.submit(peer, plan, timeout_s, std::move(marks));
}

}  // namespace
}  // namespace pdlink::cuda

NB_MODULE(_cuda, m) {
    using namespace pdlink;
    using namespace pdlink::cuda;

    add_engine<GpuCopier>(m, "GpuCopier")
        .def(nb::new_(&make_copier), "launcher"_a, "slots"_a, "streams"_a, "launch_nbytes"_a)
        .def("submit_plan", &submit_plan, "peer"_a, "pairs"_a.noconvert(), "unit_tokens"_a, "skip"_a, "num_tokens"_a,
             "layers"_a, "timeout_s"_a, "after"_a)
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
                                    "slot_step"_a = 8, "first_slot"_a = 0, "num_slots"_a);
    nb::class_<Launch>(m, "Launch")
        .def_ro("kernel", &Launch::kernel)
        .def_prop_ro("grid", [](const Launch& launch) { return std::make_tuple(launch.grid_x, launch.grid_y); })
        .def_prop_ro("argument",
                     [](const Launch& launch) { return nb::bytes(launch.argument.data(), launch.argument.size()); });
    m.def("plan_reshape", &plan, "src"_a, "dst"_a, nb::kw_only(), "num_tokens"_a, "num_layers"_a = 1,
          "num_parts"_a = 1, "num_heads"_a = 1, "head_nbytes"_a, "refused"_a = 0, "max_strands"_a = 0x7fffffff,
          "max_blocks"_a = kAnyBlocks);
    m.def("run_on_cpu", &run_on_cpu, "launch"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("kernel_names", &kernel_names);
    m.def("fatbin", [] { return nb::bytes(fatbin().data(), fatbin().size()); });
    m.def(
        "divide", [](std::uint32_t divisor, std::int64_t n) { return Divider(divisor).divide_any(n); }, "divisor"_a,
        "n"_a);
    m.attr("THREADS") = kThreads;

    nb::class_<Moves>(m, "Moves")
        .def(nb::new_(&moves_of_runs), "lists"_a.noconvert(), "local"_a, "remote"_a)
        .def_prop_ro("num_launches", &Moves::num_launches)
        .def_static("of_plan", &moves_of_plan, "pairs"_a.noconvert(), "unit_tokens"_a, "skip"_a, "num_tokens"_a,
                    "layers"_a, "local"_a, "remote"_a)
        .def_static("of_pairs", &moves_of_pairs, "src"_a, "dst"_a, "pairs"_a.noconvert(), nb::kw_only(),
                    "unit_tokens"_a, "skip"_a, "num_tokens"_a, "num_parts"_a, "num_heads"_a, "head_nbytes"_a);
    nb::class_<KernelLauncher>(m, "KernelLauncher")
        .def(nb::init<const std::string&, std::uintptr_t, std::vector<Kernel>, std::uint32_t>(), "library"_a,
             "context"_a, "kernels"_a, "max_blocks"_a = kAnyBlocks)
        .def(
            "launch",
            [](const KernelLauncher& launcher, Moves& moves, const PySlot& given, std::uintptr_t work) {
                const Slot slot = slot_of(given);
                const nb::gil_scoped_release release;
                if (moves.num_parts() != 1) throw std::invalid_argument("expected moves of one part");
                bool begun = false;
                const Failure failure = launcher.launch(moves, slot.list, slot.event, work, begun);
                return std::make_tuple(call_of(failure), failure.number, begun);
            },
            "moves"_a, "slot"_a, "work"_a)
        .def(
            "ring_after",
            [](const KernelLauncher& launcher, std::uintptr_t event, int fd, std::uintptr_t bell) {
                const nb::gil_scoped_release release;
                const Failure failure = launcher.ring_after(event, fd, bell);
                return std::make_tuple(call_of(failure), failure.number);
            },
            "event"_a, "fd"_a, "bell"_a);
}
