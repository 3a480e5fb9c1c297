// The workers of one leg, a row for each, judged in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "index/costs.h"
#include "index/worker_load.h"

namespace pdlink::index {

// Which rows may be chosen.
struct Fit {
    std::span<const std::uint8_t> marks;  // one for each row, not 0 if it may be chosen; empty: all

    bool operator()(std::size_t row) const { return marks.empty() || marks[row]; }
};

using RowValue = std::pair<std::size_t, double>;
using Scored = std::vector<RowValue>;  // rows and their values, the lowest first

struct Picked {
    std::size_t row;
    double cached = 0;  // tokens of the prompt that it has
};

// For one thread. The caller keeps the workers.
class Columns {
  public:
    explicit Columns(std::vector<const WorkerLoad*> workers);
    void put(std::size_t row, const WorkerLoad& worker) { workers_.at(row) = &worker; }

    const std::vector<const WorkerLoad*>& workers() const { return workers_; }
    // Marks those of `fit` that have room for so many tokens and less than `below` to do (if that is finite). Returns
    // how many they are.
    std::size_t narrow(Fit fit, double room, double below, std::vector<std::uint8_t>& marks) const;

    // By row, tokens of the prompt that the worker says it has; or what it may hold, by what it says or what it was
    // sent. Until the next call.
    const std::vector<double>& held(const Held& held);
    const std::vector<double>& cached(const Asked& asked, Guesses& guesses);

    // The row with the least to do, of those to choose from; there is one at least. Equal ones take turns: else the
    // first gets all requests of an idle pool.
    Picked least(Fit fit, std::size_t turn);
    // The row from which the first token is expected soonest. behind: rows, and what comes to their costs for each
    // token of the prompt.
    //
    // What a worker computes pushes other KV out, sooner where it has computed more of late. So a worker that has no
    // more to do, and has computed less, gets the request instead if it costs little more: sessions with one system
    // prompt would all go where the first one went, until none of them finds its KV again.
    Picked cheapest(const Asked& asked, Costs& costs, std::span<const RowValue> behind, Fit fit, std::size_t turn);

    // At most so many of the lowest of what the last `least` or `cheapest` has weighed.
    Scored lowest(Fit fit, std::size_t most) const;

  private:
    void add(const Held& held);

    std::vector<const WorkerLoad*> workers_;
    std::vector<double> cached_, loading_, costs_;
    std::vector<std::size_t> share_of_;  // by number of a worker, in `add`: place of its share, from 1
};

}  // namespace pdlink::index
