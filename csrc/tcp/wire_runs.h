// Packed runs: their bytes one after the other, with a list of their places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pdlink {

// One run of a list, as it is on the wire.
struct WireRun {
    std::uint64_t offset;  // in the region
    std::uint32_t region;
    std::uint32_t nbytes;
};
static_assert(sizeof(WireRun) == 16);

// Add a run to a list; if it is adjacent to the last run, extend that.
inline void append_run(std::vector<WireRun>& list, std::uint32_t region, std::uint64_t offset, std::uint64_t nbytes) {
    if (!list.empty() && list.back().region == region && list.back().offset + list.back().nbytes == offset)
        list.back().nbytes += static_cast<std::uint32_t>(nbytes);
    else
        list.push_back({offset, region, static_cast<std::uint32_t>(nbytes)});
}

// Whether every byte of a list lies in one of the regions. Sets `nbytes` to their number, or `why` to the reason.
template <class AnyRegion>
bool all_inside(std::span<const WireRun> list, std::span<const AnyRegion> regions, std::uint64_t& nbytes,
                std::string& why) {
    nbytes = 0;  // cannot overflow: lists are short, and each run has less than 4 GiB
    for (const WireRun& run : list) {
        if (run.region >= regions.size() || run.offset > regions[run.region].nbytes ||
            run.nbytes > regions[run.region].nbytes - run.offset) {
            why = std::to_string(run.nbytes) + " bytes at " + std::to_string(run.offset) + " are outside region " +
                  std::to_string(run.region);
            return false;
        }
        nbytes += run.nbytes;
    }
    return true;
}

}  // namespace pdlink
