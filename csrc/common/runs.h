// Makes the runs of a batch: checked, joined, cut. The same for every transport.
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
struct RunList {
    std::int64_t src_region;
    std::int64_t src_base;
    std::int64_t dst_region;
    std::int64_t dst_base;
    const std::int64_t* runs;
    std::size_t num_runs;
};

struct Run {
    std::uint64_t src;
    std::uint64_t dst;
    std::uint64_t nbytes;
    std::uint32_t src_region;
    std::uint32_t dst_region;
};

// A joined run is at most this long, so that one cannot hold more than a share of the bytes in flight. The cost of
// a run is 3.5 us over TCP and below 1 us elsewhere: nothing to 4 MiB.
constexpr std::uint64_t kMaxRunNbytes = 4 << 20;

// The addresses that the offsets of a list count from. Neither mapped memory nor TCP nor cross-memory attach checks
// the target of a run, so all runs of a list are checked before any byte moves. Throws std::invalid_argument with
// list, run and limits.
struct Bases {
    std::uint64_t src;
    std::uint64_t dst;
};
Bases check_list(const RunList& list, std::size_t index, std::span<const Extent> local,
                 std::span<const Extent> remote);

// The runs of a batch in the order given, neighbours (contiguous on both sides) joined, empty runs left out.
// Throws as check_list, before there is any.
std::vector<Run> join_runs(std::span<const RunList> lists, std::span<const Extent> local,
                           std::span<const Extent> remote);

}  // namespace pdlink
