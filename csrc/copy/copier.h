// `Copier`: a native thread that copies batches of runs into the memory of peers on this host, and fences peers from
// our memory; optionally a second thread that only copies.
//
// Threads. Callers of any thread put work into tables under one mutex and wake the copier through an eventfd; they
// never wait for it, except in `close`. The copier takes the mutex to choose work and to record results, never while
// it copies, maps or unmaps. It never calls into Python, so it needs no GIL and may be joined under it. The caller
// itself copies a small batch that nothing precedes, under the mutex: waking the thread would take longer.
//
// Order. A batch is copied in slices of a quarter megabyte. Around every slice stands the gate of the destination
// (csrc/common/gate.h): enter, copy, fence, leave. Between slices the copier looks at deadlines, at closed gates, at
// the descriptors of the peers' lives and at the other peers, which take turns. So after any failure at most one more
// slice is copied, and another peer waits for at most one slice.
//
// The second thread takes slices like the first: under the same mutex, through the same gate, of the next peer in
// turn. Large batches wake it; it sleeps while `computing` reserves a core for a prefill. The first thread alone
// handles deadlines, failures and ends: it marks the peer, so that no more slices are taken, and waits for the slice
// in progress before it reports, unmaps or forgets anything. The thread that lands the last slice reports the batch,
// in the order of submission.
//
// Peers. A peer is invited (it writes here: we own a gate), connected (we write there) or both. It fails as a whole.
// The memory of a failed peer is unmapped at once, which frees a dead process's pool; a tombstone remains until
// `close_peer`. Only the copier's thread removes a peer and reports PeerClosed, after its gate is quiet.
//
// Fork. A child has no copier threads. There, every call throws, and the destructor joins nothing.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/bell.h"
#include "common/descriptor.h"
#include "common/gate.h"
#include "common/native.h"
#include "common/outbox.h"
#include "common/peers.h"
#include "common/runs.h"
#include "copy/batch.h"
#include "copy/peer_memory.h"

namespace pdlink {

using PeerUnusable = Unusable<class Copier>;
using NameTaken = Taken<class Copier>;

class Copier {
  public:
    // Starts the thread, or both. Throws std::system_error, std::invalid_argument for another number of them.
    explicit Copier(int num_threads);
    ~Copier();  // close(), without waiting for writers
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // A block of our own memory, as source; returns its index. It must stay until close().
    std::size_t add_region(std::byte* base, std::size_t nbytes);

    // Make a gate for a peer that will write into our memory. The file is open until the peer is closed.
    // Throws NameTaken.
    GateName invite(const std::string& peer);

    // Map a peer's memory. Throws as PeerMemory, and NameTaken.
    void connect(const std::string& peer, std::int64_t pid, const std::vector<PeerFile>& files, const GateName& gate);

    // Queue one batch and return its ticket. Throws std::invalid_argument for a run outside its region.
    std::uint64_t submit(const std::string& peer, const std::vector<Piece>& pieces, double timeout_s);

    // While on, the second thread takes no slice. Costs one store; from any thread.
    void computing(bool on) { computing_ = on; }
    // Slices that the first and the second thread have taken.
    std::array<std::uint64_t, 2> slices_taken();

    bool connected(const std::string& peer);
    void close_peer(const std::string& peer);

    // What happened since the last call; also after close().
    std::vector<Report> poll();
    int fd() const { return outbox_.fd(); }

    // Close every peer, wait up to `grace_s` for writers that are in the middle of a slice, and end the threads.
    void close(double grace_s);

  private:
    using Lock = std::unique_lock<std::mutex>;
    enum Who { kFirst, kSecond };
    struct Peer {
        explicit Peer(std::string peer_name) : name(std::move(peer_name)) {}
        std::string name;
        std::unique_ptr<GateOwner> gate;     // invited
        std::shared_ptr<PeerMemory> memory;  // connected and not failed; shared with the slices in progress
        std::deque<Batch> queue;             // slices are taken, and batches reported, in its order
        std::uint64_t waiting_nbytes = 0;    // of the queue, in no slice yet
        std::size_t num_copying = 0;         // slices in progress
        double earliest_deadline_s = std::numeric_limits<double>::infinity();
        std::string failure;  // not empty: failed
        bool prepared = false;
        bool refused = false;  // the gate was shut
        bool in_turn = false;  // is in turns_
        bool closing = false;

        bool connected() const { return memory != nullptr; }
    };

    // The second thread, and what it and the first one wait for.
    struct Second {
        std::thread thread;
        bool sleeps = false;
        std::condition_variable much_to_copy;
        std::condition_variable slice_ended;
    };

    void run();
    void run_second();
    void wait(Lock& lock, int timeout_ms);
    void serve(Peer& peer, Lock& lock);
    Peer* next_to_copy();
    void copy_slice(Peer& peer, Who who, Lock& lock);
    // Copy a slice through the gate of its destination. False if that was shut.
    static bool copied(PeerMemory& memory, const Batch& batch, const Slice& slice);
    bool landed_at_once(Peer& peer);
    void report_landed(Peer& peer);
    void fail(Peer& peer, const std::string& reason, Outcome outcome, Lock& lock);
    void settle(Peer& peer, Lock& lock);
    void end_batches(Peer& peer, Outcome outcome, const std::string& detail);
    void drop_memory(Peer& peer, Lock& lock);
    void advance_closing(Lock& lock);
    void begin_closing(Peer& peer);
    void take_turn(Peer& peer);
    bool forked() const { return ::getpid() != owner_pid_; }
    void refuse_fork() const;
    void refuse_closed() const;

    const pid_t owner_pid_ = ::getpid();
    Outbox outbox_;
    Descriptor epoll_;
    Bell wake_;
    std::atomic<bool> computing_ = false;

    std::mutex mutex_;  // guards everything below; may be held while taking the outbox's
    std::vector<Extent> regions_;
    Peers<Peer, Copier> peers_;
    std::deque<Peer*> turns_;     // peers with something to do, in order
    std::vector<Peer*> closing_;  // peers whose gate may not be quiet yet
    double next_quiet_look_s_ = 0;
    double quiet_look_period_s_ = 0;
    double give_up_s_ = std::numeric_limits<double>::infinity();  // finite once closing down
    std::uint64_t next_ticket_ = 1;
    std::array<std::uint64_t, 2> slices_taken_{};

    std::mutex join_mutex_;
    // Leaked in a forked child, where threads cannot be joined and condition variables wait for them for ever.
    std::thread* thread_ = nullptr;
    std::unique_ptr<Second> second_;
};

}  // namespace pdlink
