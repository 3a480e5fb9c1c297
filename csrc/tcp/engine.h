// `Engine`: one native thread that owns every socket of the tcp transport.
//
// Threads. Callers of any thread put work into tables under one mutex and wake the progress thread through an
// eventfd; they never wait for it, except `close`. The progress thread takes the mutex to choose work and to record
// what became of it, never while it sends, receives or closes. It never calls into Python. Batches, connections and
// peers are added by anybody and removed by it alone, so what it points to while the mutex is free stays.
//
// Rounds. Sockets are edge-triggered: the kernel's word is kept in `Ready` until EAGAIN takes it back. In every round
// each connection has one turn of about a frame in each direction, so peers share the thread whatever they send.
//
// Who may write here. An invitation is a session number and a secret. A connection is a stranger until it has said
// both, has little time for it, and the oldest stranger makes room for a new one. A frame is checked against the
// regions of its session, and the blocks that are open to its peer (tcp/guard.h), before a byte of it is placed.
// Blocks may be closed while a frame for them arrives: the rest of it is not placed. Any rule broken fails the peer
// as a whole.
//
// The fence. Owner: PeerClosed is said after the peer's sockets are ended on the thread that places bytes; what was
// in their buffers is gone. Writer: it sends no more, shuts its side, and says PeerClosed when the owner has ended
// the connection too, which the owner does as soon as it has read the rest: up to 10 seconds later, for an owner that
// is stopped; what then still lies in the owner's own kernel is a matter of the owner's fence.
//
// Fork. A child has no progress thread. There, every call is refused, and destructors close descriptors without
// shutting the parent's connections. While a child lives it holds a copy of every descriptor, and epoll goes on to
// report a socket until its last copy is closed: so no socket is closed but by `end`, which takes it out first.
#pragma once

#include <unistd.h>

#include <array>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/descriptor.h"
#include "common/native.h"
#include "common/outbox.h"
#include "common/peers.h"
#include "common/runs.h"
#include "copy/peer_memory.h"
#include "tcp/guard.h"
#include "tcp/incoming.h"
#include "tcp/outgoing.h"
#include "tcp/sockets.h"
#include "tcp/wire.h"

namespace pdlink::tcp {

using PeerUnusable = Unusable<class Engine>;
using NameTaken = Taken<class Engine>;

using Token = std::array<std::uint8_t, kTokenNbytes>;

struct Invitation {
    std::uint64_t session;
    Token token;
    std::vector<std::uint64_t> regions;  // sizes
};

struct Settings {
    std::string host;        // numeric, to listen on
    std::uint16_t streams;   // connections to each peer
    std::string congestion;  // "": chosen for peers on this host, the kernel's default for others
    double connect_timeout_s;
    double hello_timeout_s;
    std::uint64_t pack_below;  // runs shorter than this are packed on their way
};

class Engine {
  public:
    // Listens and starts the thread. Throws std::system_error, std::invalid_argument.
    explicit Engine(Settings settings);
    ~Engine();  // close(), without waiting for owners
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    std::uint16_t port() const { return address_.port; }
    std::size_t add_region(std::byte* base, std::size_t nbytes);
    // From now on peers may write only to blocks that are open to them. Before the first peer is invited, and once;
    // throws std::invalid_argument otherwise, and as Guard.
    void guard(std::vector<Band> bands, std::uint64_t num_blocks);
    // Let a peer write to blocks, and no longer. When `close_blocks` returns nothing of it is being placed there, nor
    // will be. Both ignore peers that are not there. Throw as Guard.
    void open_blocks(const std::string& peer, std::span<const std::int64_t> blocks);
    void close_blocks(const std::string& peer, std::span<const std::int64_t> blocks);
    // Throws NameTaken.
    Invitation invite(const std::string& peer);
    // Throws NameTaken, std::system_error, std::invalid_argument.
    void connect(const std::string& peer, const Address& address, const Invitation& there);
    // Queue one batch and return its ticket. Throws std::invalid_argument for a run outside its region.
    std::uint64_t submit(const std::string& peer, const std::vector<Piece>& pieces, double timeout_s);

    // Whether a connection to the peer is there.
    bool connected(const std::string& peer);
    // The congestion control of the connections to a peer, in order.
    std::vector<std::string> congestion(const std::string& peer);
    // Connections that were ended because they did not say what was expected of them.
    std::uint64_t strangers_dropped();

    void close_peer(const std::string& peer);
    // What happened since the last call; also after close().
    std::vector<Report> poll();
    int fd() const { return outbox_.fd(); }
    // Close every peer, wait up to `grace_s` for owners that have not read all yet, and end the thread.
    void close(double grace_s);

  private:
    struct Peer {
        explicit Peer(std::string peer_name) : name(std::move(peer_name)) {}
        std::string name;
        // Invited: what the peer must say, and may write to.
        bool invited = false;
        std::uint32_t number = Guard::kNobody;
        std::uint64_t session = 0;
        Token token{};
        std::uint32_t streams_taken = 0;  // bits
        std::shared_ptr<const std::vector<Region>> regions;
        std::vector<std::unique_ptr<Incoming>> in;
        // Connected: where we write to.
        bool dialed = false;
        Address address;
        std::vector<Extent> remote;
        std::vector<std::unique_ptr<Outgoing>> out;
        std::list<Batch> batches;
        double connect_by_s = std::numeric_limits<double>::infinity();

        std::string failure;  // not empty: failed
        bool closing = false;
        bool drained = false;  // closing or failed: batches are reported, owners have been told
        double drain_by_s = std::numeric_limits<double>::infinity();

        bool usable() const { return !closing && failure.empty(); }
        bool connected() const { return dialed; }
    };
    // Somebody who has connected and not said yet who it is.
    struct Stranger {
        Descriptor socket;
        double by_s;
        Ready ready;
        Hello hello{};
        std::size_t nbytes = 0;
    };
    // What a stranger has said so far.
    enum class Heard { kNotAll, kInvited, kNothing };
    using Lock = std::unique_lock<std::mutex>;

    void run();
    void wait(Lock& lock, int timeout_ms);
    bool round(Lock& lock);
    bool accept_some();
    Heard listen_to(Stranger& stranger);
    std::list<Stranger>::iterator send_away(std::list<Stranger>::iterator stranger);
    Peer* introduced(const Stranger& stranger);
    bool serve_in(Peer& peer, std::size_t index, Lock& lock);
    bool serve_out(Peer& peer, Outgoing& out, Lock& lock);
    bool sent_at_once(Peer& peer, Batch& batch);
    void took(Peer& peer, const std::vector<Batch*>& answered);
    void look_at_deadlines(double now);
    void advance_ends();
    void fail(Peer& peer, const std::string& reason, Outcome outcome = Outcome::kPeerFailed);
    void quiesce(Peer& peer, Outcome outcome, const std::string& detail);
    // False if the kernel will not; the connection's deadline then says so.
    bool watch(int fd, Ready& ready, std::uint32_t events);
    // Both ends of a connection say good-bye now, and no event of it comes any more. Then it may be closed.
    void end(int fd);
    void look_by(double when_s) { look_s_ = when_s < look_s_ ? when_s : look_s_; }
    void kick();
    bool forked() const { return ::getpid() != owner_pid_; }
    void refuse_fork() const;
    void refuse_closed() const;

    const pid_t owner_pid_ = ::getpid();
    const Settings settings_;
    Address address_;
    Outbox outbox_;
    Descriptor epoll_;
    Descriptor wake_;
    Descriptor listener_;
    Ready woken_;
    Ready knocked_;

    std::mutex mutex_;  // guards everything below; may be held while taking the outbox's
    std::vector<Region> regions_;
    Peers<Peer, Engine> peers_;
    std::unordered_map<std::uint64_t, Peer*> sessions_;
    std::list<Stranger> strangers_;  // oldest first
    std::uint64_t strangers_dropped_ = 0;
    bool ending_ = false;  // a peer is closing or has failed and is not drained
    double look_s_ = 0;    // when to look at deadlines again
    double accept_again_s_ = std::numeric_limits<double>::infinity();
    double give_up_s_ = std::numeric_limits<double>::infinity();  // finite once closing down
    std::uint64_t next_ticket_ = 1;
    std::shared_ptr<Guard> guard_;
    std::uint32_t next_number_ = 1;  // of invited peers; none is used twice

    std::mutex join_mutex_;
    std::thread* thread_ = nullptr;  // leaked in a forked child, where it cannot be joined
};

}  // namespace pdlink::tcp
