// The workers of one leg, a row for each, judged in one pass.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "index/costs.h"
#include "index/worker_load.h"

namespace pdlink::index {

using Rows = std::span<const WorkerLoad* const>;
// Which rows may be chosen, one byte each; empty: all.
using Fit = std::span<const bool>;
using Scored = std::vector<std::pair<std::size_t, double>>;  // rows and their values, the lowest first

// The row with the least to do of those that fit, of which there is one at least. Equal ones take turns: else the
// first gets all requests of an idle pool.
std::size_t least(Rows rows, Fit fit, std::size_t turn);
// At most so many of the lowest values.
Scored lowest(std::span<const double> values, Fit fit, std::size_t most);

// The row from which the first token is expected soonest. costs: of each row, tokens of a mean worker until then;
// cached: tokens of the prompt that it has.
//
// What a worker computes pushes other KV out, sooner where it has computed more of late. So a worker that has no more
// to do, and has computed less, gets the request instead if it costs little more: sessions with one system prompt
// would all go where the first one went, until none of them finds its KV again.
std::size_t cheapest(Rows rows, const TakenKV& taken, std::span<const double> costs, std::span<const double> cached,
                     double num_tokens, Fit fit, std::size_t turn);

}  // namespace pdlink::index
