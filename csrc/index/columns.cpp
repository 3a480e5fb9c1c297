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

// Of the rows that `among`, the one with the smallest value; equal ones take turns.
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

bool fits(Fit fit, std::size_t row) { return fit.empty() || fit[row]; }

}  // namespace

std::size_t least(Rows rows, Fit fit, std::size_t turn) {
    return least_of(
        rows.size(), turn, [&](std::size_t row) { return rows[row]->load(); },
        [&](std::size_t row) { return fits(fit, row); });
}

Scored lowest(std::span<const double> values, Fit fit, std::size_t most) {
    Scored found;
    for (std::size_t row = 0; row < values.size(); ++row)
        if (fits(fit, row)) found.emplace_back(row, ordered(values[row]));
    const auto end = found.begin() + static_cast<std::ptrdiff_t>(std::min(most, found.size()));
    std::partial_sort(found.begin(), end, found.end(), [](const auto& one, const auto& other) {
        return std::pair(one.second, one.first) < std::pair(other.second, other.first);
    });
    found.erase(end, found.end());
    return found;
}

std::size_t cheapest(Rows rows, const TakenKV& taken, std::span<const double> costs, std::span<const double> cached,
                     double num_tokens, Fit fit, std::size_t turn) {
    const auto taken_of = [&](std::size_t row) { return rows[row]->taken; };
    double smallest = kInfinity;
    for (std::size_t row = 0; row < costs.size(); ++row)
        if (fits(fit, row)) smallest = std::min(smallest, costs[row]);
    const std::size_t row = least_of(rows.size(), turn, taken_of, [&](std::size_t each) {
        return fits(fit, each) && ordered(costs[each]) == smallest;
    });
    if (rows[row]->taken == -kInfinity) return row;
    const auto busy = [&](std::size_t each) { return ordered(rows[each]->load() * rows[each]->slowness); };
    const std::size_t other = least_of(rows.size(), 0, taken_of,
                                       [&](std::size_t each) { return fits(fit, each) && busy(each) <= busy(row); });
    const double more = taken.of(*rows[row]) - taken.of(*rows[other]);
    const bool spares = costs[other] - costs[row] <= kSpared * (num_tokens - cached[row]) * (more - kMargin);
    return spares ? other : row;
}

}  // namespace pdlink::index
