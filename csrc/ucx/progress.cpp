// The thread of the ucx transport; see ucx/engine.h.
#include <poll.h>

#include <algorithm>
#include <utility>

#include "cuda/current.h"
#include "ucx/engine.h"

namespace pdlink::ucx {
namespace {

// How often all workers are progressed, in case UCX misses a wake-up; NIXL polls for the same reason.
constexpr double kNet_s = 0.1;
// So many progress calls before other peers get their turn.
constexpr int kProgressPerTurn = 256;
// A peer that takes no bytes at all is given up after this.
constexpr double kDrainLimit_s = 2;
// After so many wake-ups without anything to do, sleep at least so long. While a TCP peer does not answer the first
// message (a stopped process), UCX waits for its socket to be writable, which it is all the time (1.22: half a core).
constexpr int kFruitlessWakeups = 16;
constexpr int kFruitlessPause_ms = 2;

}  // namespace

bool Engine::progress(ucp_worker_h worker) {
    const TouchesPages pages;  // UCX does, by its own hands; our callbacks in there touch what this thread owns
    for (int i = 0; i < kProgressPerTurn; ++i) {
        if (context_->ucx().ucp_worker_progress(worker) == 0) return false;
        worked_ = true;
    }
    return true;
}

void Engine::find_awake() {
    awake_.clear();
    for (auto& [name, peer] : peers_)
        if (peer->awake && peer->incoming->worker()) awake_.push_back(peer.get());
}

bool Engine::round(Lock& lock) {
    const bool all = now_s() >= look_at_all_s_;
    if (all) {
        look_at_all_s_ = now_s() + kNet_s;
        fruitless_wakeups_ = 0;
    }
    turn_.clear();
    for (auto& [name, peer] : peers_) {
        peer->awake |= all && peer->incoming;
        if (!peer->outgoing) continue;
        peer->outgoing->take(peer->batches);
        turn_.push_back(peer.get());
    }
    find_awake();
    if (known_memory_.size() != memory_.size()) known_memory_ = memory_;
    const std::uintptr_t cuda_context = cuda_context_;

    lock.unlock();
    if (cuda_context != std::exchange(current_cuda_context_, cuda_context)) cuda::try_make_current(cuda_context);
    bool more = progress(writing_);
    for (const Peer* peer : awake_) more |= progress(peer->incoming->worker());
    bool one_ended = false;
    for (Peer* peer : turn_) {
        const bool ended = peer->outgoing->ended();
        if (peer->outgoing->step()) more = worked_ = true;
        one_ended |= peer->outgoing->ended() && !ended;
    }
    for (auto& outgoing : leaving_) more |= outgoing->step();
    std::erase_if(leaving_, [](const auto& outgoing) { return outgoing->ended() && !outgoing->referenced(); });
    lock.lock();

    if (one_ended) look_at_ends();
    for (Peer* peer : turn_) record(*peer, lock);
    return more;
}

// What callers may know of the writing side of a peer.
void Engine::record(Peer& peer, Lock& lock) {
    const Outgoing& outgoing = *peer.outgoing;
    if (peer.lane.empty() && !outgoing.lane().empty()) {
        peer.lane = outgoing.lane();
        peer.connect_by_s = kForever;
    }
    if (!outgoing.problem().empty() && peer.usable()) fail(peer, outgoing.problem(), Outcome::kPeerFailed, lock);
}

void Engine::heard(void* what, std::uint32_t, Lock&) {
    const Watched& watched = *static_cast<Watched*>(what);
    if (watched.process) {
        watched.peer->outgoing->lose("the peer's process has ended");
        unwatch(watched.peer->outgoing->pidfd());
    } else if (watched.peer) {
        watched.peer->awake = true;
    }
}

double Engine::earliest(const Peer& peer) const {
    const double queued_s = Base::earliest(peer);
    return peer.outgoing ? std::min(queued_s, peer.outgoing->earliest()) : queued_s;
}

void Engine::report_open(Peer& peer, Outcome outcome, const std::string& detail) {
    if (peer.outgoing) peer.outgoing->report_open(outcome, detail);
    Base::report_open(peer, outcome, detail);
}

// Cut off what comes in, and let what was posted land; while closing down, by force.
bool Engine::quiet(Peer& peer, Lock& lock) {
    const bool by_force = std::isfinite(give_up_s_), cut_off = peer.closing && peer.incoming;
    if (cut_off && peer.incoming->worker()) unwatch(peer.incoming->fd());
    lock.unlock();
    if (cut_off) peer.incoming->shut();
    const bool left = peer.outgoing && peer.outgoing->leave(by_force);
    lock.lock();
    left_ |= left;
    if (left && peer.outgoing->drains()) {
        peer.drain_by_s = now_s() + kDrainLimit_s;
        look_by(peer.drain_by_s);
    }
    if (peer.outgoing && !peer.outgoing->ended()) return false;
    if (peer.incoming && !peer.incoming->quiet()) return false;
    if (peer.outgoing) {
        if (peer.outgoing->pidfd() >= 0) unwatch(peer.outgoing->pidfd());
        if (peer.closing && peer.outgoing->referenced()) leaving_.push_back(std::move(peer.outgoing));
    }
    return true;
}

void Engine::give_up(Peer& peer, Lock& lock) {
    lock.unlock();
    peer.outgoing->leave(true);
    lock.lock();
    left_ = true;
}

// Arms all workers; false if one has something to do first.
bool Engine::may_wait(Lock& lock) {
    fruitless_wakeups_ = worked_ ? 0 : fruitless_wakeups_ + 1;
    worked_ = false;
    if (fruitless_wakeups_ >= kFruitlessWakeups) {
        lock.unlock();
        pollfd bell{.fd = wake_.fd(), .events = POLLIN, .revents = 0};
        ::poll(&bell, 1, kFruitlessPause_ms);
        lock.lock();
    }
    if (std::exchange(left_, false)) return false;
    find_awake();
    lock.unlock();
    bool armed = arm(writing_);
    for (const Peer* peer : awake_) armed = armed && arm(peer->incoming->worker());
    lock.lock();
    if (!armed) return false;
    for (Peer* peer : awake_) peer->awake = false;
    look_by(look_at_all_s_);
    return true;
}

void Engine::cleanup(Lock& lock) {
    lock.unlock();
    bool ended = true;
    for (auto& [name, peer] : peers_) {
        if (peer->incoming) peer->incoming->shut();
        ended = ended && (!peer->outgoing || peer->outgoing->ended());
    }
    for (const auto& outgoing : leaving_) ended = ended && outgoing->ended();
    if (ended) {
        context_->ucx().ucp_worker_destroy(writing_);
    } else {
        // An endpoint that UCX will not give up even by force. Destroying its worker could crash; a leak cannot.
        for (auto& [name, peer] : peers_) (void)peer->outgoing.release();
        for (auto& outgoing : leaving_) (void)outgoing.release();
        new std::shared_ptr<Context>(context_);
    }
    lock.lock();
    peers_.clear();
    leaving_.clear();
    context_.reset();
}

}  // namespace pdlink::ucx
