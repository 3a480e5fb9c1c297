#include "copy/copier.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>
#include <utility>

namespace pdlink {
namespace {

// 256 KiB takes 15 to 40 microseconds; gate, clock and mutex around it about a tenth of one.
constexpr std::size_t kSliceNbytes = std::size_t{256} << 10;
// How often a busy copier asks the kernel about the lives of its peers.
constexpr double kWatchPeriod_s = 0.001;
// How often it looks whether a closed gate is quiet: at once, then rarer.
constexpr double kFirstQuietLook_s = 0.0002;
constexpr double kLastQuietLook_s = 0.01;
// Most bytes that a caller copies itself. That takes less time than a thread needs to wake up (5 to 20 us).
constexpr std::uint64_t kAtOnceNbytes = std::uint64_t{64} << 10;
// Wake the second thread for batches of this size; waking takes as long as copying half of it.
constexpr std::uint64_t kWakeSecondNbytes = std::uint64_t{1} << 20;

Batch resolve(const std::vector<Piece>& pieces, const std::vector<Extent>& local, const std::vector<Extent>& remote) {
    Batch batch;
    std::size_t num_runs = 0;
    for (const Piece& piece : pieces) num_runs += piece.num_runs;
    batch.runs.reserve(num_runs);
    for (std::size_t p = 0; p < pieces.size(); ++p) {
        const Bases bases = check_piece(pieces[p], p, local, remote);
        auto* dst = reinterpret_cast<std::byte*>(bases.dst);
        const auto* src = reinterpret_cast<const std::byte*>(bases.src);
        const std::int64_t* run = pieces[p].runs;
        for (std::size_t i = 0; i < pieces[p].num_runs; ++i, run += 3) {
            batch.runs.push_back({dst + run[1], src + run[0], static_cast<std::size_t>(run[2])});
            batch.nbytes += static_cast<std::uint64_t>(run[2]);
        }
    }
    return batch;
}

// Copy a slice through the gate of its destination. False if that was shut.
bool copied(PeerMemory& memory, const Batch& batch, const Slice& slice) {
    if (!memory.gate().enter()) return false;
    {
        const TouchesPages pages;
        batch.copy(slice);
        store_fence();
    }
    memory.gate().leave();
    return true;
}

}  // namespace

Copier::Copier(int num_threads)
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (num_threads != 1 && num_threads != 2)
        throw std::invalid_argument("a copier has 1 or 2 threads, not " + std::to_string(num_threads));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;  // the wake-up; a peer's life carries the peer
    if (epoll_.get() < 0 || wake_.get() < 0 || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll of the copier");
    if (num_threads == 2) second_ = std::make_unique<Second>();
    const SignalsBlocked blocked;
    thread_ = new std::thread([this] { run(); });
    pthread_setname_np(thread_->native_handle(), "pdlink-copy");
    if (!second_) return;
    try {
        second_->thread = std::thread([this] { run_second(); });
    } catch (...) {
        close(0);
        throw;
    }
    pthread_setname_np(second_->thread.native_handle(), "pdlink-copy-2");
}

Copier::~Copier() {
    close(0);
    if (forked()) (void)second_.release();
}

void Copier::refuse_fork() const {
    if (forked()) throw PeerUnusable("this transport belongs to the parent of this forked process; open one here");
}

std::size_t Copier::add_region(std::byte* base, std::size_t nbytes) {
    refuse_fork();
    const std::lock_guard lock(mutex_);
    regions_.push_back({reinterpret_cast<std::uintptr_t>(base), nbytes});
    return regions_.size() - 1;
}

void Copier::refuse_closed() const {
    if (std::isfinite(give_up_s_)) throw PeerUnusable("the transport is closed");
}

GateName Copier::invite(const std::string& name) {
    refuse_fork();
    auto gate = std::make_unique<GateOwner>();
    const GateName gate_name = gate->name();
    const std::lock_guard lock(mutex_);
    refuse_closed();
    peers_.to_open(name, [](const Peer& peer) { return peer.gate != nullptr; }).gate = std::move(gate);
    return gate_name;
}

void Copier::connect(const std::string& name, std::int64_t pid, const std::vector<PeerFile>& files,
                     const GateName& gate) {
    refuse_fork();
    auto memory = std::make_shared<PeerMemory>(pid, files, gate);
    const std::lock_guard lock(mutex_);
    refuse_closed();
    Peer& peer = peers_.to_open(name, [](const Peer& one) { return one.connected(); });
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &peer;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, memory->life_fd(), &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll of a peer's life");
    peer.memory = std::move(memory);
    take_turn(peer);
    kick();
}

std::uint64_t Copier::submit(const std::string& name, const std::vector<Piece>& pieces, double timeout_s) {
    refuse_fork();
    if (std::isnan(timeout_s)) throw std::invalid_argument("timeout_s is not a number");
    const double submitted_s = now_s();
    std::shared_ptr<PeerMemory> memory;
    std::vector<Extent> local, remote;
    {
        const std::lock_guard lock(mutex_);
        memory = peers_.to_write(name).memory;
        local = regions_;
    }
    for (const Region& region : memory->regions())
        remote.push_back({reinterpret_cast<std::uintptr_t>(region.base), region.nbytes});
    Batch batch = resolve(pieces, local, remote);
    batch.submitted_s = submitted_s;
    batch.deadline_s = submitted_s + timeout_s;

    const std::lock_guard lock(mutex_);
    Peer& peer = peers_.to_write(name);
    if (peer.memory != memory) throw PeerUnusable("peer " + name + " was connected anew");
    batch.ticket = next_ticket_++;
    const std::uint64_t ticket = batch.ticket;
    peer.earliest_deadline_s = std::min(peer.earliest_deadline_s, batch.deadline_s);
    peer.waiting_nbytes += batch.nbytes;
    peer.queue.push_back(std::move(batch));
    if (!landed_at_once(peer)) {
        take_turn(peer);
        kick();
    }
    return ticket;
}

// Copy a peer's only batch here and now if it is small. False if something is left to do.
bool Copier::landed_at_once(Peer& peer) {
    Batch& batch = peer.queue.front();
    if (peer.queue.size() > 1 || batch.nbytes > kAtOnceNbytes || !peer.prepared || batch.deadline_s <= now_s())
        return false;
    const Slice slice = batch.take(kSliceNbytes);
    peer.waiting_nbytes -= slice.nbytes;
    peer.refused = !copied(*peer.memory, batch, slice);
    if (peer.refused) return false;
    batch.slice_landed();
    report_landed(peer);
    return peer.queue.empty();
}

std::array<std::uint64_t, 2> Copier::slices_taken() {
    const std::lock_guard lock(mutex_);
    return slices_taken_;
}

bool Copier::connected(const std::string& name) {
    if (forked()) return false;
    const std::lock_guard lock(mutex_);
    const Peer* peer = peers_.named(name);
    return peer && peer->connected();
}

void Copier::begin_closing(Peer& peer) {
    if (peer.closing) return;
    peer.closing = true;
    if (peer.gate) peer.gate->shut();
    closing_.push_back(&peer);
    next_quiet_look_s_ = 0;
    quiet_look_period_s_ = kFirstQuietLook_s;
}

void Copier::close_peer(const std::string& name) {
    if (forked()) return;
    const std::lock_guard lock(mutex_);
    if (Peer* peer = peers_.named(name)) begin_closing(*peer);
    kick();
}

std::vector<Report> Copier::poll() {
    if (forked()) return {};
    return outbox_.take_all();
}

void Copier::close(double grace_s) {
    if (forked()) return;
    const std::lock_guard one_at_a_time(join_mutex_);
    if (!thread_) return;
    {
        const std::lock_guard lock(mutex_);
        give_up_s_ = now_s() + grace_s;
        for (auto& [name, peer] : peers_) begin_closing(*peer);
        kick();
        if (second_) second_->much_to_copy.notify_one();
    }
    thread_->join();
    delete std::exchange(thread_, nullptr);
    if (second_ && second_->thread.joinable()) second_->thread.join();
}

void Copier::kick() { ::eventfd_write(wake_.get(), 1); }

void Copier::take_turn(Peer& peer) {
    if (std::exchange(peer.in_turn, true)) return;
    turns_.push_back(&peer);
    if (second_ && second_->sleeps && peer.prepared && peer.waiting_nbytes >= kWakeSecondNbytes && !computing_) {
        second_->sleeps = false;
        second_->much_to_copy.notify_one();
    }
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
            eventfd_t kicks;
            ::eventfd_read(wake_.get(), &kicks);
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
        kick();
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
