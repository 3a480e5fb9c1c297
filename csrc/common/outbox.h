// Reports that are not fetched yet, with a descriptor that is readable while there are any.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/bell.h"

namespace pdlink {

enum class Outcome { kOk, kTimeout, kPeerFailed, kCancelled };

// One occurrence of `pdlink/transport/base.py`. Times are seconds of CLOCK_MONOTONIC.
struct Report {
    enum class Kind { kBatchDone, kPeerFailed, kPeerClosed };
    Kind kind;
    std::string peer;
    std::uint64_t ticket = 0;
    Outcome outcome = Outcome::kOk;
    std::uint64_t nbytes = 0;
    double submitted_s = 0;
    double done_s = 0;
    std::string detail{};
};

// How Python's side calls them, by number: the kinds in `_copy.pyi`, and the values of `BatchStatus`.
inline constexpr const char* kKindNames[] = {"batch_done", "peer_failed", "peer_closed"};
inline constexpr const char* kOutcomeNames[] = {"ok", "timeout", "peer_failed", "cancelled"};

class Outbox {
  public:
    int fd() const { return bell_.fd(); }

    void put(Report report) {
        const std::lock_guard lock(mutex_);
        if (reports_.empty()) bell_.ring();
        reports_.push_back(std::move(report));
    }

    std::vector<Report> take_all() {
        const std::lock_guard lock(mutex_);
        if (!reports_.empty()) bell_.hush();
        return std::exchange(reports_, {});
    }

    // Whether the end of this peer is not fetched yet.
    bool tells_end_of(const std::string& peer) {
        const std::lock_guard lock(mutex_);
        return std::ranges::any_of(
            reports_, [&](const Report& one) { return one.kind == Report::Kind::kPeerClosed && one.peer == peer; });
    }

  private:
    Bell bell_;
    std::mutex mutex_;  // leaf: nothing is called under it
    std::vector<Report> reports_;
};

}  // namespace pdlink
