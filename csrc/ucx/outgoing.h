// The writing side of one peer: its endpoint, the batches that wait or are under way, and how it ends.
//
//   CONNECTING ─flushed→ READY ─failed or closed→ DRAINING ─all posted puts landed→ ENDING ─endpoint closed→ ENDED
//   any ─connection error, process dead, nothing posted yet→ ENDING
//
// Nothing is posted before READY, nor after it: an endpoint that has reported an error must not be used (UCX has
// crashed there, openucx #11629), and what was never posted can never land.
//
// Why DRAINING: closing an endpoint by force completes its puts as cancelled, but bytes that have reached a socket
// buffer still arrive. So after a missed deadline or a close the endpoint stays until what was posted is known to
// have landed, or the connection is known to be broken; at most one window of puts is outstanding. A peer that takes
// no bytes at all (stopped, or behind a cut link) is given up after kDrainLimit: nobody can call back what is in its
// socket buffers but itself, which destroys its worker when it closes us (Incoming).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/gate.h"
#include "common/outbox.h"
#include "common/runs.h"
#include "ucx/context.h"

namespace pdlink::ucx {

using Clock = std::chrono::steady_clock;

class Outgoing;

// What an invitation says. Everything in it came from another process.
struct Remote {
    struct Region {
        std::uint64_t base;
        std::uint64_t nbytes;
        std::string rkey;
    };
    std::string address;
    std::vector<Region> regions;
    std::int64_t pid = 0;    // process to watch, 0 if it is not visible from here
    std::uint64_t born = 0;  // its start time: the pid may have been given to another process
    std::optional<GateName> gate;
};

struct Batch {
    std::uint64_t ticket;
    std::uint64_t nbytes;
    double submitted_s;
    Clock::time_point deadline;
    std::vector<Put> puts;

    // The rest belongs to the progress thread.
    Outgoing* owner = nullptr;
    std::size_t next = 0;            // first put that is not posted
    std::size_t puts_under_way = 0;  // posted and not completed
    enum class Flush { NONE, POSTED, DONE } flush = Flush::NONE;
    bool inside_gate = false;
    bool reported = false;
};

// What any thread may know of a connection.
class Face {
  public:
    void fail(const std::string& reason) {
        const std::lock_guard lock(mutex_);
        if (failure_.empty()) failure_ = reason;
    }
    void set_lane(const std::string& lane) {
        const std::lock_guard lock(mutex_);
        lane_ = lane;
    }
    std::string failure() const {
        const std::lock_guard lock(mutex_);
        return failure_;
    }
    std::string lane() const {
        const std::lock_guard lock(mutex_);
        return lane_;
    }

  private:
    mutable std::mutex mutex_;
    std::string failure_;  // "" while it works
    std::string lane_;     // "" until connected
};

class Outgoing {
  public:
    Outgoing(Context& context, ucp_worker_h worker, std::string peer, Outbox& outbox, std::shared_ptr<Face> face);
    // Only when ended() and not referenced().
    ~Outgoing();
    Outgoing(const Outgoing&) = delete;
    Outgoing& operator=(const Outgoing&) = delete;

    // Begins to connect. Throws std::runtime_error if that cannot work from here; close(true) it then.
    void open(const Remote& remote);
    void submit(std::unique_ptr<Batch> batch);
    // Does what is possible now; true if UCX was given something, so that it must be progressed before sleeping.
    bool step();
    // Fails the peer if a deadline of a batch or of connecting has passed; gives up draining.
    void expire(Clock::time_point now);
    // No later than this expire() should be called again.
    Clock::time_point deadline() const { return next_check_; }
    // The connection is gone: nothing more can land.
    void lose(const std::string& reason);
    // Ends it. Open batches are reported; by force also what was posted is given up.
    void close(bool by_force);

    // Nothing of ours can be written any more.
    bool ended() const { return link_ == Link::ENDED; }
    // UCX may still call back into this object: a flush may stay behind when its endpoint is closed.
    bool referenced() const { return connecting_ || !batches_.empty(); }
    int pidfd() const { return pidfd_; }  // -1 if the peer's process cannot be watched

  private:
    enum class Link { CONNECTING, READY, DRAINING, ENDING, ENDED };

    // A put that UCX has.
    struct Op {
        Batch* batch;
        std::uint64_t nbytes;
    };
    // Enough to keep any link busy (more changes nothing, measured 4 to 2048 over TCP), few enough that draining is
    // short: 16 MiB are 13 ms at 10 Gbit/s.
    static constexpr std::size_t kWindowOps = 256;
    static constexpr std::uint64_t kWindowNbytes = 16 << 20;
    // Puts by cross-memory attach are copies inside the call, 10 us for 32 KiB: not too much before others get a
    // turn.
    static constexpr int kOpsPerStep = 64;
    static constexpr std::uint64_t kNbytesPerStep = kMaxPutNbytes;
    static constexpr std::chrono::seconds kDrainLimit{2};
    // A host that does not answer. Batches have their own deadlines; this is for a connection nobody uses yet.
    static constexpr std::chrono::seconds kConnectLimit{10};

    void watch(const Remote& remote);
    void open_gate(const Remote& remote);
    void connect(const Remote& remote);
    void connected();
    bool pump();
    bool enter_gate(Batch& batch);
    void post_put(Batch& batch);
    void post_flush(Batch& batch);
    void completed(Op* op, ucs_status_t status);
    void reap();
    Clock::time_point first_deadline() const;
    void report(Batch& batch, Outcome outcome, const std::string& detail);
    void report_open(Outcome outcome, const std::string& detail);
    void fail(const std::string& reason, const Batch* expired);
    void drain();
    void end();

    static void on_error(void* self, ucp_ep_h, ucs_status_t status);
    static void on_connected(void* request, ucs_status_t status, void* self);
    static void on_put(void* request, ucs_status_t status, void* op);
    static void on_flush(void* request, ucs_status_t status, void* batch);
    static void on_closed(void* request, ucs_status_t status, void* self);

    Context& context_;
    const Library& ucx_;
    const ucp_worker_h worker_;
    const std::string peer_;
    Outbox& outbox_;
    const std::shared_ptr<Face> face_;

    std::unique_ptr<GateWriter> gate_;
    int pidfd_ = -1;
    ucp_ep_h ep_ = nullptr;
    std::vector<ucp_rkey_h> rkeys_;                               // of the regions
    Clock::time_point link_deadline_ = Clock::time_point::max();  // of CONNECTING and DRAINING
    Clock::time_point next_check_ = Clock::time_point::max();

    Link link_ = Link::CONNECTING;
    bool connecting_ = false;  // the first flush is under way
    bool connected_ = false;   // it came back
    bool closed_ = false;      // the endpoint's close came back
    bool failed_ = false;      // PeerFailed was reported
    bool closing_ = false;     // close() was called
    std::string broken_;       // why the connection is known to be gone

    std::deque<std::unique_ptr<Batch>>
        batches_;              // in order of submission; front ones leave when nothing refers to them
    std::size_t posting_ = 0;  // index of the first batch that is not wholly posted
    std::array<Op, kWindowOps> ops_;
    std::vector<Op*> free_ops_;
    std::size_t ops_under_way_ = 0;
    std::uint64_t nbytes_under_way_ = 0;
};

}  // namespace pdlink::ucx
