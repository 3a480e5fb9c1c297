#include "common/runs.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pdlink {
namespace {

const Extent& region_of(std::span<const Extent> regions, std::int64_t index, const char* side, std::size_t list) {
    if (index < 0 || static_cast<std::uint64_t>(index) >= regions.size())
        throw std::invalid_argument("list " + std::to_string(list) + ": no " + side + " region " +
                                    std::to_string(index) + " among " + std::to_string(regions.size()));
    return regions[static_cast<std::size_t>(index)];
}

bool inside(const Extent& region, std::int64_t base, std::int64_t offset, std::int64_t nbytes) {
    std::int64_t at = 0;
    return !__builtin_add_overflow(base, offset, &at) && at >= 0 && nbytes >= 0 &&
           static_cast<std::uint64_t>(at) <= region.nbytes &&
           static_cast<std::uint64_t>(nbytes) <= region.nbytes - static_cast<std::uint64_t>(at);
}

// One end of a run as unsigned numbers. With `base` inside the region, a sum that is too large or negative always
// exceeds the limit: a negative one wraps above it.
bool beyond(std::uint64_t base, std::uint64_t offset, std::uint64_t nbytes, std::uint64_t limit) {
    const std::uint64_t at = base + offset;
    return (at > limit) | (nbytes > limit - at);
}

// The same as asking `inside` for each run, without a branch: a third of the time when there are 16,384 of 256 bytes.
bool all_inside(const RunList& list, const Extent& from, const Extent& to) {
    const auto src_base = static_cast<std::uint64_t>(list.src_base);
    const auto dst_base = static_cast<std::uint64_t>(list.dst_base);
    constexpr std::uint64_t kLimit = std::uint64_t{1} << 62;
    if (src_base > from.nbytes || dst_base > to.nbytes || from.nbytes > kLimit || to.nbytes > kLimit) return false;
    bool outside = false;
    const std::int64_t* run = list.runs;
    for (std::size_t i = 0; i < list.num_runs; ++i, run += 3) {
        const auto nbytes = static_cast<std::uint64_t>(run[2]);
        outside |= beyond(src_base, static_cast<std::uint64_t>(run[0]), nbytes, from.nbytes);
        outside |= beyond(dst_base, static_cast<std::uint64_t>(run[1]), nbytes, to.nbytes);
    }
    return !outside;
}

void require_inside(const Extent& region, std::int64_t base, std::int64_t offset, std::int64_t nbytes,
                    const char* side, std::size_t list, std::size_t run) {
    if (inside(region, base, offset, nbytes)) return;
    throw std::invalid_argument("list " + std::to_string(list) + ", run " + std::to_string(run) + ": " + side +
                                " bytes " + std::to_string(base) + " + " + std::to_string(offset) + " + " +
                                std::to_string(nbytes) + " outside a region of " + std::to_string(region.nbytes) +
                                " bytes");
}

}  // namespace

Bases check_list(const RunList& list, std::size_t index, std::span<const Extent> local,
                 std::span<const Extent> remote) {
    const Extent& from = region_of(local, list.src_region, "source", index);
    const Extent& to = region_of(remote, list.dst_region, "destination", index);
    if (!all_inside(list, from, to)) {
        for (std::size_t r = 0; r < list.num_runs; ++r) {
            const std::int64_t* run = list.runs + 3 * r;
            require_inside(from, list.src_base, run[0], run[2], "source", index, r);
            require_inside(to, list.dst_base, run[1], run[2], "destination", index, r);
        }
    }
    return {from.base + static_cast<std::uint64_t>(list.src_base),
            to.base + static_cast<std::uint64_t>(list.dst_base)};
}

std::vector<Run> join_runs(std::span<const RunList> lists, std::span<const Extent> local,
                           std::span<const Extent> remote) {
    std::size_t num_runs = 0;
    for (const RunList& list : lists) num_runs += list.num_runs;
    std::vector<Run> joined;
    joined.reserve(num_runs);
    for (std::size_t p = 0; p < lists.size(); ++p) {
        const RunList& list = lists[p];
        const Bases bases = check_list(list, p, local, remote);
        const auto src_region = static_cast<std::uint32_t>(list.src_region);
        const auto dst_region = static_cast<std::uint32_t>(list.dst_region);
        const std::int64_t* run = list.runs;
        for (std::size_t r = 0; r < list.num_runs; ++r, run += 3) {
            std::uint64_t src = bases.src + static_cast<std::uint64_t>(run[0]);
            std::uint64_t dst = bases.dst + static_cast<std::uint64_t>(run[1]);
            auto left = static_cast<std::uint64_t>(run[2]);
            if (left && !joined.empty()) {
                Run& last = joined.back();
                if (last.src_region == src_region && last.dst_region == dst_region && last.src + last.nbytes == src &&
                    last.dst + last.nbytes == dst) {
                    const std::uint64_t taken = std::min(left, kMaxRunNbytes - last.nbytes);
                    last.nbytes += taken;
                    src += taken;
                    dst += taken;
                    left -= taken;
                }
            }
            while (left) {
                const std::uint64_t nbytes = std::min(left, kMaxRunNbytes);
                joined.push_back({src, dst, nbytes, src_region, dst_region});
                src += nbytes;
                dst += nbytes;
                left -= nbytes;
            }
        }
    }
    return joined;
}

}  // namespace pdlink
