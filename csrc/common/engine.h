// `Engine`: what the native transports have in common. One thread moves bytes; callers of any thread give it work and
// read reports.
//
// Threads. Callers put work into tables under one mutex and wake the thread through an eventfd; they never wait for
// it, except in `close`. A caller may do a small batch itself (`at_once`). The thread takes the mutex to choose work
// and to record results, never while it moves bytes. It never calls into Python, so it needs no GIL and may be joined
// under it. Any thread adds peers; only the engine's thread removes them, so its pointers to them stay valid while
// the mutex is free. A batch goes with its last byte, in the thread that has moved it, or with its peer.
//
//   run:  advance_ends → look_at_deadlines → wait → round → …
//
// Peers. A peer is invited (it writes here), connected (we write there) or both. It fails as a whole: every open
// batch is reported, later ones are refused, and the peer stays until `close_peer`. PeerClosed is reported, and the
// peer forgotten, once `quiet` says so: that is the transport's fence.
//
// Fork. A child has no thread. There, every call throws or does nothing, and no lock is taken: one may have been held
// at the moment of the fork.
//
// A transport is `class Copier : public Engine<Copier, Peer, Batch>` with
//
//   round(lock)                 one turn of work, without the lock while bytes move; true if there is more
//   at_once(peer, batch)        the caller's own attempt at a queued batch; true if the thread need not be woken
//   quiet(peer, lock)           lets go of a failed or closing peer; true if nothing of it or of ours can be written
//   reach(peer)                 what a batch to this peer is checked against
//   heard(what, events, lock)   an event of a descriptor that was given to `watch`
//   cleanup(lock)               the last thing in the thread
//
// and where it has a use for them: `stop` (wait until none of the peer's batches is being moved), `keep_out` (the
// peer begins nothing here any more; any thread), `give_up` (a drain took too long), `look` (deadlines of its own),
// `may_wait` (false: something is to be done first), `earliest` and `report_open`, if not all open batches are in
// `peer.batches`. Its destructor calls `close`.
#pragma once

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "common/bell.h"
#include "common/descriptor.h"
#include "common/native.h"
#include "common/outbox.h"
#include "common/runs.h"

namespace pdlink {

inline constexpr double kForever = std::numeric_limits<double>::infinity();

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

// What every engine knows of a batch. Times are seconds of CLOCK_MONOTONIC.
struct BatchBase {
    std::uint64_t ticket = 0;
    std::uint64_t nbytes = 0;
    double submitted_s = 0;
    double deadline_s = 0;
};

// What every engine knows of a peer. A Peer also has `invited()`, `dialed()` (it may be written to, now or soon) and
// `connected()` (now).
template <class Batch>
struct PeerBase {
    explicit PeerBase(std::string peer_name) : name(std::move(peer_name)) {}
    const std::string name;
    std::list<Batch> batches;        // open, in the order of submission
    std::string where;               // " to HOST:PORT", for errors
    double connect_by_s = kForever;  // finite while connecting
    double drain_by_s = kForever;    // finite while what was sent may still land
    std::string failure;             // not empty: failed
    bool closing = false;

    bool usable() const { return !closing && failure.empty(); }
};

template <class Batch>
Report done(const std::string& peer, const Batch& batch, Outcome outcome = Outcome::kOk, std::string detail = {}) {
    return {Report::Kind::kBatchDone, peer,    batch.ticket,     outcome, batch.nbytes,
            batch.submitted_s,        now_s(), std::move(detail)};
}

// How a batch ends with its peer: of a missed deadline only the overdue batches are TIMEOUT.
template <class Batch>
Report ended(const std::string& peer, const Batch& batch, Outcome outcome, const std::string& detail) {
    const bool other = outcome == Outcome::kTimeout && batch.deadline_s > now_s();
    return done(peer, batch, other ? Outcome::kPeerFailed : outcome, detail);
}

template <class Self, class Peer, class Batch>
class Engine {
  public:
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // A block of our own memory, as source and for invited peers; returns its index. It must stay until close().
    std::size_t add_region(std::uintptr_t base, std::uint64_t nbytes) {
        refuse_fork();
        const std::lock_guard lock(mutex_);
        regions_.push_back({base, nbytes});
        return regions_.size() - 1;
    }

    // Queue one batch and return its ticket. Throws std::invalid_argument for a run outside its region, Unusable.
    std::uint64_t submit(const std::string& name, std::span<const RunList> lists, double timeout_s) {
        return submit(name, timeout_s, [&](Batch& batch, const std::vector<Extent>& local, const auto& reach) {
            batch.fill(lists, local, reach);
        });
    }
    // fill(batch, our regions, reach(peer)): what it moves, and the transport's own part of it.
    template <class Fill>
    std::uint64_t submit(const std::string& name, double timeout_s, Fill&& fill) {
        refuse_fork();
        if (std::isnan(timeout_s)) throw std::invalid_argument("timeout_s is not a number");
        std::list<Batch> one(1);
        Batch& batch = one.front();
        batch.submitted_s = now_s();
        const double deadline_s = batch.deadline_s = batch.submitted_s + timeout_s;
        std::unique_lock lock(mutex_);
        const auto reach = self().reach(to_write(name));
        const std::vector<Extent> local = regions_;
        lock.unlock();
        fill(batch, local, reach);

        lock.lock();
        Peer& peer = to_write(name);  // a name is not used twice, so it is the peer whose regions were looked at
        const std::uint64_t ticket = batch.ticket = next_ticket_++;
        peer.batches.splice(peer.batches.end(), one);
        if (!self().at_once(peer, batch)) wake_.ring();
        look_by(deadline_s);
        return ticket;
    }

    bool connected(const std::string& name) {
        if (forked()) return false;
        const std::lock_guard lock(mutex_);
        const Peer* peer = named(name);
        return peer && peer->connected();
    }

    // Unknown peers are ignored.
    void close_peer(const std::string& name) {
        if (forked()) return;
        const std::lock_guard lock(mutex_);
        if (Peer* peer = named(name)) begin_closing(*peer);
        wake_.ring();
    }

    // What happened since the last call; also after close(). Does not take the mutex: Python's lock may be held.
    std::vector<Report> poll() {
        if (forked()) return {};
        return outbox_.take_all();
    }

    int fd() const { return outbox_.fd(); }

    // Close every peer, wait up to `grace_s` until all are quiet, and end the thread. False if a library of others
    // has held the thread up until `limit_s`: then the engine must never be freed.
    bool close(double grace_s, double limit_s = kForever) {
        if (forked()) return true;
        const std::lock_guard one_at_a_time(close_mutex_);
        if (!thread_) return true;
        {
            const std::lock_guard lock(mutex_);
            give_up_s_ = now_s() + grace_s;
            look_by(give_up_s_);
            for (auto& [name, peer] : peers_) begin_closing(*peer);
            wake_.ring();
        }
        const bool in_time = over_in(limit_s);
        if (in_time)
            thread_->join();
        else
            thread_->detach();
        delete std::exchange(thread_, nullptr);
        return in_time;
    }

  protected:
    using Base = Engine;
    using Lock = std::unique_lock<std::mutex>;

    Engine() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
        if (epoll_.get() < 0 || !watch(wake_.fd(), nullptr, EPOLLIN))
            throw std::system_error(errno, std::generic_category(), "epoll of a transport");
    }
    ~Engine() = default;

    // Call at the end of the constructor.
    void start(const char* thread_name) {
        const SignalsBlocked blocked;
        thread_ = new std::thread([this] { run(); });
        pthread_setname_np(thread_->native_handle(), thread_name);
    }

    // ---- used with the mutex held ----

    Peer* named(const std::string& name) const {
        const auto at = peers_.find(name);
        return at == peers_.end() ? nullptr : at->second.get();
    }

    // A peer to be given one more direction, which `has` tells of; made if there is none.
    Peer& to_open(const std::string& name, bool (Peer::*has)() const) {
        refuse_closed();
        if (outbox_.tells_end_of(name)) throw Taken<Self>("peer name " + name + " is used twice");
        std::unique_ptr<Peer>& slot = peers_[name];
        if (!slot) slot = std::make_unique<Peer>(name);
        if (!slot->usable() || (*slot.*has)()) throw Taken<Self>("peer name " + name + " is used twice");
        return *slot;
    }

    void refuse_closed() const {
        if (std::isfinite(give_up_s_)) throw Unusable<Self>("the transport is closed");
    }

    Peer& to_write(const std::string& name) const {
        Peer* peer = named(name);
        if (!peer || peer->closing) throw Unusable<Self>("no open peer " + name);
        if (!peer->failure.empty()) throw Unusable<Self>("peer " + name + " has failed: " + peer->failure);
        if (!peer->dialed()) throw Unusable<Self>("not connected to peer " + name);
        return *peer;
    }

    void fail(Peer& peer, const std::string& reason, Outcome outcome, Lock& lock) {
        peer.failure = reason;
        peer.connect_by_s = kForever;
        self().stop(peer, lock);
        outbox_.put({.kind = Report::Kind::kPeerFailed, .peer = peer.name, .detail = reason});
        self().report_open(peer, outcome, reason);
        self().quiet(peer, lock);
    }

    void look_by(double when_s) { look_s_ = std::min(look_s_, when_s); }
    bool looks_by(double when_s) const { return look_s_ <= when_s; }

    // A closing peer may be quiet now.
    void look_at_ends() {
        ends_look_s_ = 0;
        ends_pause_s_ = kFirstPause_s;
    }

    // ---- from any thread ----

    // False if the kernel refuses. `what` comes back in `heard`.
    bool watch(int fd, void* what, std::uint32_t events) {
        epoll_event event{};
        event.events = events;
        event.data.ptr = what;
        return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0 ||
               (errno == EEXIST && ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0);
    }
    void unwatch(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

    bool forked() const { return ::getpid() != owner_pid_; }
    void refuse_fork() const {
        if (forked())
            throw Unusable<Self>("this transport belongs to the parent of this forked process; open one here");
    }

    // ---- what a transport may leave as it is ----

    static constexpr double kBusyWait_s = 0;  // how often a busy thread asks the kernel what happened
    void stop(Peer&, Lock&) {}
    void keep_out(Peer&) {}
    void give_up(Peer&, Lock&) {}
    void look(double, Lock&) {}
    bool may_wait(Lock&) { return true; }
    double earliest(const Peer& peer) const {
        double earliest_s = kForever;
        for (const Batch& batch : peer.batches) earliest_s = std::min(earliest_s, batch.deadline_s);
        return earliest_s;
    }
    void report_open(Peer& peer, Outcome outcome, const std::string& detail) {
        for (const Batch& batch : peer.batches) outbox_.put(ended(peer.name, batch, outcome, detail));
        peer.batches.clear();
    }

    const pid_t owner_pid_ = ::getpid();
    Outbox outbox_;
    Descriptor epoll_;
    Bell wake_;

    std::mutex mutex_;  // guards everything below; may be held while taking the outbox's
    std::vector<Extent> regions_;
    std::map<std::string, std::unique_ptr<Peer>> peers_;
    double give_up_s_ = kForever;  // finite once closing down

  private:
    // When a closing peer is looked at again if no event tells; then rarer.
    static constexpr double kFirstPause_s = 0.0002, kLastPause_s = 0.01;

    Self& self() { return static_cast<Self&>(*this); }

    // Whether the thread ends within `limit_s`, whatever signals come.
    bool over_in(double limit_s) const {
        if (std::isinf(limit_s)) return true;
        pollfd over{.fd = over_.fd(), .events = POLLIN, .revents = 0};
        const double by_s = now_s() + limit_s;
        int found = -1;
        do {
            found = ::poll(&over, 1, static_cast<int>(std::max(0.0, by_s - now_s()) * 1000));
        } while (found < 0 && errno == EINTR);
        return found == 1;
    }

    void begin_closing(Peer& peer) {
        if (peer.closing) return;
        peer.closing = true;
        self().keep_out(peer);
        look_at_ends();
    }

    void run() {
        Lock lock(mutex_);
        bool more = false;
        double waited_s = 0;
        while (true) {
            double now = now_s();
            if (now >= ends_look_s_) advance_ends(lock);
            if (now >= look_s_) look_at_deadlines(now, lock);
            if (std::isfinite(give_up_s_) && (peers_.empty() || now >= give_up_s_)) break;
            const bool busy = more || now >= ends_look_s_ || !self().may_wait(lock);
            if (!busy || now - waited_s >= Self::kBusyWait_s) {
                wait(lock, busy ? 0 : std::min({look_s_, ends_look_s_, now + 3600}) - now);
                waited_s = now;
            }
            more = self().round(lock);
        }
        self().cleanup(lock);
        over_.ring();
    }

    void wait(Lock& lock, double timeout_s) {
        epoll_event events[64];
        lock.unlock();
        const int count = ::epoll_wait(epoll_.get(), events, std::size(events),
                                       static_cast<int>(std::ceil(std::max(0.0, timeout_s) * 1000)));
        lock.lock();
        for (int i = 0; i < count; ++i)
            if (void* what = events[i].data.ptr)
                self().heard(what, events[i].events, lock);
            else
                wake_.hush();
    }

    // Check all deadlines, and find the next one.
    void look_at_deadlines(double now, Lock& lock) {
        look_s_ = give_up_s_;
        self().look(now, lock);
        for (auto& [name, peer] : peers_) {
            if (peer->usable()) {
                const double earliest_s = self().earliest(*peer);
                if (now >= earliest_s)
                    fail(*peer, "batch deadline passed", Outcome::kTimeout, lock);
                else if (now >= peer->connect_by_s)
                    fail(*peer, "no connection" + peer->where + " in time", Outcome::kPeerFailed, lock);
                else
                    look_by(std::min(earliest_s, peer->connect_by_s));
            }
            if (now >= peer->drain_by_s) {
                peer->drain_by_s = kForever;
                self().give_up(*peer, lock);
                look_at_ends();
            }
            look_by(peer->drain_by_s);
        }
    }

    // Cancel the batches of closing peers, and forget the peers that are quiet.
    void advance_ends(Lock& lock) {
        ends_look_s_ = kForever;
        bool waiting = false;
        for (auto at = peers_.begin(); at != peers_.end();) {
            Peer& peer = *at->second;
            if (peer.closing) {
                peer.connect_by_s = kForever;
                self().stop(peer, lock);
                self().report_open(peer, Outcome::kCancelled, "closed by this side");
                if (self().quiet(peer, lock)) {
                    outbox_.put({.kind = Report::Kind::kPeerClosed, .peer = peer.name});
                    at = peers_.erase(at);
                    continue;
                }
                waiting = true;
            }
            ++at;
        }
        if (!waiting) return;
        ends_look_s_ = std::min(ends_look_s_, now_s() + ends_pause_s_);
        ends_pause_s_ = std::min(2 * ends_pause_s_, kLastPause_s);
    }

    double look_s_ = 0;              // when to look at deadlines again
    double ends_look_s_ = kForever;  // when to look at closing peers again
    double ends_pause_s_ = kFirstPause_s;
    std::uint64_t next_ticket_ = 1;
    Bell over_;  // rung by the thread before it ends

    std::mutex close_mutex_;
    std::thread* thread_ = nullptr;  // leaked in a forked child, where it cannot be joined
};

}  // namespace pdlink
