#include "ucx/progress.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "common/peers.h"

namespace pdlink::ucx {
namespace {

// Fallback poll interval in case UCX misses a wake-up; NIXL polls for the same reason.
constexpr std::chrono::milliseconds kNet{100};
// So many progress calls before commands and other peers get their turn.
constexpr int kProgressPerTurn = 256;
// How often to look whether a writer inside a shut gate has left: soon at first, then at little cost.
constexpr std::chrono::milliseconds kGatePauseMin{1};
constexpr std::chrono::milliseconds kGatePauseMax{20};
// After so many wake-ups without anything to do, sleep at least so long. While a TCP peer does not answer the first
// message (a stopped process), UCX waits for its socket to be writable, which it is all the time (1.22: half a core).
constexpr int kFruitlessWakeups = 16;
constexpr int kFruitlessPause_ms = 2;

}  // namespace

Progress::Progress(const Library& library, const Choice& choice, Outbox& outbox, const Bell& bell)
    : outbox_(outbox),
      context_(std::make_unique<Context>(library, choice)),
      writing_(context_->make_worker()),
      bell_(bell),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    try {
        if (epoll_.get() < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
        watch(commands_watch_, Watch::Kind::COMMANDS, nullptr, bell.fd());
        watch(writing_watch_, Watch::Kind::WRITING, nullptr, context_->worker_fd(writing_));
    } catch (...) {
        library.ucp_worker_destroy(writing_);
        throw;
    }
}

Progress::~Progress() {
    bool ended = true;
    for (auto& [name, peer] : peers_) {
        if (peer->incoming) peer->incoming->shut();
        ended = ended && (!peer->outgoing || peer->outgoing->ended());
    }
    for (const auto& outgoing : leaving_) ended = ended && outgoing->ended();
    if (ended) {
        context_->ucx().ucp_worker_destroy(writing_);
        return;
    }
    // An endpoint that UCX will not give up even by force. Destroying its worker could crash; a leak cannot.
    for (auto& [name, peer] : peers_) (void)peer->outgoing.release();
    for (auto& outgoing : leaving_) (void)outgoing.release();
    (void)context_.release();
}

void Progress::watch(Watch& watch, Watch::Kind kind, Peer* peer, int fd) {
    watch = {kind, peer, fd};
    epoll_event event{.events = EPOLLIN, .data = {.ptr = &watch}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
}

void Progress::unwatch(Watch& watch) {
    if (watch.fd >= 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, watch.fd, nullptr);
    watch.fd = -1;
}

Progress::Peer& Progress::peer_named(const std::string& name) {
    std::unique_ptr<Peer>& peer = peers_[name];
    if (!peer) peer = std::make_unique<Peer>(name);
    return *peer;
}

Registered Progress::add_region(std::uintptr_t base, std::uint64_t nbytes, std::uintptr_t cuda_context) {
    const std::uint32_t index = context_->add_region(base, nbytes, cuda_context);
    return {index, context_->regions()[index].rkey};
}

Opening Progress::invite(const std::string& name) {
    auto incoming = std::make_unique<Incoming>(*context_);
    Peer& peer = peer_named(name);
    watch(peer.incoming_watch, Watch::Kind::INCOMING, &peer, incoming->fd());
    peer.incoming = std::move(incoming);
    peer.incoming_awake = true;
    return {peer.incoming->address(), peer.incoming->gate().name()};
}

void Progress::connect(const std::string& name, const Remote& remote, std::shared_ptr<Face> face) {
    Peer& peer = peer_named(name);
    auto outgoing = std::make_unique<Outgoing>(*context_, writing_, name, outbox_, std::move(face));
    try {
        outgoing->open(remote);
        if (outgoing->pidfd() >= 0) watch(peer.process_watch, Watch::Kind::PROCESS, &peer, outgoing->pidfd());
    } catch (...) {
        outgoing->close(true);
        leaving_.push_back(std::move(outgoing));
        if (!peer.incoming) peers_.erase(name);
        throw;
    }
    peer.outgoing = std::move(outgoing);
}

void Progress::submit(const std::string& name, std::unique_ptr<Batch> batch) {
    const auto found = peers_.find(name);
    if (found != peers_.end() && found->second->outgoing) return found->second->outgoing->submit(std::move(batch));
    // Submitted by another thread while connect() was failing.
    outbox_.put(done(name, *batch, Outcome::kPeerFailed, "not connected"));
}

void Progress::close_peer(const std::string& name) {
    const auto found = peers_.find(name);
    if (found != peers_.end()) return begin_closing(*found->second, false);
    outbox_.put({.kind = Report::Kind::kPeerClosed, .peer = name});  // it had failed to open
}

void Progress::begin_closing(Peer& peer, bool by_force) {
    if (peer.incoming && !peer.closing) {
        unwatch(peer.incoming_watch);
        peer.incoming->shut();
    }
    if (peer.outgoing) peer.outgoing->close(by_force);
    peer.closing = true;
    gate_pause_ = kGatePauseMin;
    next_gate_check_ = Clock::now();
}

// Tells of every peer that is being closed and can neither write nor be written by any more.
void Progress::finish_closing(Clock::time_point now) {
    const bool look_at_gates = now >= next_gate_check_;
    bool waiting = false;
    for (auto it = peers_.begin(); it != peers_.end();) {
        Peer& peer = *it->second;
        const bool written_out = peer.closing && (!peer.outgoing || peer.outgoing->ended());
        if (!written_out || (peer.incoming && !(look_at_gates && peer.incoming->quiet()))) {
            waiting = waiting || (written_out && peer.incoming);
            ++it;
            continue;
        }
        unwatch(peer.process_watch);
        if (peer.outgoing && peer.outgoing->referenced()) leaving_.push_back(std::move(peer.outgoing));
        Report closed{.kind = Report::Kind::kPeerClosed, .peer = peer.name};
        it = peers_.erase(it);
        outbox_.put(std::move(closed));
    }
    if (!waiting) {
        next_gate_check_ = Clock::time_point::max();
    } else if (look_at_gates || next_gate_check_ == Clock::time_point::max()) {
        next_gate_check_ = now + gate_pause_;
        gate_pause_ = std::min(2 * gate_pause_, kGatePauseMax);
    }
}

bool Progress::progress_worker(ucp_worker_h worker) {
    const TouchesPages pages;  // UCX does, by its own hands; our callbacks in there touch what this thread owns
    for (int i = 0; i < kProgressPerTurn; ++i) {
        if (context_->ucx().ucp_worker_progress(worker) == 0) return false;
        worked_ = true;
    }
    return true;
}

bool Progress::turn() {
    bool more = progress_worker(writing_);
    for (auto& [name, peer] : peers_)
        if (peer->incoming_awake && peer->incoming->worker() && progress_worker(peer->incoming->worker()))
            more = true;
    const Clock::time_point now = Clock::now();
    for (auto& [name, peer] : peers_) {
        if (!peer->outgoing) continue;
        peer->outgoing->expire(now);
        if (peer->outgoing->step()) more = worked_ = true;
    }
    for (auto& outgoing : leaving_)
        if (outgoing->step()) more = true;
    std::erase_if(leaving_, [](const auto& outgoing) { return outgoing->ended() && !outgoing->referenced(); });
    finish_closing(now);
    return more;
}

// False if the worker has something to do first.
bool Progress::arm(ucp_worker_h worker) { return context_->ucx().ucp_worker_arm(worker) == UCS_OK; }

int Progress::sleep_ms(Clock::time_point now) const {
    auto until = std::min(now + kNet, next_gate_check_);
    for (const auto& [name, peer] : peers_)
        if (peer->outgoing) until = std::min(until, peer->outgoing->deadline());
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
    return static_cast<int>(std::max<std::int64_t>(left, 0));
}

void Progress::pause_if_fruitless() {
    fruitless_wakeups_ = worked_ ? 0 : fruitless_wakeups_ + 1;
    worked_ = false;
    if (fruitless_wakeups_ < kFruitlessWakeups) return;
    pollfd bell{.fd = bell_.fd(), .events = POLLIN, .revents = 0};
    ::poll(&bell, 1, kFruitlessPause_ms);
}

void Progress::sleep() {
    pause_if_fruitless();
    if (!arm(writing_)) return;
    for (auto& [name, peer] : peers_) {
        if (!peer->incoming_awake || !peer->incoming->worker()) continue;
        if (!arm(peer->incoming->worker())) return;
        peer->incoming_awake = false;
    }
    std::array<epoll_event, 64> ready;
    const int num_ready = ::epoll_wait(epoll_.get(), ready.data(), ready.size(), sleep_ms(Clock::now()));
    for (int i = 0; i < num_ready; ++i) {
        Watch& watch = *static_cast<Watch*>(ready[i].data.ptr);
        if (watch.kind == Watch::Kind::INCOMING) {
            watch.peer->incoming_awake = true;
        } else if (watch.kind == Watch::Kind::PROCESS) {
            watch.peer->outgoing->lose("the peer's process has ended");
            unwatch(watch);
        }
    }
    if (num_ready > 0) return;
    fruitless_wakeups_ = 0;
    for (auto& [name, peer] : peers_) peer->incoming_awake = peer->incoming != nullptr;
}

void Progress::close(Clock::time_point until) {
    for (auto& [name, peer] : peers_) begin_closing(*peer, true);
    while (!(peers_.empty() && leaving_.empty()) && Clock::now() < until)
        if (!turn()) sleep();
}

}  // namespace pdlink::ucx
