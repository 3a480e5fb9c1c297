#include "cuda/copier.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>
#include <system_error>
#include <utility>

namespace pdlink::cuda {
namespace {

// When launches in flight are looked at although nothing rings: after a fault no host function runs.
constexpr double kLook_s = 0.25;

}  // namespace

void GpuBatch::fill(std::span<const RunList> lists, std::span<const Extent> local,
                    const std::vector<Extent>& remote) {
    runs = RunQueue(join_runs(lists, local, remote));
    nbytes = runs.nbytes();
}

GpuCopier::GpuCopier(const KernelLauncher& launcher, std::vector<Slot> slots, std::uint64_t launch_nbytes)
    : launcher_(launcher), slots_(std::move(slots)), launch_nbytes_(launch_nbytes) {
    for (const Slot& slot : slots_) free_.push_back(&slot);
    if (!watch(ring_.fd(), &ring_, EPOLLIN))
        throw std::system_error(errno, std::generic_category(), "epoll of the GPU's bell");
    start("pdlink-gpu-copy");
}

// ---- any thread -------------------------------------------------------------------------------------------------

GateName GpuCopier::invite(const std::string& name) {
    refuse_fork();
    auto gate = std::make_unique<GateOwner>();
    const GateName gate_name = gate->name();
    const std::lock_guard lock(mutex_);
    refuse_broken();
    to_open(name, &GpuPeer::invited).gate = std::move(gate);
    return gate_name;
}

void GpuCopier::connect(const std::string& name, std::int64_t pid, std::vector<Extent> regions,
                        const GateName& gate) {
    refuse_fork();
    // Before the gate: if its pid is another process's by then, this one shows that the invited one has ended.
    Descriptor life(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
    if (life.get() < 0) throw std::system_error(errno, std::generic_category(), "pidfd_open");
    std::unique_ptr<GpuPeerMemory> memory(
        new GpuPeerMemory{pid, std::move(life), open_gate(pid, gate), std::move(regions)});
    memory->gate->take();
    const std::lock_guard lock(mutex_);
    refuse_broken();
    GpuPeer& peer = to_open(name, &GpuPeer::dialed);
    if (!watch(memory->life.get(), &peer, EPOLLIN))
        throw std::system_error(errno, std::generic_category(), "epoll of a peer's life");
    peer.memory = std::move(memory);
}

bool GpuCopier::idle() {
    if (forked()) return false;
    const std::lock_guard lock(mutex_);
    return in_flight_.empty() && std::ranges::none_of(peers_, [](const auto& one) { return one.second->unfinished; });
}

// Launch a batch here and now if there is a free slot.
bool GpuCopier::at_once(GpuPeer& peer, GpuBatch&) {
    const bool looks = !in_flight_.empty();  // the thread, within kLook_s
    take_turn(peer);
    if (free_.empty()) collect();
    launch();
    return looks && !due_;
}

void GpuCopier::refuse_broken() const {
    if (!broken_.empty()) throw Unusable<GpuCopier>("the GPU has failed: " + broken_);
}

void GpuCopier::keep_out(GpuPeer& peer) {
    if (peer.gate) peer.gate->shut();
}

// ---- the thread -------------------------------------------------------------------------------------------------

bool GpuCopier::round(Lock& lock) {
    due_ = false;
    collect();
    if (!broken_.empty()) {
        fail_all(lock);
        return false;
    }
    for (const auto& [name, peer] : peers_)
        if (peer->refused && peer->usable()) fail(*peer, "peer closed", Outcome::kCancelled, lock);
    launch();
    return due_;
}

void GpuCopier::look(double now) {
    if (!in_flight_.empty()) look_by(now + kLook_s);
}

void GpuCopier::heard(void* what, std::uint32_t, Lock& lock) {
    if (what == &ring_) {
        ring_.hush();
        bell_set_ = false;
        return;
    }
    GpuPeer& peer = *static_cast<GpuPeer*>(what);
    if (!peer.memory) return;
    unwatch(peer.memory->life.get());
    if (peer.usable())
        fail(peer, "process " + std::to_string(peer.memory->pid) + " has ended", Outcome::kPeerFailed, lock);
}

bool GpuCopier::quiet(GpuPeer& peer, Lock&) {
    if (peer.memory) unwatch(peer.memory->life.get());
    if (peer.in_flight) return false;
    peer.memory.reset();
    if (peer.unfinished || (peer.gate && !peer.gate->quiet())) return false;
    std::erase(turns_, &peer);
    return true;
}

// Of a peer that is being closed, what is in flight still lands, and is reported then.
void GpuCopier::report_open(GpuPeer& peer, Outcome outcome, const std::string& detail) {
    const bool stays = peer.closing && outcome == Outcome::kCancelled;
    for (auto at = peer.batches.begin(); at != peer.batches.end();) {
        if (stays && at->launched) {
            ++at;
            continue;
        }
        outbox_.put(ended(peer.name, *at, outcome, detail));
        at = peer.batches.erase(at);
    }
}

void GpuCopier::fail_all(Lock& lock) {
    const std::string reason = "the GPU has failed: " + broken_;
    for (const InFlight& one : in_flight_) one.peer->unfinished = true;
    in_flight_.clear();
    for (const auto& [name, peer] : peers_) {
        peer->in_flight = 0;
        if (peer->usable())
            fail(*peer, reason, Outcome::kPeerFailed, lock);
        else
            report_open(*peer, Outcome::kPeerFailed, reason);
    }
}

// ---- both, with the mutex held ----------------------------------------------------------------------------------

bool GpuCopier::holds(const Failure& failure) {
    if (failure.number == 0) return true;
    broken_ = launcher_.words(failure);
    due_ = true;
    return false;
}

void GpuCopier::take_turn(GpuPeer& peer) {
    if (!std::exchange(peer.in_turn, true)) turns_.push_back(&peer);
}

void GpuCopier::launch() {
    while (broken_.empty() && !turns_.empty() && !free_.empty()) {
        GpuPeer& peer = *turns_.front();
        turns_.pop_front();
        peer.in_turn = false;
        if (!peer.memory || !peer.usable() || peer.refused) continue;
        const auto next = [&] { return std::ranges::find(peer.batches, false, &GpuBatch::launched); };
        if (const auto at = next(); at != peer.batches.end()) begin(peer, *at);
        if (next() != peer.batches.end()) take_turn(peer);
    }
    set_bell();
}

void GpuCopier::begin(GpuPeer& peer, GpuBatch& batch) {
    if (batch.runs.empty()) {
        batch.launched = true;
        due_ |= in_flight_.empty();
        in_flight_.push_back({&peer, batch.ticket, nullptr, true});
        ++peer.in_flight;
        return;
    }
    GateWriter& gate = *peer.memory->gate;
    if (!gate.enter()) {
        peer.refused = due_ = true;
        return;
    }
    const Slot* slot = free_.back();
    const Failure failure = launcher_.launch_runs(batch.runs, launch_nbytes_, slot->list, slot->event);
    if (failure.number == 0 || std::string_view(failure.call) == "cuEventRecord") {  // it is on its way
        free_.pop_back();
        batch.launched = batch.runs.empty();
        in_flight_.push_back({&peer, batch.ticket, slot, batch.launched});
        ++peer.in_flight;
    } else {
        gate.leave();
    }
    holds(failure);
}

// Report what has run.
void GpuCopier::collect() {
    while (broken_.empty() && !in_flight_.empty()) {
        const InFlight one = in_flight_.front();
        if (one.slot) {
            bool reached = false;
            if (!holds(launcher_.query(one.slot->event, reached)) || !reached) return;
            free_.push_back(one.slot);
            one.peer->memory->gate->leave();
        }
        in_flight_.pop_front();
        if (--one.peer->in_flight == 0 && one.peer->closing) look_at_ends();
        auto& batches = one.peer->batches;
        const auto batch = std::ranges::find(batches, one.ticket, &GpuBatch::ticket);
        if (one.last && batch != batches.end()) {
            outbox_.put(done(one.peer->name, *batch));
            batches.erase(batch);
        }
    }
}

// Have the oldest launch in flight ring when it has run. The bell rings once: what is launched meanwhile is looked at
// then, too.
void GpuCopier::set_bell() {
    if (!broken_.empty() || in_flight_.empty()) return;
    look_by(now_s() + kLook_s);
    const auto oldest = std::ranges::find_if(in_flight_, [](const InFlight& one) { return one.slot != nullptr; });
    if (bell_set_ || oldest == in_flight_.end()) return;
    bell_set_ = holds(launcher_.ring_after(oldest->slot->event, ring_.fd()));
}

}  // namespace pdlink::cuda
