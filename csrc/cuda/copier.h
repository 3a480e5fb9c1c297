// `GpuCopier`: puts batches into the device memory of peers on this host by kernels, and fences peers from our memory
// (common/engine.h).
//
// A batch is one part, or several if it is larger than any layer (cuda/moves.h). Its thread launches it when a slot
// is free, which it keeps until all of its launches have run; peers take turns, a part each. The driver is called
// with the mutex free, so one that stands holds up no caller.
//
// Marks. The sources of a batch may be written by kernels that have not run yet: events that it is `after` stand for
// them. It is launched all the same, and its stream waits. So that it holds back nobody, a *line* (a stream) that has
// such a launch in flight takes no other than those after the same stream of the caller's, which could not go sooner.
// What waits for nothing goes in the first line, and has a part of the slots for itself. A batch for which no line is
// left is launched when one is, or when its marks are reached. Its time counts from then on. The events are its
// caller's, until it is reported.
//
// A host function behind the oldest launch of each line wakes the thread. A launch is in flight until the event
// behind it is reached, and cannot be called off. The gate of its destination (common/gate.h) is entered before it
// and left after it: the owner's PeerClosed follows the last store of the last kernel, and that the mark. A deadline
// is reported in time all the same; ours waits for the kernel.
//
// After a failure of the driver the context is dead, and with it every peer. Nobody knows whether the stores of what
// was in flight have ended: their gates stay entered until this process ends, and nothing that they use may be freed.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
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

// An event of the caller's, and the stream that it was recorded in.
struct Mark {
    std::uintptr_t event, stream;
};

// Of the driver: where launches go, and one beside it for host functions, since what follows those waits for the
// host.
struct LineStreams {
    std::uintptr_t work, bell;
};

struct Line;

struct GpuBatch : BatchBase {
    Moves moves;              // not launched yet
    std::vector<Mark> after;  // not reached, as far as is known
    double timeout_s = 0;     // from when all are
    Line* line = nullptr;     // that the first part of it went to
    bool launched = false;    // all of it
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

struct InFlight {
    GpuPeer* peer;
    std::uint64_t ticket;
    const Slot* slot;  // null for a batch of no bytes, which ends when its turn has come
    bool last;         // of its batch
};

struct Line {
    LineStreams streams;
    std::deque<InFlight> in_flight;        // they end in this order
    std::optional<std::uintptr_t> behind;  // the stream of the marks of what is in flight, if it is one
    Bell ring;                             // by the GPU
    bool bell_set = false;                 // the oldest launch will ring
};

class GpuCopier final : public Engine<GpuCopier, GpuPeer, GpuBatch> {
  public:
    // Starts the thread. launcher, slots, streams: stay until `close`, and if that says so until the process ends.
    // launch_nbytes: about the most bytes of one launch. Throws std::system_error.
    GpuCopier(const KernelLauncher& launcher, std::vector<Slot> slots, std::span<const LineStreams> streams,
              std::uint64_t launch_nbytes);
    ~GpuCopier() { close(0); }

    // Make a gate for a peer that will write into our memory. Throws Taken, Unusable.
    GateName invite(const std::string& peer);

    // regions: of the peer's memory, mapped here until its PeerClosed. Throws as open_gate and GateWriter::take,
    // Taken, Unusable.
    void connect(const std::string& peer, std::int64_t pid, std::vector<Extent> regions, const GateName& gate);

    // after: what its sources are written by; timeout_s counts from when all are reached. Throw as Engine::submit.
    std::uint64_t submit(const std::string& name, std::span<const RunList> lists, double timeout_s);
    std::uint64_t submit(const std::string& name, const PlanOfLayers& plan, double timeout_s,
                         std::vector<Mark> after);

    // After `close`: whether the GPU uses neither slots nor peers' memory any more.
    bool idle();

  private:
    friend Base;

    const std::vector<Extent>& reach(const GpuPeer& peer) const { return peer.memory->regions; }
    bool at_once(GpuPeer& peer, GpuBatch&);
    bool round(Lock& lock);
    bool may_wait(Lock&) { return !due_; }
    void look(double now, Lock& lock);
    void heard(void* what, std::uint32_t events, Lock& lock);
    void keep_out(GpuPeer& peer);
    bool quiet(GpuPeer& peer, Lock& lock);
    void report_open(GpuPeer& peer, Outcome outcome, const std::string& detail);
    void cleanup(Lock&) {}

    void refuse_broken() const;
    void take_turn(GpuPeer& peer);
    void launch(Lock& lock);
    bool launch_one(GpuPeer& peer, Lock& lock);
    Line* line_for(GpuBatch& batch, Lock& lock);
    bool is_written(GpuBatch& batch, Lock& lock);
    void begin(GpuPeer& peer, GpuBatch& batch, Line& line, Lock& lock);
    void collect(Line& line, Lock& lock);
    void set_bell(Line& line, Lock& lock);
    void fail_all(Lock& lock);
    // Whether the driver has done what `call` asks of it, with the mutex free; if not, everything ends.
    template <class Call>
    bool drive(Lock& lock, Call&& call);

    const KernelLauncher& launcher_;
    const std::vector<Slot> slots_;
    const PartLimits limits_;
    std::vector<const Slot*> free_;
    std::deque<Line> lines_;
    std::deque<GpuPeer*> turns_;  // peers with something to launch, in order
    bool woken_ = false;          // the thread will make a round
    bool due_ = false;            // it has something to do now
    std::string broken_;          // what the driver has said
};

}  // namespace pdlink::cuda
