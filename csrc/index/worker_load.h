// What one worker has to do, by what is sent to it and what it says of itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "index/holders.h"

namespace pdlink::index {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// How the legs of one incarnation of a worker fare.
class Fares {
  public:
    // A leg has ended. pace: seconds for a unit of its work, if it can be said.
    void count(bool failed, std::optional<double> pace);
    // What was counted is forgotten.
    void forget();

    bool out = false;             // it is left out, but for a leg that finds out
    double failed = 0, pace = 0;  // share of its recent legs; seconds for a unit of work
    std::uint64_t num = 0, num_timed = 0;
};

// One incarnation of a worker. For one thread.
class WorkerLoad {
  public:
    // allowed: its tokens are what clients allow (decode), and not what it computes for sure (prefill).
    explicit WorkerLoad(bool allowed);
    WorkerLoad(const WorkerLoad&) = delete;
    WorkerLoad& operator=(const WorkerLoad&) = delete;

    // A request of ours leaves for it. Returns what it has to do now.
    double sent(std::int64_t tokens, double now);
    // A request that was `sent` needs nothing of it any more. served: it did what it was asked.
    void finished(std::int64_t tokens, double now, bool served);
    // By its own account it has this many requests, room for so many tokens, and so many to do.
    void heard(std::int64_t requests, std::optional<std::int64_t> free_tokens, std::optional<double> load_tokens);

    bool idle() const { return requests_ + foreign_ == 0; }  // it has no request, of nobody
    // Tokens that fit in; infinite where nobody knows, and into an idle worker: what does not fit into that will
    // never fit, and the worker says so.
    double room() const { return !room_tokens || idle() ? kInfinity : static_cast<double>(*room_tokens); }
    double load() const { return load_; }
    std::int64_t requests() const { return requests_; }
    std::int64_t tokens() const { return tokens_; }
    std::int64_t foreign() const { return foreign_; }
    std::optional<double> tokens_per_s() const { return tokens_per_s_; }

    const Holder number;
    double slowness = 1;
    double taken = -kInfinity;
    std::optional<std::int64_t> room_tokens, pool_tokens;
    bool publishes = false;

  private:
    void weigh();
    double counted(std::int64_t tokens) const { return std::fmin(static_cast<double>(tokens), most_counted_); }

    const bool allowed_;
    double load_ = 0;
    std::int64_t requests_ = 0, tokens_ = 0, foreign_ = 0;
    std::optional<double> foreign_tokens_, tokens_per_s_;
    double mean_tokens_ = 0;
    double most_counted_;              // as so many tokens a request counts at most, in means and paces
    double done_tokens_ = 0;           // finished, each request counting less than the next
    double done_s_ = 0, since_s_ = 0;  // `done_tokens_` took the former
};

}  // namespace pdlink::index
