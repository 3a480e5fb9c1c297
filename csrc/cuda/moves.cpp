#include "cuda/moves.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace pdlink::cuda {
namespace {

constexpr std::int64_t kMost = 0x7fffffff;
constexpr std::uint32_t kMostPlanes = 65535;  // of a launch
// Runs of several lengths are cut into pieces of one, so that they are one launch: at least so long, and so many.
constexpr std::uint64_t kPieceNbytes = 4096, kMostPieces = 1024;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

struct Units {
    std::int64_t first = std::numeric_limits<std::int64_t>::max(), last = -1;  // of one side, by number
};

// a * b + c; false where that is no number.
bool multiply_add(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t& sum) {
    return !__builtin_mul_overflow(a, b, &sum) && !__builtin_add_overflow(sum, c, &sum);
}

// Where a part begins in this process. Whole blocks up to the last one that a unit is in lie in its region.
std::uint64_t checked(const char* name, std::span<const Extent> regions, std::int64_t region, std::int64_t offset,
                      const PlanSide& side, const PlanShape& shape, const Units& units, std::int64_t unit_tokens) {
    if (region < 0 || static_cast<std::uint64_t>(region) >= regions.size())
        refuse("no " + std::string(name) + " region " + std::to_string(region) + " among " +
               std::to_string(regions.size()));
    const Extent& extent = regions[static_cast<std::size_t>(region)];
    const std::int64_t last_slot = units.last * unit_tokens + unit_tokens - 1;  // both fit 31 bits
    std::int64_t end = 0;
    const bool fits = offset >= 0 && std::min({side.block_stride, side.token_stride, side.head_stride}) >= 0 &&
                      multiply_add(last_slot / side.block_tokens, side.block_stride, offset, end) &&
                      multiply_add(side.block_tokens - 1, side.token_stride, end, end) &&
                      multiply_add(shape.num_heads - 1, side.head_stride, end, end) &&
                      !__builtin_add_overflow(end, shape.head_nbytes, &end) &&
                      static_cast<std::uint64_t>(end) <= extent.nbytes;
    if (!fits)
        refuse(std::string(name) + " block " + std::to_string(last_slot / side.block_tokens) + " of a part at " +
               std::to_string(offset) + " is outside region " + std::to_string(region) + " of " +
               std::to_string(extent.nbytes) + " bytes");
    return extent.base + static_cast<std::uint64_t>(offset);
}

void check(const PlanOfLayers& plan) {
    const auto num_units = static_cast<std::int64_t>(plan.pairs.size() / 2);
    if (plan.unit_tokens < 1 || plan.unit_tokens > kMost || plan.skip < 0 || plan.skip >= plan.unit_tokens ||
        plan.num_tokens < 0 || plan.num_tokens > kMost - plan.skip ||
        (plan.num_tokens > 0 && (plan.skip + plan.num_tokens - 1) / plan.unit_tokens >= num_units))
        refuse(std::to_string(plan.num_tokens) + " tokens after " + std::to_string(plan.skip) + " in " +
               std::to_string(num_units) + " units of " + std::to_string(plan.unit_tokens));
    for (const PlanLayer& layer : plan.layers) {
        const PlanShape& shape = layer.shape;
        const auto counts = {shape.num_heads, shape.head_nbytes, shape.src.block_tokens, shape.dst.block_tokens};
        if (std::min(counts) < 1 || std::max(counts) > kMost || shape.num_heads > kMost / shape.head_nbytes ||
            layer.parts.empty() || layer.parts.size() > kMostPlanes)
            refuse("a count of a layer is not in 1 .. 2^31 - 1");
    }
}

Rows rows_of(const PlanSide& side, std::uint64_t base) {
    Rows rows;
    rows.side.base = base;
    rows.side.block_stride = side.block_stride;
    rows.side.token_stride = side.token_stride;
    rows.side.head_stride = side.head_stride;
    rows.side.block_tokens = Divider(static_cast<std::uint32_t>(side.block_tokens));
    rows.side.num_slots = std::numeric_limits<std::int64_t>::max();  // checked before
    return rows;
}

std::int64_t step(std::uint64_t from, std::uint64_t to) { return static_cast<std::int64_t>(to - from); }

// Layers of one shape whose parts lie evenly on both sides.
struct Planes {
    const PlanShape* shape;
    std::uint64_t src, dst, last_src, last_dst;  // where the first and the last layer begin
    std::int64_t src_part, dst_part, src_layer = 0, dst_layer = 0;
    std::uint32_t num_parts, num_layers = 1;

    bool take(const Planes& next) {
        if (*shape != *next.shape || num_parts != next.num_parts || src_part != next.src_part ||
            dst_part != next.dst_part)
            return false;
        const std::int64_t src_step = step(last_src, next.src), dst_step = step(last_dst, next.dst);
        if (num_layers > 1 && (src_step != src_layer || dst_step != dst_layer)) return false;
        src_layer = src_step, dst_layer = dst_step;
        last_src = next.src, last_dst = next.dst;
        ++num_layers;
        return true;
    }
};

void add_planes(std::vector<Planes>& all, const PlanShape& shape, std::span<const std::uint64_t> src,
                std::span<const std::uint64_t> dst) {
    bool even = true;
    for (std::size_t i = 2; i < src.size(); ++i)
        even = even && src[i] - src[i - 1] == src[1] - src[0] && dst[i] - dst[i - 1] == dst[1] - dst[0];
    const std::size_t together = even ? src.size() : 1;
    for (std::size_t i = 0; i < src.size(); i += together) {
        const bool several = together > 1;
        const Planes one{&shape,
                         src[i],
                         dst[i],
                         src[i],
                         dst[i],
                         several ? step(src[0], src[1]) : 0,
                         several ? step(dst[0], dst[1]) : 0,
                         0,
                         0,
                         static_cast<std::uint32_t>(together)};
        if (all.empty() || !all.back().take(one)) all.push_back(one);
    }
}

// A run as a row.
struct Row {
    std::uint64_t nbytes, width, src, dst;
};

}  // namespace

Moves::Moves(const PlanOfLayers& plan, std::span<const Extent> local, std::span<const Extent> remote,
             const PartLimits& limits) {
    check(plan);
    Units from, to;
    for (std::size_t i = 0; i + 1 < plan.pairs.size(); i += 2) {
        from.first = std::min<std::int64_t>(from.first, plan.pairs[i]);
        from.last = std::max<std::int64_t>(from.last, plan.pairs[i]);
        to.first = std::min<std::int64_t>(to.first, plan.pairs[i + 1]);
        to.last = std::max<std::int64_t>(to.last, plan.pairs[i + 1]);
    }
    if (plan.num_tokens == 0 || plan.layers.empty()) return;
    if (std::min(from.first, to.first) < 0 || std::max(from.last, to.last) > kMost / plan.unit_tokens)
        refuse("units " + std::to_string(std::min(from.first, to.first)) + " to " +
               std::to_string(std::max(from.last, to.last)) + " of " + std::to_string(plan.unit_tokens) + " tokens");
    std::vector<Planes> all;
    std::uint64_t widest = 1;  // bytes of a token in one layer
    std::vector<std::uint64_t> src, dst;
    for (const PlanLayer& layer : plan.layers) {
        const PlanShape& shape = layer.shape;
        src.clear(), dst.clear();
        for (const PlanPart& part : layer.parts) {
            src.push_back(
                checked("source", local, part.src_region, part.src_offset, shape.src, shape, from, plan.unit_tokens));
            dst.push_back(checked("destination", remote, part.dst_region, part.dst_offset, shape.dst, shape, to,
                                  plan.unit_tokens));
        }
        add_planes(all, shape, src, dst);
        const auto token_nbytes = static_cast<std::uint64_t>(shape.num_heads * shape.head_nbytes);
        widest = std::max(widest, token_nbytes * layer.parts.size());
    }
    const auto unit_tokens = static_cast<std::uint64_t>(plan.unit_tokens),
               skip = static_cast<std::uint64_t>(plan.skip);
    const std::uint64_t end = skip + static_cast<std::uint64_t>(plan.num_tokens);
    const std::uint64_t num_units = (end + unit_tokens - 1) / unit_tokens;
    const std::uint64_t window = std::max<std::uint64_t>(
        1, std::min({num_units, limits.list_nbytes / 8, limits.nbytes / widest / unit_tokens}));
    for (std::uint64_t unit = 0; unit < num_units; unit += window) {
        const std::uint64_t begin = std::max(skip, unit * unit_tokens);
        const std::uint64_t num_tokens = std::min(end, (unit + window) * unit_tokens) - begin;
        const auto pairs = plan.pairs.subspan(2 * unit, 2 * std::min(window, num_units - unit));
        bool begins = true;
        for (const Planes& planes : all) {
            const std::uint64_t layer_nbytes = static_cast<std::uint64_t>(planes.shape->num_heads) *
                                               static_cast<std::uint64_t>(planes.shape->head_nbytes) *
                                               planes.num_parts * num_tokens;
            const auto most = static_cast<std::uint32_t>(
                std::clamp<std::uint64_t>(limits.nbytes / layer_nbytes, 1, kMostPlanes / planes.num_parts));
            for (std::uint32_t layer = 0; layer < planes.num_layers; layer += most) {
                Request request;
                request.src = rows_of(planes.shape->src, planes.src + layer * planes.src_layer);
                request.dst = rows_of(planes.shape->dst, planes.dst + layer * planes.dst_layer);
                request.num_layers = std::min(most, planes.num_layers - layer);
                request.num_parts = planes.num_parts;
                request.src.side.layer_stride = planes.src_layer, request.src.side.part_stride = planes.src_part;
                request.dst.side.layer_stride = planes.dst_layer, request.dst.side.part_stride = planes.dst_part;
                request.num_tokens = num_tokens;
                request.num_heads = static_cast<std::uint32_t>(planes.shape->num_heads);
                request.head_nbytes = static_cast<std::uint64_t>(planes.shape->head_nbytes);
                request.unit_tokens = static_cast<std::uint32_t>(unit_tokens);
                request.skip = static_cast<std::uint32_t>(begin - unit * unit_tokens);
                request.is_wide = false;
                request.src.side.list_step = request.dst.side.list_step = 8;
                request.dst.side.list = 4;
                if (begins || parts_.back().nbytes + layer_nbytes * request.num_layers > limits.nbytes) {
                    parts_.emplace_back();
                    const auto bytes = std::as_bytes(pairs);
                    parts_.back().list.assign(bytes.begin(), bytes.end());
                    begins = false;
                }
                parts_.back().requests.push_back(request);
                parts_.back().nbytes += layer_nbytes * request.num_layers;
                nbytes_ += layer_nbytes * request.num_layers;
            }
        }
    }
}

Moves::Moves(std::span<const RunList> lists, std::span<const Extent> local, std::span<const Extent> remote,
             const PartLimits& limits) {
    std::vector<Run> runs = join_runs(lists, local, remote);
    std::uint64_t common = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        nbytes_ += runs[i].nbytes;
        const bool is_inside = i > 0 && i + 1 < runs.size();  // what begins or ends a slot may be a part of a run
        if (is_inside || runs.size() < 3) common = std::gcd(common, runs[i].nbytes);
    }
    std::uint64_t most = std::clamp<std::uint64_t>(limits.nbytes & ~std::uint64_t{15}, 16, kMaxRunNbytes);
    if (common >= kPieceNbytes && nbytes_ / common <= kMostPieces) most = std::min(most, common);
    std::vector<Row> rows;
    for (Run& run : runs)
        while (run.nbytes > 0) {
            const std::uint64_t nbytes = std::min(run.nbytes, most), bits = run.src | run.dst | nbytes | 16;
            rows.push_back({nbytes, bits & -bits, run.src, run.dst});
            run.src += nbytes, run.dst += nbytes, run.nbytes -= nbytes;
        }
    const auto alike = [](const Row& a, const Row& b) { return a.nbytes == b.nbytes && a.width == b.width; };
    std::ranges::stable_sort(rows, [](const Row& a, const Row& b) {
        return a.nbytes != b.nbytes ? a.nbytes > b.nbytes : a.width > b.width;
    });
    const Row* last = nullptr;
    for (const Row& row : rows) {
        if (parts_.empty() || parts_.back().list.size() + 16 > limits.list_nbytes ||
            parts_.back().nbytes + row.nbytes > limits.nbytes) {
            parts_.emplace_back().is_wide = true;
            last = nullptr;
        }
        MovePart& part = parts_.back();
        if (!last || !alike(*last, row)) {
            Request request;
            for (Rows* side : {&request.src, &request.dst}) {
                side->alignment = row.width;
                side->side.block_stride = 1;
                side->side.list_step = 16;
                side->side.num_slots = std::numeric_limits<std::int64_t>::max();
            }
            request.src.side.list = part.list.size();
            request.dst.side.list = part.list.size() + 8;
            request.head_nbytes = row.nbytes;
            part.requests.push_back(request);
        }
        last = &row;
        ++part.requests.back().num_tokens;
        const std::uint64_t pair[] = {row.src, row.dst};
        const auto bytes = std::as_bytes(std::span(pair));
        part.list.insert(part.list.end(), bytes.begin(), bytes.end());
        part.nbytes += row.nbytes;
    }
}

std::size_t Moves::num_launches() const {
    std::size_t count = 0;
    for (const MovePart& part : parts_) count += part.requests.size();
    return count;
}

Moves::Moves(MovePart part) : nbytes_(part.nbytes) {
    if (nbytes_) parts_.push_back(std::move(part));
}

}  // namespace pdlink::cuda
