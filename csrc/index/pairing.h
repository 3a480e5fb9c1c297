// Both workers of a request, where nothing is unusual: what `placement.py` decides in most cases, in one call.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "index/columns.h"

namespace pdlink::index {

// One leg of a pool of pairs, as long as the same workers may get requests.
struct PairLeg {
    Columns* columns;
    std::vector<std::uint8_t> marks;  // as of `Fit`
    Costs* costs;                     // null: the least loaded gets it
};

// When decode computes a prompt itself: if it lacks at most so many tokens of it. Not at all if negative.
struct DecodeAlone {
    double tokens, idle_tokens;  // the latter of one with nothing else to do
};

struct PairWeighed {
    std::size_t of = 0;  // how many there were; 0 where there was no choice
    Scored lowest;
};

struct PairChosen {
    std::size_t prefill, decode;
    double cached;  // of the prompt, expected at prefill
    PairWeighed by_prefill, by_decode;
};

class Pairing {
  public:
    // behind: by row of decode, what `Columns::cheapest` must know of prefill.
    Pairing(PairLeg prefill, PairLeg decode, DecodeAlone alone, std::vector<std::vector<RowValue>> behind)
        : prefill_(std::move(prefill)), decode_(std::move(decode)), alone_(alone), behind_(std::move(behind)) {}

    // Nothing where the case is unusual: no decode worker has room for the prompt and so many tokens more, every
    // prefill worker has `most_load` tokens to do (if that is not 0), or decode computes the prompt itself.
    std::optional<PairChosen> choose(const Asked& asked, double more_tokens, double most_load, std::size_t turn,
                                     std::size_t num_scores);

  private:
    Picked pick(PairLeg& leg, const Asked& asked, std::span<const RowValue> behind, Fit fit, std::size_t num,
                std::size_t turn, std::size_t num_scores, PairWeighed& weighed);

    PairLeg prefill_, decode_;
    DecodeAlone alone_;
    std::vector<std::vector<RowValue>> behind_;
    std::vector<std::uint8_t> of_prefill_, of_decode_;  // in `choose`, the rows that fit
};

}  // namespace pdlink::index
