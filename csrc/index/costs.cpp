#include "index/costs.h"

#include <algorithm>
#include <cmath>

namespace pdlink::index {
namespace {

constexpr double kPoolTokens = 500'000;  // of a worker that does not say

}  // namespace

double note(Guesses& sent_to, const Kept& kept, const WorkerLoad& worker, const Asked& asked) {
    std::size_t most = worker.publishes ? kept.unheard : kept.of_worker;
    if (worker.pool_tokens)
        most = std::min(most, static_cast<std::size_t>(static_cast<double>(*worker.pool_tokens) / asked.key_tokens));
    const auto had = static_cast<double>(sent_to.note(worker.number, asked.keys, most));
    const Share* const said = asked.held ? asked.held->find(worker.number) : nullptr;
    return asked.num_tokens - std::max(std::min(had * asked.key_tokens, asked.num_tokens), said ? said->tokens : 0.0);
}

void Costs::take(WorkerLoad& worker, double tokens) {
    if (!(tokens > 0)) return;
    const double pool = static_cast<double>(worker.pool_tokens.value_or(0));
    const double share = tokens / (pool > 0 ? pool : kPoolTokens);
    const double more = std::log(share) + unit_, most = std::max(worker.taken, more);
    worker.taken = most + std::log1p(std::exp(std::min(worker.taken, more) - most));
    unit_ += std::log1p(share / static_cast<double>(num_workers));
}

double Costs::taken(const WorkerLoad& worker) const { return std::exp(worker.taken - unit_); }

}  // namespace pdlink::index
