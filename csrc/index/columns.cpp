#include "index/columns.h"

#include <algorithm>
#include <cmath>

namespace pdlink::index {
namespace {

// What it is worth, in tokens computed, to compute a token where nothing was computed of late, and not where a whole
// pool was: the session that loses its KV computes it again, and pushes out the next one's, with each of its turns.
constexpr double kSpared = 16;
constexpr double kMargin = 0.25;  // shares of a pool by which workers may differ: less is chance

// NaN is no less than any value, nor equal to itself: it counts as the largest.
double ordered(double value) { return std::isnan(value) ? kInfinity : value; }

// Of the rows that are `among`, the one with the smallest value; equal ones take turns.
template <class Value, class Among>
std::size_t least_of(std::size_t num, std::size_t turn, Value&& value, Among&& among) {
    double smallest = kInfinity;
    std::size_t first = 0, equal = 0;
    for (std::size_t row = 0; row < num; ++row) {
        if (!among(row)) continue;
        const double mine = ordered(value(row));
        if (mine > smallest) continue;
        if (mine < smallest || !equal) {
            smallest = mine;
            first = row;
            equal = 0;
        }
        ++equal;
    }
    if (equal < 2) return first;
    for (std::size_t row = first, left = turn % equal;; ++row) {
        if (!among(row) || ordered(value(row)) != smallest) continue;
        if (!left--) return row;
    }
}

}  // namespace

Columns::Columns(std::vector<const WorkerLoad*> workers)
    : workers_(std::move(workers)), cached_(workers_.size()), loading_(workers_.size()), costs_(workers_.size()) {}

std::size_t Columns::narrow(Fit fit, double room, double below, std::vector<std::uint8_t>& marks) const {
    std::size_t num = 0;
    marks.resize(workers_.size());
    for (std::size_t row = 0; row < workers_.size(); ++row) {
        const WorkerLoad& worker = *workers_[row];
        num += marks[row] = fit(row) && worker.room() >= room && (below == kInfinity || worker.load() < below);
    }
    return num;
}

const std::vector<double>& Columns::held(const Held& held) {
    std::ranges::fill(cached_, 0.0);
    add(held);
    return cached_;
}

const std::vector<double>& Columns::cached(const Asked& asked, Guesses& guesses) {
    guesses.leading(asked.keys, workers_, cached_);
    for (double& tokens : cached_) tokens = std::min(tokens * asked.key_tokens, asked.num_tokens);
    std::ranges::fill(loading_, 0.0);
    if (asked.held) add(*asked.held);
    return cached_;
}

Picked Columns::least(Fit fit, std::size_t turn) {
    for (std::size_t row = 0; row < costs_.size(); ++row) costs_[row] = workers_[row]->load();
    return {least_of(costs_.size(), turn, [&](std::size_t row) { return costs_[row]; }, fit)};
}

Picked Columns::cheapest(const Asked& asked, Costs& costs, std::span<const RowValue> behind, Fit fit,
                         std::size_t turn) {
    costs.num_workers = workers_.size();
    cached(asked, costs);
    for (std::size_t row = 0; row < costs_.size(); ++row)
        costs_[row] =
            (workers_[row]->load() + asked.num_tokens - cached_[row]) * workers_[row]->slowness + loading_[row];
    for (const auto& [row, extra] : behind) costs_[row] += extra * asked.num_tokens;
    double smallest = kInfinity;
    for (std::size_t row = 0; row < costs_.size(); ++row)
        if (fit(row)) smallest = std::min(smallest, costs_[row]);
    const auto taken_of = [&](std::size_t row) { return workers_[row]->taken; };
    const std::size_t row = least_of(costs_.size(), turn, taken_of, [&](std::size_t each) {
        return fit(each) && ordered(costs_[each]) == smallest;
    });
    if (workers_[row]->taken == -kInfinity) return {row, cached_[row]};
    const auto busy = [&](std::size_t each) { return ordered(workers_[each]->load() * workers_[each]->slowness); };
    const std::size_t other = least_of(costs_.size(), 0, taken_of, [&, most = busy(row)](std::size_t each) {
        return fit(each) && busy(each) <= most;
    });
    const double more = costs.taken(*workers_[row]) - costs.taken(*workers_[other]);
    const bool spares = costs_[other] - costs_[row] <= kSpared * (asked.num_tokens - cached_[row]) * (more - kMargin);
    return spares ? Picked{other, cached_[other]} : Picked{row, cached_[row]};
}

Scored Columns::lowest(Fit fit, std::size_t most) const {
    Scored found;
    found.reserve(costs_.size());
    for (std::size_t row = 0; row < costs_.size(); ++row)
        if (fit(row)) found.emplace_back(row, ordered(costs_[row]));
    const auto end = found.begin() + static_cast<std::ptrdiff_t>(std::min(most, found.size()));
    std::partial_sort(found.begin(), end, found.end(), [](const auto& one, const auto& other) {
        return std::pair(one.second, one.first) < std::pair(other.second, other.first);
    });
    found.erase(end, found.end());
    return found;
}

void Columns::add(const Held& held) {
    if (held.shares.empty()) return;
    share_of_.resize(std::max<std::size_t>(share_of_.size(), held.shares.back().worker + 1));
    for (std::size_t at = 0; at < held.shares.size(); ++at) share_of_[held.shares[at].worker] = at + 1;
    for (std::size_t row = 0; row < cached_.size(); ++row) {
        const Holder worker = workers_[row]->number;
        if (worker >= share_of_.size() || !share_of_[worker]) continue;
        const Share& share = held.shares[share_of_[worker] - 1];
        cached_[row] = std::max(cached_[row], share.tokens);
        loading_[row] = share.loading;
    }
    for (const Share& share : held.shares) share_of_[share.worker] = 0;
}

}  // namespace pdlink::index
