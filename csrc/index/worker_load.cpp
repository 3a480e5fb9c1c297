#include "index/worker_load.h"

#include <algorithm>

namespace pdlink::index {
namespace {

constexpr double kDecay = 0.97, kSmooth = 0.1;
constexpr double kMostOfMean = 4;
// Where tokens are what clients allow: one request counts in a worker's pace as at most so many mean ones, and nobody
// knows the mean of the first. Else a client that allows millions, and gets ten, makes its worker look quick.
constexpr double kFirstMeanTokens = 4096;
constexpr std::uint64_t kFewLegs = 10;  // the mean of so many is their pace

Holder next_number() {
    static Holder next = 0;  // with the interpreter's lock held
    return next++;
}

}  // namespace

void Fares::count(bool leg_failed, std::optional<double> leg_pace) {
    ++num;
    failed += kSmooth * ((leg_failed ? 1 : 0) - failed);
    if (!leg_pace || leg_failed) return;
    ++num_timed;
    pace += (num_timed > kFewLegs ? kSmooth : 1 / static_cast<double>(num_timed)) * (*leg_pace - pace);
}

void Fares::forget() {
    failed = pace = 0;
    num = num_timed = 0;
}

WorkerLoad::WorkerLoad(bool allowed)
    : number(next_number()), allowed_(allowed), most_counted_(allowed ? kFirstMeanTokens : kInfinity) {}

double WorkerLoad::sent(std::int64_t tokens, double now) {
    if (!requests_) since_s_ = now;
    ++requests_;
    mean_tokens_ = mean_tokens_ ? mean_tokens_ + 0.1 * (counted(tokens) - mean_tokens_) : counted(tokens);
    if (allowed_) most_counted_ = mean_tokens_ ? mean_tokens_ * kMostOfMean : kFirstMeanTokens;
    tokens_ += tokens;
    if (room_tokens) *room_tokens -= tokens;
    weigh();
    return load_;
}

void WorkerLoad::finished(std::int64_t tokens, double now, bool served) {
    --requests_;
    tokens_ -= tokens;
    if (served) {
        done_tokens_ = done_tokens_ * kDecay + counted(tokens);
        done_s_ = done_s_ * kDecay + now - since_s_;
        tokens_per_s_ = done_s_ > 0 ? std::optional(done_tokens_ / done_s_) : std::nullopt;
    }
    since_s_ = now;
    if (room_tokens) *room_tokens += tokens;
    weigh();
}

void WorkerLoad::heard(std::int64_t requests, std::optional<std::int64_t> free_tokens,
                       std::optional<double> load_tokens) {
    foreign_ = std::max<std::int64_t>(0, requests - requests_);
    foreign_tokens_ = load_tokens;
    if (load_tokens) foreign_tokens_ = std::fmax(0, *load_tokens - static_cast<double>(tokens_));
    room_tokens = free_tokens;
    weigh();
}

void WorkerLoad::weigh() {
    const double mean = mean_tokens_ ? mean_tokens_ : 1;
    load_ = static_cast<double>(tokens_) + foreign_tokens_.value_or(static_cast<double>(foreign_) * mean);
}

}  // namespace pdlink::index
