#include "ucx/runs.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pdlink::ucx {
namespace {

const Extent& region_of(std::span<const Extent> regions, std::int64_t index, const char* side, std::size_t piece) {
    if (index < 0 || static_cast<std::uint64_t>(index) >= regions.size())
        throw std::invalid_argument("piece " + std::to_string(piece) + ": " + side + " region " +
                                    std::to_string(index) + " of " + std::to_string(regions.size()));
    return regions[static_cast<std::size_t>(index)];
}

// Where base + offset begins in the region. Throws unless all of it lies inside.
std::uint64_t place(const Extent& region, std::int64_t base, std::int64_t offset, std::int64_t nbytes,
                    const char* side, std::size_t piece, std::size_t run) {
    std::int64_t at = 0;
    const bool overflow = __builtin_add_overflow(base, offset, &at);
    if (overflow || at < 0 || nbytes < 0 || static_cast<std::uint64_t>(at) > region.nbytes ||
        static_cast<std::uint64_t>(nbytes) > region.nbytes - static_cast<std::uint64_t>(at))
        throw std::invalid_argument("piece " + std::to_string(piece) + ", run " + std::to_string(run) + ": " + side +
                                    " bytes " + std::to_string(base) + " + " + std::to_string(offset) + " + " +
                                    std::to_string(nbytes) + " outside a region of " + std::to_string(region.nbytes) +
                                    " bytes");
    return region.base + static_cast<std::uint64_t>(at);
}

}  // namespace

std::vector<Put> plan_puts(std::span<const Piece> pieces, std::span<const Extent> local,
                           std::span<const Extent> remote) {
    std::size_t num_runs = 0;
    for (const Piece& piece : pieces) num_runs += piece.num_runs;
    std::vector<Put> puts;
    puts.reserve(num_runs);
    for (std::size_t p = 0; p < pieces.size(); ++p) {
        const Piece& piece = pieces[p];
        const Extent& from = region_of(local, piece.src_region, "source", p);
        const Extent& to = region_of(remote, piece.dst_region, "destination", p);
        const auto src_region = static_cast<std::uint32_t>(piece.src_region);
        const auto dst_region = static_cast<std::uint32_t>(piece.dst_region);
        for (std::size_t r = 0; r < piece.num_runs; ++r) {
            const std::int64_t* run = piece.runs + 3 * r;
            std::uint64_t src = place(from, piece.src_base, run[0], run[2], "source", p, r);
            std::uint64_t dst = place(to, piece.dst_base, run[1], run[2], "destination", p, r);
            auto left = static_cast<std::uint64_t>(run[2]);
            if (left && !puts.empty()) {
                Put& last = puts.back();
                if (last.src_region == src_region && last.dst_region == dst_region && last.src + last.nbytes == src &&
                    last.dst + last.nbytes == dst) {
                    const std::uint64_t taken = std::min(left, kMaxPutNbytes - last.nbytes);
                    last.nbytes += taken;
                    src += taken;
                    dst += taken;
                    left -= taken;
                }
            }
            while (left) {
                const std::uint64_t nbytes = std::min(left, kMaxPutNbytes);
                puts.push_back({src, dst, nbytes, src_region, dst_region});
                src += nbytes;
                dst += nbytes;
                left -= nbytes;
            }
        }
    }
    return puts;
}

}  // namespace pdlink::ucx
