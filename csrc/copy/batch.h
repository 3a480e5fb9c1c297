// One batch of byte runs, cut into ranges to copy, and its progress.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/engine.h"
#include "common/runs.h"
#include "copy/peer_memory.h"
#include "copy/stores.h"

namespace pdlink::copy {

// 256 KiB takes 15 to 40 microseconds; gate, clock and mutex around it about a tenth of one.
constexpr std::size_t kRangeNbytes = std::size_t{256} << 10;

struct Run {
    std::byte* dst;
    const std::byte* src;
    std::size_t nbytes;
};

// Neighbouring runs of a batch, of which the first and the last may be in part. One thread copies it.
struct RunRange {
    std::size_t first;
    std::size_t first_done;  // bytes of it that belong to ranges before
    std::size_t last;        // the first run that is not copied in full
    std::size_t last_done;   // bytes of it that are
    std::uint64_t nbytes;
};

class Batch : public BatchBase {
  public:
    std::vector<Run> runs;

    bool memory_grew = false;  // the peer's, since the batch before

    // Throws as check_list. What is written to stays mapped while the peer can be written to.
    void fill(std::span<const RunList> lists, std::span<const Extent> local,
              const std::shared_ptr<PeerMemory>& memory);

    // An empty batch has one range, like any other short one.
    bool all_taken() const { return begun_ && next_ == runs.size(); }
    bool landed() const { return all_taken() && num_open_ == 0; }

    // The next range of about `budget_nbytes`. This bounds the time between two checks of gate, deadline and other
    // peers, so long runs are cut, and short ones count as at least a cache line each.
    RunRange take(std::size_t budget_nbytes) {
        RunRange range{next_, done_, 0, 0, 0};
        begun_ = true;
        ++num_open_;
        const auto cost = [](std::size_t nbytes) { return nbytes < kLeastCostNbytes ? kLeastCostNbytes : nbytes; };
        const Run* run = runs.data() + next_;
        const Run* const end = runs.data() + runs.size();
        std::size_t left = run == end ? 0 : run->nbytes - done_;
        while (run != end && cost(left) <= budget_nbytes) {
            budget_nbytes -= cost(left);
            range.nbytes += left;
            done_ = 0;
            if (++run != end) left = run->nbytes;
        }
        next_ = static_cast<std::size_t>(run - runs.data());
        if (run != end && left > budget_nbytes) {
            range.nbytes += budget_nbytes;
            done_ += budget_nbytes;
        }
        range.last = next_;
        range.last_done = done_;
        return range;
    }

    // Touches nothing that `take` changes, so both may be called at once.
    void copy(const RunRange& range) const {
        std::size_t at = range.first_done;
        for (std::size_t i = range.first; i < range.last; ++i, at = 0) {
            if (i + kPrefetchAhead < runs.size()) {
                const Run& ahead = runs[i + kPrefetchAhead];
                prefetch_run(ahead.src, ahead.nbytes);
            }
            copy_run(runs[i].dst + at, runs[i].src + at, runs[i].nbytes - at);
        }
        if (range.last_done > at) {
            const Run& run = runs[range.last];
            copy_run(run.dst + at, run.src + at, range.last_done - at);
        }
    }

    // A range that was taken has been copied, and is visible.
    void range_landed() { --num_open_; }

  private:
    static constexpr std::size_t kLeastCostNbytes = 64;
    std::size_t next_ = 0;  // first run that is not taken in full
    std::size_t done_ = 0;  // bytes of it that are
    std::size_t num_open_ = 0;
    bool begun_ = false;
};

}  // namespace pdlink::copy
