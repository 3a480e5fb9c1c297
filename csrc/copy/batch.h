// One batch of byte runs, cut into slices to copy, and its progress.
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
constexpr std::size_t kSliceNbytes = std::size_t{256} << 10;

struct Run {
    std::byte* dst;
    const std::byte* src;
    std::size_t nbytes;
};

// Neighbouring runs of a batch, of which the first and the last may be in part. One thread copies it.
struct Slice {
    std::size_t first;
    std::size_t first_done;  // bytes of it that belong to slices before
    std::size_t last;        // the first run that is not copied in full
    std::size_t last_done;   // bytes of it that are
    std::uint64_t nbytes;
};

class Batch : public BatchBase {
  public:
    std::vector<Run> runs;

    bool memory_grew = false;  // the peer's, since the batch before

    // Throws as check_piece. What is written to stays mapped while the peer can be written to.
    void fill(std::span<const Piece> pieces, std::span<const Extent> local,
              const std::shared_ptr<PeerMemory>& memory);

    // An empty batch has one slice, like any other short one.
    bool all_taken() const { return begun_ && next_ == runs.size(); }
    bool landed() const { return all_taken() && num_open_ == 0; }

    // The next slice of about `budget_nbytes`. This bounds the time between two checks of gate, deadline and other
    // peers, so long runs are cut, and short ones count as at least a cache line each.
    Slice take(std::size_t budget_nbytes) {
        Slice slice{next_, done_, 0, 0, 0};
        begun_ = true;
        ++num_open_;
        const auto cost = [](std::size_t nbytes) { return nbytes < kLeastCostNbytes ? kLeastCostNbytes : nbytes; };
        const Run* run = runs.data() + next_;
        const Run* const end = runs.data() + runs.size();
        std::size_t left = run == end ? 0 : run->nbytes - done_;
        while (run != end && cost(left) <= budget_nbytes) {
            budget_nbytes -= cost(left);
            slice.nbytes += left;
            done_ = 0;
            if (++run != end) left = run->nbytes;
        }
        next_ = static_cast<std::size_t>(run - runs.data());
        if (run != end && left > budget_nbytes) {
            slice.nbytes += budget_nbytes;
            done_ += budget_nbytes;
        }
        slice.last = next_;
        slice.last_done = done_;
        return slice;
    }

    // Touches nothing that `take` changes, so both may be called at once.
    void copy(const Slice& slice) const {
        std::size_t at = slice.first_done;
        for (std::size_t i = slice.first; i < slice.last; ++i, at = 0) {
            if (i + kPrefetchAhead < runs.size()) {
                const Run& ahead = runs[i + kPrefetchAhead];
                prefetch_run(ahead.src, ahead.nbytes);
            }
            copy_run(runs[i].dst + at, runs[i].src + at, runs[i].nbytes - at);
        }
        if (slice.last_done > at) {
            const Run& run = runs[slice.last];
            copy_run(run.dst + at, run.src + at, slice.last_done - at);
        }
    }

    // A slice that was taken has been copied, and is visible.
    void slice_landed() { --num_open_; }

  private:
    static constexpr std::size_t kLeastCostNbytes = 64;
    std::size_t next_ = 0;  // first run that is not taken in full
    std::size_t done_ = 0;  // bytes of it that are
    std::size_t num_open_ = 0;
    bool begun_ = false;
};

}  // namespace pdlink::copy
