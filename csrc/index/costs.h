// What `policies/cost.py` and `policies/prefix.py` know of a prompt and its workers.
#pragma once

#include <cstddef>
#include <span>

#include "index/guesses.h"
#include "index/held.h"
#include "index/worker_load.h"

namespace pdlink::index {

// A prompt: its keys, how many tokens each stands for, how many it has, and what workers say that they hold of it.
struct Asked {
    std::span<const Key> keys;
    double key_tokens, num_tokens;
    const Held* held;
};

// How many keys a worker keeps: it forgets what does not fit into its pool, and of one that publishes what it has
// only counts what it has not computed yet.
struct Kept {
    std::size_t of_worker, unheard;
};

// The prompt goes to this worker. Returns how many tokens of it the worker lacks.
double note(Guesses& sent_to, const Kept& kept, const WorkerLoad& worker, const Asked& asked);

// What the workers of a pool were sent, and KV that they have computed of late, in shares of their pools. What was
// computed counts less and less with all that is computed after it: a unit grows instead. `WorkerLoad::taken` is a
// logarithm, in units of the beginning, so it stays small.
class Costs : public Guesses {
  public:
    using Guesses::Guesses;

    // The worker, of a pool of `num_workers`, computes so many tokens more.
    void take(WorkerLoad& worker, double tokens);
    // In shares of its pool.
    double taken(const WorkerLoad& worker) const;

    std::size_t num_workers = 1;  // of the pool

  private:
    double unit_ = 0;  // its logarithm
};

}  // namespace pdlink::index
