// One batch of byte runs and how far it has come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/stores.h"

namespace pdlink {

struct Run {
    std::byte* dst;
    const std::byte* src;
    std::size_t nbytes;
};

class Batch {
  public:
    std::uint64_t ticket = 0;
    double submitted_s = 0;
    double deadline_s = 0;
    std::vector<Run> runs;
    std::uint64_t nbytes = 0;

    bool finished() const { return next_ == runs.size(); }

    // Copy about `budget_nbytes` more. The time between two looks at the gate, the deadline and the other peers is
    // bounded by this, so long runs are cut and short ones cost at least a cache line each.
    void copy_some(std::size_t budget_nbytes) {
        while (!finished() && budget_nbytes > 0) {
            const Run& run = runs[next_];
            if (done_ == 0 && next_ + kPrefetchAhead < runs.size()) {
                const Run& ahead = runs[next_ + kPrefetchAhead];
                prefetch_run(ahead.src, ahead.nbytes);
            }
            const std::size_t left = run.nbytes - done_;
            const std::size_t part = left < budget_nbytes ? left : budget_nbytes;
            copy_run(run.dst + done_, run.src + done_, part);
            done_ += part;
            if (done_ == run.nbytes) {
                ++next_;
                done_ = 0;
            }
            const std::size_t cost = part < kLeastCostNbytes ? kLeastCostNbytes : part;
            budget_nbytes -= cost < budget_nbytes ? cost : budget_nbytes;
        }
    }

  private:
    static constexpr std::size_t kLeastCostNbytes = 64;
    std::size_t next_ = 0;  // first run that is not copied in full
    std::size_t done_ = 0;  // bytes of it that are
};

}  // namespace pdlink
