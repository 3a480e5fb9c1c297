// The writing side of one peer: its endpoint, the batches that wait or are under way, and how it ends.
//
//   ASKED → CONNECTING ─flushed→ READY ─failed or closed→ DRAINING ─all posted puts landed→ ENDING ─closed→ ENDED
//   any ─connection error, process dead, nothing posted yet→ ENDING
//
// Nothing is posted before READY, nor after it: an endpoint that has reported an error must not be used (UCX has
// crashed there, openucx #11629), and what was never posted can never land.
//
// Why DRAINING: closing an endpoint by force completes its puts as cancelled, but bytes that have reached a socket
// buffer still arrive. So after a missed deadline or a close the endpoint stays until what was posted is known to
// have landed, or the connection is known to be broken; at most one window of puts is outstanding. A peer that takes
// no bytes at all (stopped, or behind a cut link) is given up after a while: nobody can call back what is in its
// socket buffers but itself, which destroys its worker when it closes us (Incoming).
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/descriptor.h"
#include "common/engine.h"
#include "common/gate.h"
#include "common/outbox.h"
#include "common/runs.h"
#include "ucx/context.h"

namespace pdlink::ucx {

// A host that does not answer. Batches have their own deadlines; this is for a connection nobody uses yet.
constexpr double kConnectLimit_s = 10;

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

struct Batch : BatchBase {
    std::vector<Run> runs;
    // Throws as join_runs.
    void fill(std::span<const RunList> lists, std::span<const Extent> local, std::span<const Extent> remote);

    // The rest belongs to the thread.
    Outgoing* owner = nullptr;
    std::size_t next = 0;            // first run that is not posted
    std::size_t puts_under_way = 0;  // posted and not completed
    bool flushing = false;
    bool inside_gate = false;
    bool reported = false;
};

// Made by any thread, used by one.
class Outgoing {
  public:
    // memory: of our regions. Throws if the invitation cannot be taken up from here: std::runtime_error if the
    // process has ended, and as open_gate.
    Outgoing(Context& context, ucp_worker_h worker, const std::vector<ucp_mem_h>& memory, std::string peer,
             Outbox& outbox, Remote remote);
    // Not while `referenced()`.
    ~Outgoing() = default;
    Outgoing(const Outgoing&) = delete;
    Outgoing& operator=(const Outgoing&) = delete;

    void take(std::list<Batch>& batches);
    // Does what is possible now; true if UCX was given something, so that it must be progressed before sleeping.
    bool step();
    // The connection is gone: nothing more can land.
    void lose(const std::string& reason);
    // Reports every batch that is not reported yet.
    void report_open(Outcome outcome, const std::string& detail);
    // Posts nothing more, and ends when what was posted has landed; by force also that is given up. Again and again
    // is harmless. True if that changed anything.
    bool leave(bool by_force);

    // Why the peer must be failed, "" if it need not be.
    const std::string& problem() const { return problem_; }
    // The transport that long puts take, "" until connected.
    const std::string& lane() const { return lane_; }
    double earliest() const;  // deadline
    bool drains() const { return link_ == Link::DRAINING; }
    // Nothing of ours can be written any more.
    bool ended() const { return link_ == Link::ENDED; }
    // UCX may still call back into this object: a flush may stay behind when its endpoint is closed.
    bool referenced() const { return connecting_ || !posted_.empty(); }
    int pidfd() const { return pidfd_.get(); }  // -1 if the peer's process cannot be watched

  private:
    enum class Link { ASKED, CONNECTING, READY, DRAINING, ENDING, ENDED };

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
    static constexpr std::uint64_t kNbytesPerStep = kMaxRunNbytes;

    void watch();
    void open();
    void connected();
    bool pump();
    bool enter_gate(Batch& batch);
    void post_put(Batch& batch);
    void post_flush(Batch& batch);
    void wholly_posted();
    void keep_begun();
    void completed(Op* op, ucs_status_t status);
    void reap();
    void end();

    static void on_error(void* self, ucp_ep_h, ucs_status_t status);
    static void on_connected(void* request, ucs_status_t status, void* self);
    static void on_put(void* request, ucs_status_t status, void* op);
    static void on_flush(void* request, ucs_status_t status, void* batch);
    static void on_closed(void* request, ucs_status_t status, void* self);

    Context& context_;
    const Library& ucx_;
    const ucp_worker_h worker_;
    const std::vector<ucp_mem_h>& memory_;
    const std::string peer_;
    Outbox& outbox_;
    const Remote remote_;

    std::unique_ptr<GateWriter> gate_;
    Descriptor pidfd_;
    ucp_ep_h ep_ = nullptr;
    std::vector<ucp_rkey_h> rkeys_;  // of the regions

    Link link_ = Link::ASKED;
    bool connecting_ = false;  // the first flush is under way
    bool connected_ = false;   // it came back
    bool closed_ = false;      // the endpoint's close came back
    bool broken_ = false;      // the connection is known to be gone
    std::string problem_;
    std::string lane_;

    std::list<Batch> waiting_;  // in order of submission; of the first one some puts may be posted
    std::list<Batch>
        posted_;  // all their puts are, and the flush behind them; front ones leave when nothing refers to them
    std::array<Op, kWindowOps> ops_;
    std::vector<Op*> free_ops_;
    std::size_t ops_under_way_ = 0;
    std::uint64_t nbytes_under_way_ = 0;
};

}  // namespace pdlink::ucx
