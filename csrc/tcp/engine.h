// `Engine`: one native thread that owns every socket of the tcp transport.
//
// Threads. Callers of any thread put work into tables under one mutex and wake the progress thread through an
// eventfd; they never wait for it, except in `close`. The progress thread takes the mutex to choose work and to
// record results, never while it sends, receives or closes. It never calls into Python. Any thread adds batches,
// connections and peers; only the progress thread removes them, so its pointers stay valid while the mutex is free.
//
// Rounds. Sockets are edge-triggered: `Ready` keeps the kernel's event until EAGAIN. In every round each connection
// has one turn of about a frame in each direction, so all peers share the thread.
//
// Who may write here. An invitation is a session number and a secret. A connection is a stranger until it has sent
// both, with a short deadline; a new stranger replaces the oldest. A frame is checked against the regions of its
// session, and the blocks that are open to its peer (tcp/guard.h), before a byte of it is placed. If blocks are
// closed while a frame for them arrives, the rest of it is not placed. A broken rule fails the peer as a whole.
//
// The fence. Owner: it reports PeerClosed after the placing thread has ended the peer's sockets; bytes in their
// buffers are discarded. Writer: it stops sending, shuts its side, and reports PeerClosed when the owner has ended
// the connection, too. The owner does so after it has read the rest; a suspended owner gets 10 seconds, and its own
// fence discards bytes that are still in its kernel then.
//
// Fork. A child has no progress thread. There, every call throws, and destructors close descriptors without shutting
// the parent's connections. A child holds a copy of every descriptor, and epoll reports a socket until its last copy
// is closed: so sockets are closed only by `end`, which removes them from epoll first.
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

#include "common/bell.h"
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
    // Restrict peers to the blocks that are open to them. Call once, before the first invitation; throws
    // std::invalid_argument otherwise, and as Guard.
    void guard(std::vector<Band> bands, std::uint64_t num_blocks);
    // Open blocks to a peer, and close them. After `close_blocks` no byte of the peer is placed there any more. Both
    // ignore unknown peers. Throw as Guard.
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
    // Connections that were ended because they broke the protocol.
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
        bool drained = false;  // closing or failed: batches are reported, our side is shut
        double drain_by_s = std::numeric_limits<double>::infinity();

        bool usable() const { return !closing && failure.empty(); }
        bool connected() const { return dialed; }
    };
    // A connection that has not sent its Hello yet.
    struct Stranger {
        Descriptor socket;
        double by_s;
        Ready ready;
        Hello hello{};
        std::size_t nbytes = 0;
    };
    // Bytes of a stranger's Hello so far.
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
    // False if the kernel refuses; the connection's deadline reports it then.
    bool watch(int fd, Ready& ready, std::uint32_t events);
    // End a connection in both directions and remove it from epoll; then it may be closed.
    void end(int fd);
    void look_by(double when_s) { look_s_ = when_s < look_s_ ? when_s : look_s_; }
    bool forked() const { return ::getpid() != owner_pid_; }
    void refuse_fork() const;
    void refuse_closed() const;

    const pid_t owner_pid_ = ::getpid();
    const Settings settings_;
    Address address_;
    Outbox outbox_;
    Descriptor epoll_;
    Bell wake_;
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
