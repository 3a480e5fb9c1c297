// `GpuCopier`: puts batches of runs into the device memory of peers on this host by kernels, and fences peers from
// our memory (common/engine.h).
//
// A batch is one launch, or several if it is larger than any layer. The caller launches it itself while a slot is
// free: that takes as long as waking the thread. What is left is launched when a slot has become free; peers take
// turns, a launch each. Launches are in one stream, so they end in the order in which they began, and a host function
// behind the oldest wakes the thread.
//
// A launch is in flight until the event behind it is reached, and cannot be called off. The gate of its destination
// (common/gate.h) is entered before it and left after it: the owner's PeerClosed follows the last store of the last
// kernel. A deadline is reported in time all the same; ours waits for the kernel.
//
// After a failure of the driver the context is dead, and with it every peer. Nobody knows whether the stores of what
// was in flight have ended: their gates stay entered until this process ends, and nothing that they use may be freed.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/engine.h"
#include "common/gate.h"
#include "cuda/launcher.h"

namespace pdlink::cuda {

// What a launch needs until it has run. Both are its maker's.
struct Slot {
    SlotMemory list;
    std::uintptr_t event;
};

struct GpuBatch : BatchBase {
    RunQueue runs;          // not launched yet
    bool launched = false;  // all of it

    void fill(std::span<const RunList> lists, std::span<const Extent> local, const std::vector<Extent>& remote);
};

// What a peer has opened to us. It is mapped, and unmapped, by others.
struct GpuPeerMemory {
    std::int64_t pid;
    Descriptor life;
    std::unique_ptr<GateWriter> gate;
    std::vector<Extent> regions;  // as this process addresses them
};

struct GpuPeer : PeerBase<GpuBatch> {
    using PeerBase::PeerBase;
    std::unique_ptr<GateOwner> gate;        // invited
    std::unique_ptr<GpuPeerMemory> memory;  // connected; stays while launches are in flight
    std::size_t in_flight = 0;              // launches
    bool in_turn = false;                   // is in turns_
    bool refused = false;                   // the gate was shut
    bool unfinished = false;                // a kernel may still store there, and its end will not be known

    bool invited() const { return gate != nullptr; }
    bool dialed() const { return memory != nullptr; }
    bool connected() const { return memory != nullptr && failure.empty(); }
};

class GpuCopier final : public Engine<GpuCopier, GpuPeer, GpuBatch> {
  public:
    // Starts the thread. launcher, slots: stay until `close`, and if that says so until the process ends.
    // launch_nbytes: about the most bytes of one launch. Throws std::system_error.
    GpuCopier(const KernelLauncher& launcher, std::vector<Slot> slots, std::uint64_t launch_nbytes);
    ~GpuCopier() { close(0); }

    // Make a gate for a peer that will write into our memory. Throws Taken, Unusable.
    GateName invite(const std::string& peer);

    // regions: of the peer's memory, mapped here until its PeerClosed. Throws as open_gate and GateWriter::take,
    // Taken, Unusable.
    void connect(const std::string& peer, std::int64_t pid, std::vector<Extent> regions, const GateName& gate);

    // After `close`: whether the GPU uses neither slots nor peers' memory any more.
    bool idle();

  private:
    friend Base;

    struct InFlight {
        GpuPeer* peer;
        std::uint64_t ticket;
        const Slot* slot;  // null for a batch of no bytes, which ends when its turn has come
        bool last;         // of its batch
    };

    const std::vector<Extent>& reach(const GpuPeer& peer) const { return peer.memory->regions; }
    bool at_once(GpuPeer& peer, GpuBatch& batch);
    bool round(Lock& lock);
    bool may_wait(Lock&) { return !due_; }
    void look(double now);
    void heard(void* what, std::uint32_t events, Lock& lock);
    void keep_out(GpuPeer& peer);
    bool quiet(GpuPeer& peer, Lock& lock);
    void report_open(GpuPeer& peer, Outcome outcome, const std::string& detail);
    void cleanup(Lock&) {}

    void refuse_broken() const;
    void take_turn(GpuPeer& peer);
    void launch();
    void begin(GpuPeer& peer, GpuBatch& batch);
    void collect();
    void set_bell();
    void fail_all(Lock& lock);
    // Whether the driver has done it; if not, everything ends.
    bool holds(const Failure& failure);

    const KernelLauncher& launcher_;
    const std::vector<Slot> slots_;
    const std::uint64_t launch_nbytes_;
    std::vector<const Slot*> free_;
    std::deque<GpuPeer*> turns_;  // peers with something to launch, in order
    std::deque<InFlight> in_flight_;
    Bell ring_;              // by the GPU
    bool bell_set_ = false;  // the oldest launch will ring
    bool due_ = false;       // the thread has something to do now
    std::string broken_;     // what the driver has said
};

}  // namespace pdlink::cuda
