// `Copier`: one native thread that copies batches of runs into memory that peers on this host have opened to us, and
// that shuts peers out of the memory we have opened to them.
//
// Threads. Callers of any thread put work into tables under one mutex and wake the copier through an eventfd; they
// never wait for it, except `close`. The copier takes the mutex only to choose work and to record what became of it,
// never while it copies, maps or unmaps. It never calls into Python, so it needs no GIL and may be joined under it.
//
// Order. A batch is copied in slices of a quarter megabyte. Around every slice stands the gate of the destination
// (csrc/gate.h): enter, copy, fence, leave. Between slices the copier looks at deadlines, at closed gates, at the
// descriptors of the peers' lives and at the other peers, which take turns. So one slice is all that can happen
// after anything has gone wrong, and one slice is what another peer waits for.
//
// Peers. A peer is invited (it may write here: we own a gate), connected (we write there) or both. It fails as a
// whole; the memory of a failed peer is unmapped at once, so that a dead process's pool is given back, and what
// remains is a tombstone until `close_peer`. A peer leaves the table only on the copier's thread, after its gate is
// quiet; that is also the only place that says PeerClosed.
//
// Fork. A child has no copier thread. There, every call is refused and the destructor joins nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "copy/batch.h"
#include "copy/descriptor.h"
#include "copy/outbox.h"
#include "copy/peer_memory.h"
#include "gate.h"
#include "native.h"
#include "runs.h"

namespace pdlink {

// A peer that cannot be used: unknown, failed or closed.
struct PeerUnusable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A name that stands for a connection already. The caller's mistake.
struct NameTaken : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

class Copier {
  public:
    Copier();   // starts the thread; throws std::system_error
    ~Copier();  // close(), without waiting for writers
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // A block of our own memory, as source; returns its index. It must stay until close().
    std::size_t add_region(std::byte* base, std::size_t nbytes);

    // Make a gate for a peer that will write into our memory. The file is open until the peer is closed.
    // Throws NameTaken.
    PeerFile invite(const std::string& peer);

    // Map what a peer has opened to us. Throws what PeerMemory throws, NameTaken.
    void connect(const std::string& peer, std::int64_t pid, const std::vector<PeerFile>& files, const PeerFile& gate);

    // Queue one batch and return its ticket. Throws std::invalid_argument for a run outside its region.
    std::uint64_t submit(const std::string& peer, const std::vector<Piece>& pieces, double timeout_s);

    bool connected(const std::string& peer);
    void close_peer(const std::string& peer);

    // What happened since the last call; also after close().
    std::vector<Report> poll();
    int fd() const { return outbox_.fd(); }

    // Close every peer, wait up to `grace_s` for writers that are in the middle of a slice, and end the thread.
    void close(double grace_s);

  private:
    struct Peer {
        explicit Peer(std::string peer_name) : name(std::move(peer_name)) {}
        std::string name;
        std::unique_ptr<GateOwner> gate;     // invited
        std::shared_ptr<PeerMemory> memory;  // connected and not failed; shared with the slice in progress
        std::deque<Batch> queue;
        double earliest_deadline_s = std::numeric_limits<double>::infinity();
        std::string failure;  // not empty: failed
        bool prepared = false;
        bool in_turn = false;  // is in turns_
        bool closing = false;
    };

    void run();
    void wait(std::unique_lock<std::mutex>& lock, int timeout_ms);
    void serve(Peer& peer, std::unique_lock<std::mutex>& lock);
    void fail(Peer& peer, const std::string& reason, Outcome outcome, std::unique_lock<std::mutex>& lock);
    void finish_batches(Peer& peer, Outcome outcome, const std::string& detail);
    void drop_memory(Peer& peer, std::unique_lock<std::mutex>& lock);
    void advance_closing(std::unique_lock<std::mutex>& lock);
    void begin_closing(Peer& peer);
    void take_turn(Peer& peer);
    Peer& peer_for(const std::string& name);
    Peer* find(const std::string& name);
    void kick();
    bool forked() const { return ::getpid() != owner_pid_; }
    void refuse_fork() const;

    const pid_t owner_pid_ = ::getpid();
    Outbox outbox_;
    Descriptor epoll_;
    Descriptor wake_;

    std::mutex mutex_;  // guards everything below; may be held while taking the outbox's
    std::vector<Extent> regions_;
    std::unordered_map<std::string, std::unique_ptr<Peer>> peers_;
    std::deque<Peer*> turns_;     // peers with something to do, in order
    std::vector<Peer*> closing_;  // peers whose gate may not be quiet yet
    double next_quiet_look_s_ = 0;
    double quiet_look_period_s_ = 0;
    double give_up_s_ = std::numeric_limits<double>::infinity();  // finite once closing down
    std::uint64_t next_ticket_ = 1;

    std::mutex join_mutex_;
    std::thread* thread_ = nullptr;  // leaked in a forked child, where it cannot be joined
};

}  // namespace pdlink
