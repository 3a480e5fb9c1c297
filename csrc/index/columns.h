// The workers of one leg, a row for each, judged in one pass over columns that the caller keeps up to date.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "index/holders.h"

namespace pdlink::index {

// Which rows may be chosen, one byte each; empty: all.
using Fit = std::span<const bool>;
using Scored = std::vector<std::pair<std::size_t, double>>;  // rows and their values, the lowest first

// The row with the smallest value of those that fit, of which there is one at least. Equal ones take turns: else the
// first gets all requests of an idle pool.
std::size_t least(std::span<const double> values, Fit fit, std::size_t turn);
// At most so many of the lowest.
Scored lowest(std::span<const double> values, Fit fit, std::size_t most);

// What `cheapest` weighs of each worker.
struct Columns {
    std::span<const double> load;      // tokens that it has to do
    std::span<const double> slowness;  // its time for a token, relative to the mean
    std::span<const double> taken;     // KV that it has computed of late, in `unit`s of its pool
};

// The row from which the first token is expected soonest. costs: of each row, tokens of a mean worker until then.
//
// What a worker computes pushes other KV out, sooner where it has computed more of late. So a worker that has no more
// to do, and has computed less, gets the request instead if it costs little more: sessions with one system prompt
// would all go where the first one went, until none of them finds its KV again.
std::size_t cheapest(const Columns& of, std::span<const double> costs, std::span<const double> cached,
                     double num_tokens, double unit, Fit fit, std::size_t turn);

}  // namespace pdlink::index
