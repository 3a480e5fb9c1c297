// `Copier`: copies batches of runs into the memory of peers on this host, and fences peers from our memory
// (common/engine.h); optionally with a second thread that only copies.
//
// Order. A batch is copied in ranges of a quarter megabyte. Around every range stands the gate of the destination
// (common/gate.h): enter, copy, fence, leave. Between ranges the thread looks at deadlines, at closed gates, at
// the descriptors of the peers' lives and at the other peers, which take turns. So after any failure at most one more
// range is copied, and another peer waits for at most one range. The caller itself copies a small batch that nothing
// precedes, under the mutex: waking the thread would take longer.
//
// The second thread takes ranges like the first: under the same mutex, through the same gate, of the next peer in
// turn. Large batches wake it; it sleeps while `computing` reserves a core for a prefill. The first thread alone
// handles deadlines, failures and ends: it marks the peer, so that no more ranges are taken, and waits for the range
// in progress before it reports, unmaps or forgets anything. The thread that lands the last range reports the batch,
// in the order of submission.
//
// The memory of a failed peer is unmapped at once, which frees a dead process's pool; a closed peer is quiet when its
// own gate is: it is in no range of a copy into our memory any more, or has ended.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/engine.h"
#include "common/gate.h"
#include "copy/batch.h"
#include "copy/peer_memory.h"

namespace pdlink::copy {

struct Peer : PeerBase<Batch> {
    using PeerBase::PeerBase;
    std::unique_ptr<GateOwner> gate;     // invited
    std::shared_ptr<PeerMemory> memory;  // connected and not failed; shared with the ranges in progress
    std::uint64_t waiting_nbytes = 0;    // of the batches, in no range yet
    std::size_t num_copying = 0;         // ranges in progress
    bool prepared = false;
    bool refused = false;  // the gate was shut
    bool in_turn = false;  // is in turns_

    bool invited() const { return gate != nullptr; }
    bool dialed() const { return memory != nullptr; }
    bool connected() const { return memory != nullptr; }
    bool has_ranges() const { return !batches.empty() && !batches.back().all_taken(); }
    // The batch that the next range is of.
    auto next_range() {
        return std::ranges::find_if(batches, [](const Batch& one) { return !one.all_taken(); });
    }
};

class Copier final : public Engine<Copier, Peer, Batch> {
  public:
    // Starts the thread, or both. Throws std::system_error, std::invalid_argument for another number of them.
    explicit Copier(int num_threads);
    ~Copier();  // close(), without waiting for writers

    // Make a gate for a peer that will write into our memory. The file is open until the peer is closed.
    // Throws NameTaken.
    GateName invite(const std::string& peer);

    // Map a peer's memory. Throws as PeerMemory, and NameTaken.
    void connect(const std::string& peer, std::int64_t pid, const std::vector<PeerFile>& files, const GateName& gate);

    // The memory of a peer, for one who stores there by other means, each time between its gate's `enter` and
    // `leave`. It stays mapped while it is held. Throws PeerUnusable.
    std::shared_ptr<PeerMemory> memory_of(const std::string& peer);

    // While on, the second thread takes no range. Costs one store; from any thread.
    void computing(bool on) { computing_ = on; }
    // Ranges that the first and the second thread have taken.
    std::array<std::uint64_t, 2> ranges_taken();

  private:
    friend Base;
    enum Who { kFirst, kSecond };

    // The second thread, and what it and the first one wait for.
    struct Second {
        std::thread thread;
        bool sleeps = false;
        bool ends = false;
        std::condition_variable much_to_copy;
        std::condition_variable range_ended;
    };

    static constexpr double kBusyWait_s = 0.001;
    std::shared_ptr<PeerMemory> reach(const Peer& peer) const { return peer.memory; }
    bool at_once(Peer& peer, Batch& batch);
    bool round(Lock& lock);
    void heard(void* what, std::uint32_t events, Lock& lock);
    void stop(Peer& peer, Lock& lock);
    void keep_out(Peer& peer);
    bool quiet(Peer& peer, Lock& lock);
    void cleanup(Lock& lock);

    void run_second();
    void serve(Peer& peer, Lock& lock);
    static bool may_copy(Peer& peer, double now);
    Peer* next_to_copy();
    void copy_range(Peer& peer, Who who, Lock& lock);
    // Copy a range through the gate of its destination. False if that was shut.
    static bool copied(PeerMemory& memory, const Batch& batch, const RunRange& range);
    void report_landed(Peer& peer);
    void take_turn(Peer& peer);

    std::atomic<bool> computing_ = false;
    std::deque<Peer*> turns_;  // peers with something to do, in order
    std::array<std::uint64_t, 2> ranges_taken_{};
    // Leaked in a forked child, where condition variables wait for ever.
    std::unique_ptr<Second> second_;
};

using PeerUnusable = Unusable<Copier>;
using NameTaken = Taken<Copier>;

}  // namespace pdlink::copy
