// The threads of the copier; copy/copier.h tells how they work.
#include <algorithm>
#include <utility>

#include "copy/copier.h"

namespace pdlink::copy {

bool Copier::copied(PeerMemory& memory, const Batch& batch, const RunRange& range) {
    if (!memory.gate().enter()) return false;
    {
        const TouchesPages pages;
        batch.copy(range);
        store_fence();
    }
    memory.gate().leave();
    return true;
}

// ---- the first thread -------------------------------------------------------------------------------------------

bool Copier::round(Lock& lock) {
    if (turns_.empty()) return false;
    Peer& peer = *turns_.front();
    turns_.pop_front();
    peer.in_turn = false;
    serve(peer, lock);
    return !turns_.empty();
}

// The end of a peer's process.
void Copier::heard(void* what, std::uint32_t, Lock& lock) {
    Peer& peer = *static_cast<Peer*>(what);
    if (peer.memory && !peer.closing)  // it may be unmapped already
        fail(peer, "process " + std::to_string(peer.memory->pid()) + " has ended", Outcome::kPeerFailed, lock);
}

// One turn: prepare some of the peer's pages, or copy one range.
void Copier::serve(Peer& peer, Lock& lock) {
    if (!peer.memory || peer.closing) return;
    if (peer.refused) {
        fail(peer, "peer closed", Outcome::kCancelled, lock);
    } else if (!peer.prepared) {
        const std::shared_ptr<PeerMemory> memory = peer.memory;
        lock.unlock();
        const bool more = memory->prepare_some();
        lock.lock();
        peer.prepared = !more;
        if (more || !peer.batches.empty()) take_turn(peer);
    } else if (may_copy(peer, now_s())) {
        copy_range(peer, kFirst, lock);
    }
}

// A failed or closing peer gets no more ranges; wait for the range that the second thread may be copying. Afterwards
// only this thread changes the peer's batches.
void Copier::stop(Peer& peer, Lock& lock) {
    if (second_) second_->range_ended.wait(lock, [&] { return peer.num_copying == 0; });
    peer.waiting_nbytes = 0;
}

// Unmapping gigabytes takes milliseconds, so it is done without the mutex.
bool Copier::quiet(Peer& peer, Lock& lock) {
    if (std::shared_ptr<PeerMemory> memory = std::move(peer.memory)) {
        unwatch(memory->life_fd());
        lock.unlock();
        memory.reset();
        lock.lock();
    }
    if (peer.gate && !peer.gate->quiet()) return false;
    std::erase(turns_, &peer);
    return true;
}

void Copier::cleanup(Lock& lock) {
    if (!second_ || !second_->thread.joinable()) return;
    second_->ends = true;
    second_->much_to_copy.notify_one();
    lock.unlock();
    second_->thread.join();
    lock.lock();
}

// ---- both threads -----------------------------------------------------------------------------------------------

// Whether a peer that is neither failed nor closing has a range that is not late.
bool Copier::may_copy(Peer& peer, double now) {
    return peer.memory && peer.prepared && !peer.refused && peer.usable() && peer.has_ranges() &&
           peer.next_range()->deadline_s > now;
}

// Copy the next range of a peer that has one.
void Copier::copy_range(Peer& peer, Who who, Lock& lock) {
    Batch& batch = *peer.next_range();
    const RunRange range = batch.take(kRangeNbytes);
    const std::shared_ptr<PeerMemory> memory = peer.memory;
    peer.waiting_nbytes -= range.nbytes;
    ++peer.num_copying;
    ++ranges_taken_[who];
    if (peer.has_ranges()) take_turn(peer);  // now, for the other thread
    lock.unlock();
    const bool entered = copied(*memory, batch, range);
    lock.lock();
    --peer.num_copying;
    if (who == kSecond) second_->range_ended.notify_one();
    if (entered) {
        batch.range_landed();
        report_landed(peer);
    } else {
        peer.refused = true;
        take_turn(peer);
        wake_.ring();
    }
}

void Copier::report_landed(Peer& peer) {
    while (!peer.batches.empty() && peer.batches.front().landed()) {
        outbox_.put(done(peer.name, peer.batches.front()));
        peer.batches.pop_front();
    }
}

// ---- the second thread ------------------------------------------------------------------------------------------

void Copier::run_second() {
    Lock lock(mutex_);
    while (!second_->ends) {
        if (Peer* peer = computing_ ? nullptr : next_to_copy()) {
            copy_range(*peer, kSecond, lock);
        } else {
            second_->sleeps = true;
            second_->much_to_copy.wait(lock);
        }
    }
}

// The next peer in turn that it may copy for.
Peer* Copier::next_to_copy() {
    const auto at = std::ranges::find_if(turns_, [now = now_s()](Peer* peer) { return may_copy(*peer, now); });
    if (at == turns_.end()) return nullptr;
    Peer* peer = *at;
    turns_.erase(at);
    peer->in_turn = false;
    return peer;
}

}  // namespace pdlink::copy
