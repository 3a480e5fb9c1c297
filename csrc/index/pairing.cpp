#include "index/pairing.h"

#include <numeric>

namespace pdlink::index {

std::optional<PairChosen> Pairing::choose(const Asked& asked, double more_tokens, double most_load, std::size_t turn,
                                          std::size_t num_scores) {
    const std::size_t num_prefill =
        prefill_.columns->narrow({prefill_.marks}, -kInfinity, most_load > 0 ? most_load : kInfinity, of_prefill_);
    const std::size_t num_decode =
        decode_.columns->narrow({decode_.marks}, asked.num_tokens + more_tokens, kInfinity, of_decode_);
    if (!num_prefill || !num_decode) return std::nullopt;
    // With the same turn on both sides, two pools of equal size would always pair the same workers, and one bad
    // worker on each side would spoil every pair. So decode slips by one whenever all pairs of the same turn have
    // been.
    const std::size_t slip = turn / std::lcm(num_prefill, num_decode) % std::gcd(num_prefill, num_decode);
    PairChosen found{};
    found.decode = pick(decode_, asked, {}, {of_decode_}, num_decode, turn + slip, num_scores, found.by_decode).row;
    const WorkerLoad& decode = *decode_.columns->workers()[found.decode];
    const Share* const share = asked.held ? asked.held->find(decode.number) : nullptr;
    const double lacking = asked.num_tokens - (share ? share->tokens : 0);
    if (lacking <= alone_.tokens || (lacking <= alone_.idle_tokens && !decode.load())) return std::nullopt;
    const std::span<const RowValue> behind = behind_.empty() ? std::span<const RowValue>() : behind_[found.decode];
    const Picked prefill =
        pick(prefill_, asked, behind, {of_prefill_}, num_prefill, turn, num_scores, found.by_prefill);
    found.prefill = prefill.row, found.cached = prefill.cached;
    return found;
}

// One of the `num` that fit.
Picked Pairing::pick(PairLeg& leg, const Asked& asked, std::span<const RowValue> behind, Fit fit, std::size_t num,
                     std::size_t turn, std::size_t num_scores, PairWeighed& weighed) {
    const Picked picked = leg.costs && num > 1 ? leg.columns->cheapest(asked, *leg.costs, behind, fit, turn)
                                               : leg.columns->least(fit, turn);
    if (num > 1 && num_scores) weighed = {num, leg.columns->lowest(fit, num_scores)};
    return picked;
}

}  // namespace pdlink::index
