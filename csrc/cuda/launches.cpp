#include "cuda/launches.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

#include "cuda/kernels.h"

namespace pdlink::cuda {
namespace {

constexpr std::uint32_t kMaxGridY = 65535;
constexpr std::uint64_t kMaxIndex = 0x7fffffff;  // what a Divider takes

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// All addresses and steps of one side, or-ed: what divides this divides each of them.
std::uint64_t address_bits(const Rows& rows, const Request& request) {
    const Side& side = rows.side;
    std::uint64_t bits = rows.alignment ? rows.alignment : side.base;
    const auto step = [&](std::uint64_t count, std::int64_t stride) {
        if (count > 1) bits |= static_cast<std::uint64_t>(stride);
    };
    if (!side.table) {
        step(request.num_layers, side.layer_stride);
        step(request.num_parts, side.part_stride);
    }
    if (!rows.alignment || side.table) step(2, side.block_stride);
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

// Of the grids of at most so many blocks, one whose busiest block does least. Blocks take strands and planes in
// turns.
std::pair<std::uint32_t, std::uint32_t> grid_of(std::uint32_t num_planes, std::uint32_t num_blocks,
                                                std::uint32_t max_blocks) {
    constexpr std::uint32_t kTried = 16;
    std::pair<std::uint32_t, std::uint32_t> best;
    std::uint64_t least = ~std::uint64_t{0};
    const std::uint32_t first = (num_planes - 1) / max_blocks + 1, last = std::min(num_planes, first + kTried);
    for (std::uint32_t turns = first; turns <= last; ++turns) {
        const std::uint32_t y = (num_planes - 1) / turns + 1, x = std::min(num_blocks, max_blocks / y);
        const std::uint64_t work = std::uint64_t{turns} * ((num_blocks - 1) / x + 1);
        if (work < least) best = {x, y}, least = work;
    }
    return best;
}

Launch make_launch(const std::string& kernel, const Reshape& reshape, std::uint32_t max_blocks) {
    const auto [grid_x, grid_y] =
        grid_of(reshape.num_planes, (reshape.num_strands + kThreads - 1) / kThreads, max_blocks);
    Launch launch{kernel, grid_x, grid_y, {}};
    const auto bytes = std::as_bytes(std::span(&reshape, 1));
    launch.argument.assign(bytes.begin(), bytes.end());
    return launch;
}

// The tokens that follow the first `tokens` of a request.
void shift_tokens(Request& request, std::uint64_t tokens) {
    const std::uint64_t skip = request.skip + tokens, units = skip / request.unit_tokens;
    request.skip = static_cast<std::uint32_t>(skip % request.unit_tokens);
    if (!request.words.empty()) request.words = request.words.subspan(request.words_of_unit() * units);
    for (Side* side : {&request.src.side, &request.dst.side})
        if (side->list)
            side->list += units * side->list_step;
        else
            side->first_slot += static_cast<std::int64_t>(tokens);
    request.num_tokens -= tokens;
}

using Loop = void (*)(const Launch&);

struct Loops {
    const char* kernel;
    Loop run;
};

template <int kUnitNbytes, bool kFlat>
void loop(const Launch& launch) {
    Reshape reshape;
    if (launch.argument.size() != sizeof reshape) throw std::invalid_argument("argument of another kernel");
    std::memcpy(&reshape, launch.argument.data(), sizeof reshape);
    for (std::uint32_t y = 0; y < launch.grid_y; ++y)
        for (std::uint32_t x = 0; x < launch.grid_x; ++x)
            for (std::uint32_t thread = 0; thread < kThreads; ++thread)
                move_strands<kUnitNbytes, kFlat>(reshape, {x, launch.grid_x}, {y, launch.grid_y}, thread);
}

#define PDLINK_LOOPS(nbytes) \
    {"pdlink_copy" #nbytes "_flat", loop<nbytes, true>}, {"pdlink_copy" #nbytes, loop<nbytes, false>},
constexpr Loops kLoops[] = {PDLINK_UNITS(PDLINK_LOOPS)};

}  // namespace

std::vector<Launch> plan_reshape(Request request) {
    require(request.num_layers && request.num_parts && request.num_heads && request.head_nbytes, "a count is 0");
    require(request.head_nbytes <= kMaxIndex, "a row is too long");
    const std::uint64_t num_planes = std::uint64_t{request.num_layers} * request.num_parts;
    require(num_planes <= kMaxGridY, "more than 65,535 planes");
    require(request.max_strands > 0 && request.max_strands <= kMaxIndex, "max_strands must be 1 .. 2^31 - 1");
    require(request.max_blocks > 0, "max_blocks must be 1 or more");
    require(request.skip < request.unit_tokens && request.unit_tokens <= kMaxIndex, "skip must be less than a unit");
    require((request.src.side.table | request.dst.side.table) % 8 == 0 &&
                (request.src.side.list | request.dst.side.list) % (request.is_wide ? 8 : 4) == 0,
            "lists and tables must lie at multiples of the bytes of a number");
    require(request.refused % 4 == 0, "refused must lie at a multiple of 4 bytes");
    require(request.words.size_bytes() <= kInlineNbytes, "too many pairs for an argument");
    require(request.words.empty() || request.num_units() <= request.words.size() / request.words_of_unit(),
            "the pairs do not cover all tokens");
    merge_heads(request);
    const std::uint32_t unit_nbytes = widest_unit(request);
    const std::uint64_t units_per_head = request.head_nbytes / unit_nbytes;
    require(units_per_head <= kMaxIndex && units_per_head * request.num_heads <= kMaxIndex, "a row is too long");
    const std::uint64_t units_per_row = units_per_head * request.num_heads;
    const std::uint64_t strands_per_row = (units_per_row + kUnitsPerStrand - 1) / kUnitsPerStrand;
    const std::uint64_t tokens_per_launch =
        std::min<std::uint64_t>(request.max_strands / strands_per_row, kMaxIndex - request.unit_tokens + 1);
    require(tokens_per_launch > 0, "a row is too long");

    Reshape reshape;
    reshape.num_parts = Divider(request.num_parts);
    reshape.strands_per_row = Divider(static_cast<std::uint32_t>(strands_per_row));
    reshape.units_per_head = Divider(static_cast<std::uint32_t>(units_per_head));
    reshape.unit_tokens = Divider(request.unit_tokens);
    reshape.units_per_row = static_cast<std::uint32_t>(units_per_row);
    reshape.num_planes = static_cast<std::uint32_t>(num_planes);
    reshape.is_wide = request.is_wide;
    reshape.is_inline = !request.words.empty();
    reshape.refused = request.refused;
    const bool flat = request.num_heads == 1;
    const std::string kernel = "pdlink_copy" + std::to_string(unit_nbytes) + (flat ? "_flat" : "");

    std::vector<Launch> launches;
    while (request.num_tokens > 0) {
        const std::uint64_t tokens = std::min(request.num_tokens, tokens_per_launch);
        reshape.src = request.src.side;
        reshape.dst = request.dst.side;
        reshape.skip = request.skip;
        reshape.num_strands = static_cast<std::uint32_t>(tokens * strands_per_row);
        std::ranges::copy(request.words, reshape.words);
        launches.push_back(make_launch(kernel, reshape, request.max_blocks));
        shift_tokens(request, tokens);
    }
    return launches;
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
