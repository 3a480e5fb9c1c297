// `Engine`: the one thread that progresses UCX (common/engine.h).
//
//   worker for writing ── one endpoint per connected peer (Outgoing)
//   worker per invited peer (Incoming)
//
// A caller makes the worker of a peer that it invites, and leaves it to the thread, which alone touches workers and
// endpoints from then on; the context is shared. Connecting is a state of an Outgoing, so nobody waits for UCX.
//
// A round progresses the workers that have something to do and lets every Outgoing post, reap and end. When a round
// finds nothing, all workers are armed and the thread sleeps on their descriptors, on the bell and on the pidfds of
// connected processes. The order matters: progress until there is nothing, look at our own tables, arm (BUSY means:
// another round), then sleep. Arming after a single progress call stalls TCP for good (measured, 1.21).
//
// Fork. Destroying a worker in a child breaks the parent's connections (measured, tcp), so a child leaks everything.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/engine.h"
#include "ucx/context.h"
#include "ucx/incoming.h"
#include "ucx/outgoing.h"

namespace pdlink::ucx {

struct Registered {
    std::size_t index;
    std::string rkey;
};

// Our part of an invitation.
struct Opening {
    std::string address;
    GateName gate;
};

struct Peer;

// What is watched beside the bell: the worker of an invited peer, or the process of a connected one.
struct Watched {
    Peer* peer;
    bool process;
};

struct Peer : PeerBase<Batch> {  // its batches: what the thread has not taken yet
    using PeerBase::PeerBase;
    std::unique_ptr<Incoming> incoming;
    std::unique_ptr<Outgoing> outgoing;
    std::vector<Extent> remote;
    std::string lane;  // "" until connected
    Watched worker{this, false};
    Watched process{this, true};
    bool awake = false;  // the worker of `incoming` is not armed

    bool invited() const { return incoming != nullptr; }
    bool dialed() const { return outgoing != nullptr; }
    bool connected() const { return !lane.empty(); }
};

class Engine final : public pdlink::Engine<Engine, Peer, Batch> {
  public:
    // Throws std::runtime_error if no context or worker can be made with these transports.
    Engine(Library library, const Choice& choice);
    ~Engine();

    // cuda_context: of device memory; 0 for host memory.
    Registered register_memory(std::uintptr_t base, std::uint64_t nbytes, std::uintptr_t cuda_context);
    // Throws NameTaken, std::runtime_error.
    Opening invite(const std::string& peer);
    // Throws NameTaken, and PeerUnusable if the invitation cannot be taken up from here.
    void connect(const std::string& peer, Remote remote);
    std::string lane(const std::string& peer);

  private:
    friend Base;
    std::vector<Extent> reach(const Peer& peer) const { return peer.remote; }
    bool at_once(Peer&, Batch&) { return false; }
    bool round(Lock& lock);
    void heard(void* what, std::uint32_t events, Lock& lock);
    void keep_out(Peer& peer);
    bool quiet(Peer& peer, Lock& lock);
    void give_up(Peer& peer, Lock& lock);
    bool may_wait(Lock& lock);
    double earliest(const Peer& peer) const;
    void report_open(Peer& peer, Outcome outcome, const std::string& detail);
    void cleanup(Lock& lock);

    std::shared_ptr<Context> open_context();
    bool progress(ucp_worker_h worker);
    void record(Peer& peer, Lock& lock);
    void find_awake();
    bool arm(ucp_worker_h worker) { return context_->ucx().ucp_worker_arm(worker) == UCS_OK; }

    // Shared with the Incomings that callers are making.
    std::shared_ptr<Context> context_;
    ucp_worker_h writing_ = nullptr;
    std::vector<ucp_mem_h> memory_;    // of the regions
    std::uintptr_t cuda_context_ = 0;  // for the thread to make current
    Watched writing_watch_{nullptr, false};

    // The thread's own.
    std::vector<ucp_mem_h> known_memory_;
    std::uintptr_t current_cuda_context_ = 0;
    std::vector<Peer*> awake_;                        // invited peers whose workers are not armed
    std::vector<Peer*> turn_;                         // connected peers of this round
    std::vector<std::unique_ptr<Outgoing>> leaving_;  // of peers that are gone; UCX may still refer to them
    bool worked_ = false;                             // something was done since the last sleep
    bool left_ = false;                               // an endpoint was told to end since the last round
    int fruitless_wakeups_ = 0;                       // in a row
    double look_at_all_s_ = 0;                        // when to progress all workers, whatever they say
};

using PeerUnusable = Unusable<Engine>;
using NameTaken = Taken<Engine>;

}  // namespace pdlink::ucx
