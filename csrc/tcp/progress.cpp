// The thread of the tcp transport; see tcp/engine.h.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tcp/engine.h"

namespace pdlink::tcp {
namespace {

// Descriptors for connections that have not proved anything. A flood of 50,000 a second turns over so many in 5 ms,
// which is how long the Hello of an invited peer may take.
constexpr std::size_t kMaxStrangers = 256;
constexpr int kAcceptsPerRound = 64;
constexpr double kAcceptPause_s = 0.1;  // after the process has run out of descriptors
constexpr double kDrainLimit_s = 10.0;

// Constant time.
bool equal(const std::uint8_t* one, const std::uint8_t* other, std::size_t nbytes) {
    std::uint8_t difference = 0;
    for (std::size_t i = 0; i < nbytes; ++i) difference |= one[i] ^ other[i];
    return difference == 0;
}

// While it exists, its owner works on a connection without the mutex.
class Away {
  public:
    Away(std::unique_lock<std::mutex>& lock, Outgoing& out) : lock_(lock), out_(out) {
        out_.busy = true;
        lock_.unlock();
    }
    ~Away() {
        lock_.lock();
        out_.busy = false;
    }
    Away(const Away&) = delete;
    Away& operator=(const Away&) = delete;

  private:
    std::unique_lock<std::mutex>& lock_;
    Outgoing& out_;
};

}  // namespace

void Engine::cleanup(Lock&) {
    for (auto& [name, peer] : peers_) {
        for (const auto& in : peer->in) end(in->fd());
        for (const auto& out : peer->out) end(out->fd());
    }
    for (const Stranger& stranger : strangers_) end(stranger.socket.get());
    peers_.clear();
    sessions_.clear();
    strangers_.clear();
    listener_ = Descriptor();
}

void Engine::heard(void* what, std::uint32_t events, Lock&) {
    // Its connection exists: only this thread removes connections, and not while events wait.
    Ready& ready = *static_cast<Ready*>(what);
    const bool trouble = events & (EPOLLERR | EPOLLHUP);
    if (trouble || events & (EPOLLIN | EPOLLRDHUP)) ready.in = true;
    if (trouble || events & EPOLLOUT) ready.out = true;
}

// One turn for each connection. True if one of them has more to do.
bool Engine::round(Lock& lock) {
    for (auto at = strangers_.begin(); at != strangers_.end();) at = at->ready.in ? hear(at) : std::next(at);
    bool more = knocked_.in && accept_some();
    for (auto& [name, peer] : peers_) {
        for (std::size_t i = peer->in.size(); i-- > 0;)
            if (i < peer->in.size() && peer->in[i]->has_work()) more |= serve_in(*peer, i, lock);
        for (std::size_t i = peer->out.size(); i-- > 0;)
            if (i < peer->out.size()) more |= serve_out(*peer, *peer->out[i], lock);
    }
    return more;
}

// ---- strangers --------------------------------------------------------------------------------------------------

// True if there may be more of them.
bool Engine::accept_some() {
    for (int accepted = 0; accepted < kAcceptsPerRound;) {
        const int fd = accept_one(listener_.get());
        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED) continue;
            knocked_.in = false;
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                accept_again_s_ = now_s() + kAcceptPause_s;
                look_by(accept_again_s_);
            }
            return false;
        }
        ++accepted;
        if (strangers_.size() >= kMaxStrangers) make_room();
        Stranger& stranger = strangers_.emplace_back();
        stranger.socket = Descriptor(fd);
        stranger.by_s = now_s() + settings_.hello_timeout_s;
        watch(fd, stranger.ready);
        look_by(stranger.by_s);
        hear(std::prev(strangers_.end()));
    }
    return true;
}

// The oldest goes, unless it turns out to be invited. It had the time in which kMaxStrangers others came.
void Engine::make_room() {
    hear(strangers_.begin());
    if (strangers_.size() >= kMaxStrangers) send_away(strangers_.begin());
}

// Read what a stranger says. It leaves the list if it is invited, or not worth listening to. Returns the next one.
std::list<Engine::Stranger>::iterator Engine::hear(std::list<Stranger>::iterator stranger) {
    const Heard heard = listen_to(*stranger);
    if (heard == Heard::kNothing) return send_away(stranger);
    return heard == Heard::kInvited ? strangers_.erase(stranger) : std::next(stranger);
}

std::list<Engine::Stranger>::iterator Engine::send_away(std::list<Stranger>::iterator stranger) {
    end(stranger->socket.get());
    ++strangers_dropped_;
    return strangers_.erase(stranger);
}

// Read a stranger's Hello. An invited stranger passes its socket to its peer.
Engine::Heard Engine::listen_to(Stranger& stranger) {
    auto* at = reinterpret_cast<std::byte*>(&stranger.hello);
    while (stranger.nbytes < sizeof stranger.hello) {
        const ssize_t got = ::recv(stranger.socket.get(), at + stranger.nbytes,
                                   sizeof stranger.hello - stranger.nbytes, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            stranger.ready.in = false;
            return Heard::kNotAll;
        }
        if (got <= 0) return Heard::kNothing;
        stranger.nbytes += static_cast<std::size_t>(got);
    }
    Peer* peer = introduced(stranger);
    if (!peer) return Heard::kNothing;
    set_options(stranger.socket.get());
    peer->streams_taken |= 1U << stranger.hello.stream;
    auto in = std::make_unique<Incoming>(std::move(stranger.socket), peer->session, peer->regions, guard_,
                                         peer->number, settings_.pack_below);
    in->ready = stranger.ready;
    watch(in->fd(), in->ready);
    peer->in.push_back(std::move(in));
    return Heard::kInvited;
}

// The peer that sent a Hello; null if the proof is wrong.
Peer* Engine::introduced(const Stranger& stranger) {
    const Hello& hello = stranger.hello;
    if (hello.magic != kHelloMagic || hello.version != kVersion || hello.stream >= kMaxStreams) return nullptr;
    const auto at = sessions_.find(hello.session);
    if (at == sessions_.end()) return nullptr;
    Peer* peer = at->second;
    const bool known = equal(hello.token, peer->token.data(), kTokenNbytes);
    return known && peer->usable() && (peer->streams_taken >> hello.stream & 1) == 0 ? peer : nullptr;
}

// ---- connections ------------------------------------------------------------------------------------------------

bool Engine::serve_in(Peer& peer, std::size_t index, Lock& lock) {
    if (!peer.usable()) return false;
    Incoming& in = *peer.in[index];
    lock.unlock();
    const Turn turn = in.receive();
    lock.lock();
    if (turn == Turn::kMore || turn == Turn::kIdle) return turn == Turn::kMore;
    const std::string reason = in.reason();
    end(in.fd());
    peer.in.erase(peer.in.begin() + static_cast<std::ptrdiff_t>(index));
    // An end between two frames: the writer has closed properly.
    if (turn == Turn::kBroken && peer.usable())
        fail(peer, "the connection from it: " + reason, Outcome::kPeerFailed, lock);
    return false;
}

bool Engine::serve_out(Peer& peer, Outgoing& out, Lock& lock) {
    if (!out.connected()) {
        if (!out.ready.out || !peer.usable()) return false;
        if (const int code = connect_error(out.fd()); code != 0) {
            fail(peer, "connecting" + peer.where + ": " + std::strerror(code), Outcome::kPeerFailed, lock);
            return false;
        }
        choose_congestion(out.fd(), settings_.congestion);
        out.set_connected();
        bool all = true;
        for (const auto& one : peer.out) all &= one->connected();
        if (all) peer.connect_by_s = kForever;
    }
    std::vector<Batch*> answered;
    Turn turn = Turn::kIdle;
    if (out.ready.in) {
        {
            const Away away(lock, out);
            turn = out.receive(answered);
        }
        took(peer, answered);
    }
    if (turn == Turn::kIdle && peer.usable() && out.ready.out) {
        if (out.sent())
            for (Batch& batch : peer.batches)
                if (!batch.cut) {
                    out.load(batch);
                    break;
                }
        if (out.sent()) return false;
        answered.clear();
        {
            const Away away(lock, out);
            turn = out.send();
            if (turn == Turn::kBroken) {
                out.ready.in = true;  // read the owner's reason first, if it sent one
                out.receive(answered);
            }
        }
        took(peer, answered);
        if (turn == Turn::kMore || turn == Turn::kIdle) return turn == Turn::kMore;
    }
    if (turn != Turn::kEnded && turn != Turn::kBroken) return false;
    const std::string reason = out.reason();
    end(out.fd());
    if (peer.usable()) fail(peer, reason, Outcome::kPeerFailed, lock);
    std::erase_if(peer.out, [&](const auto& one) { return one.get() == &out; });
    if (peer.closing) look_at_ends();
    return false;
}

// Remove answered frames; report batches without unanswered ones.
void Engine::took(Peer& peer, const std::vector<Batch*>& answered) {
    for (Batch* batch : answered) {
        --batch->unanswered;
        if (!batch->landed()) continue;
        outbox_.put(done(peer.name, *batch));
        peer.batches.remove_if([batch](const Batch& one) { return &one == batch; });
    }
}

// ---- ends -------------------------------------------------------------------------------------------------------

void Engine::look(double now, Lock&) {
    if (now >= accept_again_s_) {
        accept_again_s_ = kForever;
        knocked_.in = true;
    }
    look_by(accept_again_s_);
    // All have the same deadline, so the oldest is first.
    while (!strangers_.empty() && now >= strangers_.front().by_s) send_away(strangers_.begin());
    if (!strangers_.empty()) look_by(strangers_.front().by_s);
}

// End what the peer writes through, and send no more.
bool Engine::quiet(Peer& peer, Lock&) {
    if (!std::exchange(peer.drained, true)) {
        for (const auto& in : peer.in) end(in->fd());
        peer.in.clear();
        std::erase_if(peer.out, [this](const auto& out) {
            if (out->drain()) return false;
            end(out->fd());
            return true;
        });
        if (peer.invited()) sessions_.erase(peer.session);
        if (!peer.out.empty()) peer.drain_by_s = now_s() + kDrainLimit_s;
        look_by(peer.drain_by_s);
    }
    return peer.out.empty();
}

void Engine::give_up(Peer& peer, Lock&) {
    for (const auto& out : peer.out) end(out->fd());
    peer.out.clear();
}

}  // namespace pdlink::tcp
