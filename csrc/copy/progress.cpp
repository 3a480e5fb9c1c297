// The threads of the copier; copy/copier.h tells how they work.
#include <sys/epoll.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "copy/copier.h"

namespace pdlink {
namespace {

// How often a busy copier asks the kernel about the lives of its peers.
constexpr double kWatchPeriod_s = 0.001;
// How rarely, at most, it looks whether a closed gate is quiet.
constexpr double kLastQuietLook_s = 0.01;

}  // namespace

bool Copier::copied(PeerMemory& memory, const Batch& batch, const Slice& slice) {
    if (!memory.gate().enter()) return false;
    {
        const TouchesPages pages;
        batch.copy(slice);
        store_fence();
    }
    memory.gate().leave();
    return true;
}

// ---- the first thread -------------------------------------------------------------------------------------------

void Copier::run() {
    Lock lock(mutex_);
    double watched_s = 0;
    while (true) {
        advance_closing(lock);
        const double now = now_s();
        if (std::isfinite(give_up_s_) && (peers_.empty() || now >= give_up_s_)) return;
        if (turns_.empty()) {
            const double until_s = std::min(closing_.empty() ? now + 3600 : next_quiet_look_s_, give_up_s_);
            wait(lock, static_cast<int>(std::ceil(std::max(0.0, until_s - now) * 1000)));
            continue;
        }
        if (now - watched_s >= kWatchPeriod_s) {
            wait(lock, 0);
            watched_s = now;
            if (turns_.empty()) continue;
        }
        Peer& peer = *turns_.front();
        turns_.pop_front();
        peer.in_turn = false;
        serve(peer, lock);
    }
}

// Wait for a wake-up or the end of a peer process.
void Copier::wait(Lock& lock, int timeout_ms) {
    epoll_event events[16];
    lock.unlock();
    const int count = ::epoll_wait(epoll_.get(), events, std::size(events), timeout_ms);
    lock.lock();
    for (int i = 0; i < count; ++i) {
        if (Peer* peer = static_cast<Peer*>(events[i].data.ptr)) {
            // Only this thread removes peers, so the pointer is valid; the peer's memory may be unmapped already.
            if (peer->memory && !peer->closing)
                fail(*peer, "process " + std::to_string(peer->memory->pid()) + " has ended", Outcome::kPeerFailed,
                     lock);
        } else {
            wake_.hush();
        }
    }
}

// One turn: prepare some of the peer's pages, or copy one slice.
void Copier::serve(Peer& peer, Lock& lock) {
    if (!peer.memory || peer.closing) return;
    if (peer.refused) {
        fail(peer, "peer closed", Outcome::kCancelled, lock);
    } else if (peer.earliest_deadline_s <= now_s()) {
        fail(peer, "batch deadline passed", Outcome::kTimeout, lock);
    } else if (!peer.prepared) {
        const std::shared_ptr<PeerMemory> memory = peer.memory;
        lock.unlock();
        const bool more = memory->prepare_some();
        lock.lock();
        peer.prepared = !more;
        if (more || !peer.queue.empty()) take_turn(peer);
    } else if (!peer.queue.empty() && !peer.queue.back().all_taken()) {
        copy_slice(peer, kFirst, lock);
    }
}

void Copier::fail(Peer& peer, const std::string& reason, Outcome outcome, Lock& lock) {
    peer.failure = reason;
    settle(peer, lock);
    outbox_.put({.kind = Report::Kind::kPeerFailed, .peer = peer.name, .detail = reason});
    end_batches(peer, outcome, reason);
    drop_memory(peer, lock);
}

// A failed or closing peer gets no more slices; wait for the slice that the second thread may be copying. Afterwards
// only this thread changes the peer's queue.
void Copier::settle(Peer& peer, Lock& lock) {
    if (second_) second_->slice_ended.wait(lock, [&] { return peer.num_copying == 0; });
}

void Copier::end_batches(Peer& peer, Outcome outcome, const std::string& detail) {
    end_all(outbox_, peer.name, peer.queue, outcome, detail);
    peer.waiting_nbytes = 0;
}

// Unmapping gigabytes takes milliseconds, so it is done without the mutex.
void Copier::drop_memory(Peer& peer, Lock& lock) {
    std::shared_ptr<PeerMemory> memory = std::move(peer.memory);
    if (!memory) return;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, memory->life_fd(), nullptr);
    lock.unlock();
    memory.reset();
    lock.lock();
}

// Cancel a closing peer's batches when none of its slices is in progress. Then the peer stays until its own writes
// into our memory have ended.
void Copier::advance_closing(Lock& lock) {
    if (closing_.empty() || now_s() < next_quiet_look_s_) return;
    next_quiet_look_s_ = now_s() + quiet_look_period_s_;
    quiet_look_period_s_ = std::min(quiet_look_period_s_ * 2, kLastQuietLook_s);
    for (std::size_t i = 0; i < closing_.size();) {
        Peer& peer = *closing_[i];
        settle(peer, lock);
        end_batches(peer, Outcome::kCancelled, "closed by this side");
        drop_memory(peer, lock);  // others may append to closing_ meanwhile
        if (peer.gate && !peer.gate->quiet()) {
            ++i;
            continue;
        }
        outbox_.put({.kind = Report::Kind::kPeerClosed, .peer = peer.name});
        closing_.erase(closing_.begin() + static_cast<std::ptrdiff_t>(i));
        std::erase(turns_, &peer);
        peers_.erase(std::string(peer.name));
    }
}

// ---- both threads -----------------------------------------------------------------------------------------------

// Copy the next slice of a peer that has one.
void Copier::copy_slice(Peer& peer, Who who, Lock& lock) {
    Batch& batch = *std::ranges::find_if(peer.queue, [](const Batch& one) { return !one.all_taken(); });
    const Slice slice = batch.take(kSliceNbytes);
    const std::shared_ptr<PeerMemory> memory = peer.memory;
    peer.waiting_nbytes -= slice.nbytes;
    ++peer.num_copying;
    ++slices_taken_[who];
    if (!peer.queue.back().all_taken()) take_turn(peer);  // now, for the other thread
    lock.unlock();
    const bool entered = copied(*memory, batch, slice);  // this batch stays in the deque; others come and go
    lock.lock();
    --peer.num_copying;
    if (who == kSecond) second_->slice_ended.notify_one();
    if (entered) {
        batch.slice_landed();
        report_landed(peer);
    } else {
        peer.refused = true;
        take_turn(peer);
        wake_.ring();
    }
}

void Copier::report_landed(Peer& peer) {
    while (!peer.queue.empty() && peer.queue.front().landed()) {
        const Batch& batch = peer.queue.front();
        outbox_.put(done(peer.name, batch));
        const bool was_earliest = batch.deadline_s <= peer.earliest_deadline_s;
        peer.queue.pop_front();
        if (was_earliest) {
            peer.earliest_deadline_s = std::numeric_limits<double>::infinity();
            for (const Batch& other : peer.queue)
                peer.earliest_deadline_s = std::min(peer.earliest_deadline_s, other.deadline_s);
        }
    }
}

// ---- the second thread ------------------------------------------------------------------------------------------

void Copier::run_second() {
    Lock lock(mutex_);
    while (!std::isfinite(give_up_s_)) {
        if (Peer* peer = computing_ ? nullptr : next_to_copy()) {
            copy_slice(*peer, kSecond, lock);
        } else {
            second_->sleeps = true;
            second_->much_to_copy.wait(lock);
        }
    }
}

// The next peer in turn that has a slice and is neither failed nor closing.
Copier::Peer* Copier::next_to_copy() {
    const double now = now_s();
    const auto at = std::ranges::find_if(turns_, [now](const Peer* peer) {
        return peer->memory && peer->prepared && !peer->closing && !peer->refused && peer->failure.empty() &&
               peer->earliest_deadline_s > now && !peer->queue.empty() && !peer->queue.back().all_taken();
    });
    if (at == turns_.end()) return nullptr;
    Peer* peer = *at;
    turns_.erase(at);
    peer->in_turn = false;
    return peer;
}

}  // namespace pdlink
