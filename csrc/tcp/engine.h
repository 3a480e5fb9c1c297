// `Engine`: the one thread that owns every socket of the tcp transport (common/engine.h).
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
// Fork. Destructors in a child close descriptors without shutting the parent's connections. A child holds a copy of
// every descriptor, and epoll reports a socket until its last copy is closed: so sockets are closed only by `end`,
// which removes them from epoll first.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/descriptor.h"
#include "common/engine.h"
#include "common/runs.h"
#include "copy/peer_memory.h"
#include "tcp/guard.h"
#include "tcp/incoming.h"
#include "tcp/outgoing.h"
#include "tcp/sockets.h"
#include "tcp/wire.h"

namespace pdlink::tcp {

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

struct Peer : PeerBase<Batch> {
    using PeerBase::PeerBase;
    // Invited: what the peer must say, and may write to.
    std::uint32_t number = Guard::kNobody;
    std::uint64_t session = 0;
    Token token{};
    std::uint32_t streams_taken = 0;  // bits
    std::shared_ptr<const std::vector<Region>> regions;
    std::vector<std::unique_ptr<Incoming>> in;
    // Dialed: where we write to.
    Address address;
    std::vector<Extent> remote;
    std::vector<std::unique_ptr<Outgoing>> out;

    bool drained = false;  // closing or failed: its connections are shut, or wait for the owner to have read all

    bool invited() const { return number != Guard::kNobody; }
    bool dialed() const { return !address.host.empty(); }
    bool connected() const { return !out.empty() && out.front()->connected(); }
};

class Engine final : public pdlink::Engine<Engine, Peer, Batch> {
  public:
    // Listens and starts the thread. Throws std::system_error, std::invalid_argument.
    explicit Engine(Settings settings);
    ~Engine();  // close(), without waiting for owners

    std::uint16_t port() const { return address_.port; }
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

    // The congestion control of the connections to a peer, in order.
    std::vector<std::string> congestion(const std::string& peer);
    // Connections that were ended because they broke the protocol.
    std::uint64_t strangers_dropped();

  private:
    friend Base;
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

    std::vector<Extent> reach(const Peer& peer) const { return peer.remote; }
    bool at_once(Peer& peer, Batch& batch);
    bool round(Lock& lock);
    void heard(void* what, std::uint32_t events, Lock& lock);
    bool quiet(Peer& peer, Lock& lock);
    void give_up(Peer& peer, Lock& lock);
    void look(double now, Lock&);
    bool may_wait(Lock&) const { return !knocked_.in; }
    void cleanup(Lock& lock);

    bool accept_some();
    void make_room();
    std::list<Stranger>::iterator hear(std::list<Stranger>::iterator stranger);
    Heard listen_to(Stranger& stranger);
    std::list<Stranger>::iterator send_away(std::list<Stranger>::iterator stranger);
    Peer* introduced(const Stranger& stranger);
    bool serve_in(Peer& peer, std::size_t index, Lock& lock);
    bool serve_out(Peer& peer, Outgoing& out, Lock& lock);
    void took(Peer& peer, const std::vector<Batch*>& answered);
    // False if the kernel refuses; the connection's deadline reports it then.
    bool watch(int fd, Ready& ready) { return Base::watch(fd, &ready, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET); }
    // End a connection in both directions and remove it from epoll; then it may be closed.
    void end(int fd);

    const Settings settings_;
    Address address_;
    Descriptor listener_;
    Ready knocked_;

    std::unordered_map<std::uint64_t, Peer*> sessions_;
    std::list<Stranger> strangers_;  // oldest first
    std::uint64_t strangers_dropped_ = 0;
    double accept_again_s_ = kForever;
    std::shared_ptr<Guard> guard_;
    std::uint32_t next_number_ = 1;  // of invited peers; none is used twice
};

using PeerUnusable = Unusable<Engine>;
using NameTaken = Taken<Engine>;

}  // namespace pdlink::tcp
