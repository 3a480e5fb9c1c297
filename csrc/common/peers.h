// The peers of an engine by name, what callers hear of one that cannot be used, and how open batches end.
#pragma once

#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/native.h"
#include "common/outbox.h"

namespace pdlink {

// A peer that cannot be used: unknown, failed or closed. A type for each engine, because the modules of nanobind
// share one table of exceptions.
template <class Engine>
struct Unusable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A name that stands for a connection already. The caller's mistake.
template <class Engine>
struct Taken : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// Used with the engine's mutex held. A Peer has a name, `failure` (not empty: failed), `closing`, and says whether it
// is `connected`, so that we may write to it.
template <class Peer, class Engine>
class Peers : public std::map<std::string, std::unique_ptr<Peer>> {
  public:
    Peer* named(const std::string& name) const {
        const auto at = this->find(name);
        return at == this->end() ? nullptr : at->second.get();
    }

    // One to be given one more direction, which `has` tells of; made if there is none.
    template <class Has>
    Peer& to_open(const std::string& name, Has has) {
        std::unique_ptr<Peer>& slot = (*this)[name];
        if (!slot) slot = std::make_unique<Peer>(name);
        if (slot->closing || !slot->failure.empty() || has(*slot))
            throw Taken<Engine>("peer name " + name + " is used twice");
        return *slot;
    }

    Peer& to_write(const std::string& name) const {
        Peer* peer = named(name);
        if (!peer || peer->closing) throw Unusable<Engine>("no open peer " + name);
        if (!peer->failure.empty()) throw Unusable<Engine>("peer " + name + " has failed: " + peer->failure);
        if (!peer->connected()) throw Unusable<Engine>("not connected to peer " + name);
        return *peer;
    }
};

template <class Batch>
Report done(const std::string& peer, const Batch& batch, Outcome outcome = Outcome::kOk, std::string detail = {}) {
    return {Report::Kind::kBatchDone, peer,    batch.ticket,     outcome, batch.nbytes,
            batch.submitted_s,        now_s(), std::move(detail)};
}

// Report and forget every open batch. After a missed deadline only the overdue batches are TIMEOUT.
template <class Batches>
void end_all(Outbox& outbox, const std::string& peer, Batches& batches, Outcome outcome, const std::string& detail) {
    const double now = now_s();
    for (const auto& batch : batches) {
        const bool other = outcome == Outcome::kTimeout && batch.deadline_s > now;
        outbox.put(done(peer, batch, other ? Outcome::kPeerFailed : outcome, detail));
    }
    batches.clear();
}

}  // namespace pdlink
