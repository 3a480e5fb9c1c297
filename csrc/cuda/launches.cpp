#include "cuda/launches.h"

#include <algorithm>
#include <cstring>
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

// All addresses and steps of one side, or-ed: what divides this divides each of them.
std::uint64_t address_bits(const Rows& rows, const Request& request) {
    const Side& side = rows.side;
    std::uint64_t bits = side.table ? rows.alignment : side.base;
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
    return bits;
}

// Heads that follow each other on both sides are one.
void merge_heads(Request& request) {
    const auto nbytes = static_cast<std::int64_t>(request.head_nbytes);
    if (request.src.side.head_stride != nbytes || request.dst.side.head_stride != nbytes) return;
    request.head_nbytes *= request.num_heads;
    request.num_heads = 1;
}

// Bytes of the widest unit that every address and length allows.
std::uint32_t widest_unit(const Request& request) {
    const std::uint64_t bits =
        address_bits(request.src, request) | address_bits(request.dst, request) | request.head_nbytes;
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(16, bits & -bits));
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

template <int kUnitNbytes, bool kFlat>
void loop(const Launch& launch) {
    const auto reshape = argument_of<Reshape>(launch);
    for (std::uint32_t plane = 0; plane < launch.grid_y; ++plane)
        for (std::uint32_t block = 0; block < launch.grid_x; ++block)
            for (std::uint32_t thread = 0; thread < kThreads; ++thread)
                move_strand<kUnitNbytes, kFlat>(reshape, plane, block * kThreads + thread);
}

void loop_runs(const Launch& launch) {
    const auto list = argument_of<CopyRuns>(launch);
    for (std::uint32_t block = 0; block < launch.grid_x; ++block)
        for (std::uint32_t thread = 0; thread < kThreads; ++thread) copy_shares(list, block, launch.grid_x, thread);
}

#define PDLINK_LOOPS(nbytes) \
    {"pdlink_copy" #nbytes "_flat", loop<nbytes, true>}, {"pdlink_copy" #nbytes, loop<nbytes, false>},
constexpr Loops kLoops[] = {PDLINK_UNITS(PDLINK_LOOPS){"pdlink_runs", loop_runs}};

}  // namespace

std::vector<Launch> plan_reshape(Request request) {
    require(request.num_layers && request.num_parts && request.num_heads && request.head_nbytes, "a count is 0");
    require(request.head_nbytes <= kMaxIndex, "a row is too long");
    require(std::uint64_t{request.num_layers} * request.num_parts <= kMaxGridY, "more than 65,535 planes");
    require(request.max_strands > 0 && request.max_strands <= kMaxIndex, "max_strands must be 1 .. 2^31 - 1");
    require(
        (request.src.side.slots | request.dst.side.slots | request.src.side.table | request.dst.side.table) % 8 == 0,
        "slots and tables are int64 and must lie at multiples of 8 bytes");
    require(request.refused % 4 == 0, "refused must lie at a multiple of 4 bytes");
    merge_heads(request);
    const std::uint32_t unit_nbytes = widest_unit(request);
    const std::uint64_t units_per_head = request.head_nbytes / unit_nbytes;
    require(units_per_head <= kMaxIndex && units_per_head * request.num_heads <= kMaxIndex, "a row is too long");
    const std::uint64_t units_per_row = units_per_head * request.num_heads;
    const std::uint64_t strands_per_row = (units_per_row + kUnitsPerStrand - 1) / kUnitsPerStrand;
    const std::uint64_t tokens_per_launch = request.max_strands / strands_per_row;
    require(tokens_per_launch > 0, "a row is too long");

    Reshape reshape;
    reshape.src = request.src.side;
    reshape.dst = request.dst.side;
    reshape.num_parts = Divider(request.num_parts);
    reshape.strands_per_row = Divider(static_cast<std::uint32_t>(strands_per_row));
    reshape.units_per_head = Divider(static_cast<std::uint32_t>(units_per_head));
    reshape.units_per_row = static_cast<std::uint32_t>(units_per_row);
    reshape.refused = request.refused;
    const bool flat = request.num_heads == 1;
    const std::string kernel = "pdlink_copy" + std::to_string(unit_nbytes) + (flat ? "_flat" : "");

    std::vector<Launch> launches;
    for (std::uint64_t left = request.num_tokens; left > 0;) {
        const std::uint64_t tokens = std::min(left, tokens_per_launch);
        reshape.num_strands = static_cast<std::uint32_t>(tokens * strands_per_row);
        launches.push_back(make_launch(kernel, reshape.num_strands, request.num_layers * request.num_parts, reshape));
        shift_tokens(reshape.src, tokens);
        shift_tokens(reshape.dst, tokens);
        left -= tokens;
    }
    return launches;
}

Launch plan_runs(std::uint64_t runs, std::uint64_t num_runs, std::uint64_t longest_nbytes, std::uint32_t max_blocks) {
    require(num_runs > 0 && longest_nbytes > 0, "no runs");
    require(runs % 8 == 0, "runs are int64 and must lie at a multiple of 8 bytes");
    // Very many or very long runs: fewer, longer segments, so that the shares can still be counted.
    std::uint64_t segment = kSegmentNbytes;
    while ((longest_nbytes + segment - 1) / segment > kMaxIndex / kLanes / num_runs && segment < longest_nbytes)
        segment *= 2;
    const std::uint64_t segments = (longest_nbytes + segment - 1) / segment;
    require(num_runs <= kMaxIndex / kLanes / segments, "too many runs for one launch");
    CopyRuns list;
    list.runs = runs;
    list.num_shares = static_cast<std::uint32_t>(num_runs * segments);
    list.segments = Divider(static_cast<std::uint32_t>(segments));
    list.segment_nbytes = segment;
    Launch launch = make_launch("pdlink_runs", std::uint64_t{list.num_shares} * kLanes, 1, list);
    launch.grid_x = std::min(launch.grid_x, max_blocks);
    return launch;
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
