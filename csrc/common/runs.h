// Makes puts of runs: checked, joined, cut. The same for every transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pdlink {

// A region as bounds are checked against it: ours, or with addresses of its process a peer's.
struct Extent {
    std::uint64_t base;
    std::uint64_t nbytes;
};

// Runs between one of our regions and one of the peer's; `runs` are num_runs times source offset, destination
// offset, nbytes.
struct Piece {
    std::int64_t src_region;
    std::int64_t src_base;
    std::int64_t dst_region;
    std::int64_t dst_base;
    const std::int64_t* runs;
    std::size_t num_runs;
};

struct Put {
    std::uint64_t src;
    std::uint64_t dst;
    std::uint64_t nbytes;
    std::uint32_t src_region;
    std::uint32_t dst_region;
};

// A put is at most this long, so that one joined run cannot hold more than a share of the bytes in flight. Per-put
// cost is 3.5 us over TCP and below 1 us elsewhere: nothing to 4 MiB.
constexpr std::uint64_t kMaxPutNbytes = 4 << 20;

// The addresses that the offsets of a piece count from. Neither mapped memory nor TCP nor cross-memory attach checks
// the target of a put, so all runs of a piece are checked before any put. Throws std::invalid_argument with piece,
// run and limits.
struct Bases {
    std::uint64_t src;
    std::uint64_t dst;
};
Bases check_piece(const Piece& piece, std::size_t index, std::span<const Extent> local,
                  std::span<const Extent> remote);

// The puts of a batch in the order given, neighbours (contiguous on both sides) joined, empty runs left out.
// Throws as check_piece, before there is any.
std::vector<Put> plan_puts(std::span<const Piece> pieces, std::span<const Extent> local,
                           std::span<const Extent> remote);

}  // namespace pdlink
