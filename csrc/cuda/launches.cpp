#include "cuda/launches.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>

#include "cuda/kernels.h"

namespace pdlink::cuda {
namespace {

constexpr std::uint32_t kMaxGridY = 65535;
constexpr std::uint64_t kMaxIndex = 0x7fffffff;  // what a Divider takes

// About what one warp copies with a few loads in flight per lane; longer runs are shared out.
constexpr std::uint64_t kSegmentNbytes = 16 << 10;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

std::uint32_t dst_itemsize(const Request& request) {
    switch (request.conversion) {
        case Conversion::kQuantize:
            return 1;
        case Conversion::kDequantize:
            return 2;
        case Conversion::kNone:
            break;
    }
    return request.itemsize;
}

// All addresses and steps of one side, or-ed: what divides this divides each of them.
std::uint64_t address_bits(const Place& place, const Request& request) {
    const Side& side = place.side;
    std::uint64_t bits = side.table ? place.alignment : side.base;
    const auto step = [&](std::uint64_t count, std::int64_t stride) {
        if (count > 1) bits |= static_cast<std::uint64_t>(stride);
    };
    if (!side.table) {
        step(request.num_layers, side.layer_stride);
        step(request.num_parts, side.part_stride);
    }
    step(2, side.block_stride);
    step(side.block_tokens.divisor(), side.token_stride);
    step(request.num_heads, side.head_stride);
    step(request.num_chunks, side.chunk_stride);
    return bits;
}

// Chunks that follow each other on both sides are one chunk, heads likewise.
void merge(Request& request) {
    Side &src = request.src.side, &dst = request.dst.side;
    const auto follow = [&](std::int64_t src_stride, std::int64_t dst_stride) {
        return src_stride == std::int64_t{request.chunk_elements} * request.itemsize &&
               dst_stride == std::int64_t{request.chunk_elements} * dst_itemsize(request);
    };
    const auto fits = [&](std::uint32_t count) {
        return std::uint64_t{request.chunk_elements} * count <= std::numeric_limits<std::uint32_t>::max();
    };
    if (request.num_chunks > 1 && follow(src.chunk_stride, dst.chunk_stride) && fits(request.num_chunks)) {
        request.chunk_elements *= request.num_chunks;
        request.num_chunks = 1;
    }
    const bool one_scale = request.scales == 0 || request.scale_head_stride == 0;
    if (request.num_chunks == 1 && one_scale && follow(src.head_stride, dst.head_stride) && fits(request.num_heads)) {
        request.chunk_elements *= request.num_heads;
        request.num_heads = 1;
    }
}

struct Unit {
    const char* kernel;
    std::uint32_t elements;
};

Unit widest_unit(const Request& request) {
    const std::uint64_t src = address_bits(request.src, request), dst = address_bits(request.dst, request);
    require(src % request.itemsize == 0, "a source address or stride is no multiple of the element size");
    require(dst % dst_itemsize(request) == 0, "a destination address or stride is no multiple of the element size");
    const bool wide = (src | dst) % 16 == 0 && request.chunk_elements % 16 == 0;
    if (request.conversion == Conversion::kQuantize) return wide ? Unit{"quantize16", 16} : Unit{"quantize1", 1};
    if (request.conversion == Conversion::kDequantize)
        return wide ? Unit{"dequantize16", 16} : Unit{"dequantize1", 1};
    const std::uint64_t bits = src | dst | std::uint64_t{request.chunk_elements} * request.itemsize;
    if (bits % 16 == 0) return {"copy16", 16 / request.itemsize};
    if (bits % 8 == 0) return {"copy8", 8 / request.itemsize};
    if (bits % 4 == 0) return {"copy4", 4 / request.itemsize};
    if (bits % 2 == 0) return {"copy2", 2 / request.itemsize};
    return {"copy1", 1};
}

template <class Argument>
Launch make_launch(std::string kernel, std::uint64_t num_threads, std::uint32_t grid_y, const Argument& argument) {
    static_assert(std::is_trivially_copyable_v<Argument>);
    Launch launch{std::move(kernel), static_cast<std::uint32_t>((num_threads + kThreads - 1) / kThreads), grid_y, {}};
    const auto bytes = std::as_bytes(std::span(&argument, 1));
    launch.argument.assign(bytes.begin(), bytes.end());
    return launch;
}

void shift_tokens(Side& side, std::uint64_t tokens) {
    if (side.slots)
        side.slots += tokens * 8;
    else
        side.first_slot += static_cast<std::int64_t>(tokens);
}

using Loop = void (*)(const Launch&);

struct Loops {
    const char* kernel;
    Loop run;
};

template <class Argument>
Argument argument_of(const Launch& launch) {
    Argument argument;
    require(launch.argument.size() == sizeof argument, "the argument of a launch has another size");
    std::memcpy(&argument, launch.argument.data(), sizeof argument);
    return argument;
}

template <class Move, bool kFlat>
void loop(const Launch& launch) {
    const auto job = argument_of<Reshape>(launch);
    for (std::uint32_t plane = 0; plane < launch.grid_y; ++plane)
        for (std::uint32_t block = 0; block < launch.grid_x; ++block)
            for (std::uint32_t thread = 0; thread < kThreads; ++thread)
                move_strand<Move, kFlat>(job, plane, block * kThreads + thread);
}

void loop_runs(const Launch& launch) {
    const auto job = argument_of<RunList>(launch);
    for (std::uint32_t block = 0; block < launch.grid_x; ++block)
        for (std::uint32_t thread = 0; thread < kThreads; ++thread)
            copy_share(job, (block * kThreads + thread) / kLanes, thread % kLanes);
}

#define PDLINK_LOOPS(name, Move) {"pdlink_" #name "_flat", loop<Move, true>}, {"pdlink_" #name, loop<Move, false>},
constexpr Loops kLoops[] = {PDLINK_MOVES(PDLINK_LOOPS){"pdlink_runs", loop_runs}};

}  // namespace

std::vector<Launch> plan_reshape(Request request) {
    require(request.itemsize == 1 || request.itemsize == 2 || request.itemsize == 4 || request.itemsize == 8 ||
                request.itemsize == 16,
            "itemsize must be 1, 2, 4, 8 or 16 bytes");
    require(request.conversion != Conversion::kQuantize || request.itemsize == 2, "only bfloat16 can be quantised");
    require(request.conversion != Conversion::kDequantize || request.itemsize == 1,
            "only float8_e4m3fn can be dequantised");
    require(
        request.num_layers && request.num_parts && request.num_heads && request.num_chunks && request.chunk_elements,
        "a count is 0");
    require(std::uint64_t{request.num_layers} * request.num_parts <= kMaxGridY, "more than 65,535 planes");
    require(request.max_strands > 0 && request.max_strands <= kMaxIndex, "max_strands must be 1 .. 2^31 - 1");
    require(
        (request.src.side.slots | request.dst.side.slots | request.src.side.table | request.dst.side.table) % 8 == 0,
        "slots and tables are int64 and must lie at multiples of 8 bytes");
    require((request.scales | request.refused) % 4 == 0, "scales and refused must lie at multiples of 4 bytes");
    merge(request);
    const Unit unit = widest_unit(request);
    const std::uint64_t units_per_chunk = request.chunk_elements / unit.elements;
    const std::uint64_t units_per_head = units_per_chunk * request.num_chunks;
    require(units_per_head <= kMaxIndex && units_per_head * request.num_heads <= kMaxIndex, "a row is too long");
    const std::uint64_t units_per_row = units_per_head * request.num_heads;
    const std::uint64_t strands_per_row = (units_per_row + kUnitsPerStrand - 1) / kUnitsPerStrand;
    const std::uint64_t tokens_per_launch = request.max_strands / strands_per_row;
    require(tokens_per_launch > 0, "a row is too long");

    Reshape job;
    job.src = request.src.side;
    job.dst = request.dst.side;
    job.num_parts = Divider(request.num_parts);
    job.strands_per_row = Divider(static_cast<std::uint32_t>(strands_per_row));
    job.units_per_head = Divider(static_cast<std::uint32_t>(units_per_head));
    job.units_per_chunk = Divider(static_cast<std::uint32_t>(units_per_chunk));
    job.units_per_row = static_cast<std::uint32_t>(units_per_row);
    job.scales = request.scales;
    job.scale_layer_stride = request.scale_layer_stride;
    job.scale_part_stride = request.scale_part_stride;
    job.scale_head_stride = request.scale_head_stride;
    job.refused = request.refused;
    const bool flat = request.num_heads == 1 && request.num_chunks == 1;
    const std::string kernel = std::string("pdlink_") + unit.kernel + (flat ? "_flat" : "");

    std::vector<Launch> launches;
    for (std::uint64_t left = request.num_tokens; left > 0;) {
        const std::uint64_t tokens = std::min(left, tokens_per_launch);
        job.num_strands = static_cast<std::uint32_t>(tokens * strands_per_row);
        launches.push_back(make_launch(kernel, job.num_strands, request.num_layers * request.num_parts, job));
        shift_tokens(job.src, tokens);
        shift_tokens(job.dst, tokens);
        left -= tokens;
    }
    return launches;
}

Launch plan_runs(std::uint64_t runs, std::uint64_t num_runs, std::uint64_t longest_nbytes) {
    require(num_runs > 0 && longest_nbytes > 0, "no runs");
    require(runs % 8 == 0, "runs are int64 and must lie at a multiple of 8 bytes");
    // Very many or very long runs: fewer, longer segments, so that the shares can still be counted.
    std::uint64_t segment = kSegmentNbytes;
    while ((longest_nbytes + segment - 1) / segment > kMaxIndex / kLanes / num_runs && segment < longest_nbytes)
        segment *= 2;
    const std::uint64_t segments = (longest_nbytes + segment - 1) / segment;
    require(num_runs <= kMaxIndex / kLanes / segments, "too many runs for one launch");
    RunList job;
    job.runs = runs;
    job.num_shares = static_cast<std::uint32_t>(num_runs * segments);
    job.segments = Divider(static_cast<std::uint32_t>(segments));
    job.segment_nbytes = segment;
    return make_launch("pdlink_runs", std::uint64_t{job.num_shares} * kLanes, 1, job);
}

void run_on_cpu(const Launch& launch) {
    for (const Loops& loops : kLoops)
        if (launch.kernel == loops.kernel) return loops.run(launch);
    throw std::invalid_argument("there is no kernel " + launch.kernel);
}

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const Loops& loops : kLoops) names.emplace_back(loops.kernel);
    return names;
}

}  // namespace pdlink::cuda
