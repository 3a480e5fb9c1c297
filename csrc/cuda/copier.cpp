#include "cuda/copier.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace pdlink::cuda {
namespace {

// When launches in flight are looked at although nothing rings: after a fault no host function runs.
constexpr double kLook_s = 0.25;
// When a batch is looked at that waits for its marks without a line: no host function tells of them.
constexpr double kLateLook_s = 0.002;

// The stream that all its marks are of, if it is one.
std::optional<std::uintptr_t> one_stream(const GpuBatch& batch) {
    if (batch.after.size() != 1) return std::nullopt;
    return batch.after.front().stream;
}

}  // namespace

GpuCopier::GpuCopier(const KernelLauncher& launcher, std::vector<Slot> slots, std::span<const LineStreams> streams,
                     std::uint64_t launch_nbytes)
    : launcher_(launcher),
      slots_(std::move(slots)),
      limits_{launch_nbytes, slots_.empty() ? 0 : slots_.front().list.nbytes} {
    for (const Slot& slot : slots_) free_.push_back(&slot);
    for (const LineStreams& one : streams) {
        Line& line = lines_.emplace_back();
        line.streams = one;
        if (!watch(line.ring.fd(), &line, EPOLLIN))
            throw std::system_error(errno, std::generic_category(), "epoll of the GPU's bell");
    }
    if (lines_.empty()) throw std::invalid_argument("streams: got none, expected one or more");
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

std::uint64_t GpuCopier::submit(const std::string& name, std::span<const RunList> lists, double timeout_s) {
    return Base::submit(name, timeout_s, [&](GpuBatch& batch, const auto& local, const auto& reach) {
        batch.moves = Moves(lists, local, reach, limits_);
        batch.nbytes = batch.moves.nbytes();
    });
}

std::uint64_t GpuCopier::submit(const std::string& name, const PlanOfLayers& plan, double timeout_s,
                                std::vector<Mark> after) {
    return Base::submit(name, timeout_s, [&](GpuBatch& batch, const auto& local, const auto& reach) {
        batch.moves = Moves(plan, local, reach, limits_);
        batch.nbytes = batch.moves.nbytes();
        if (after.empty()) return;
        batch.after = std::move(after);
        batch.timeout_s = timeout_s;
        batch.deadline_s = kForever;
    });
}

bool GpuCopier::idle() {
    if (forked()) return false;
    const std::lock_guard lock(mutex_);
    return std::ranges::all_of(lines_, [](const Line& line) { return line.in_flight.empty(); }) &&
           std::ranges::none_of(peers_, [](const auto& one) { return one.second->unfinished; });
}

// No launch here: the caller may hold locks that others wait for.
bool GpuCopier::at_once(GpuPeer& peer, GpuBatch&) {
    take_turn(peer);
    return std::exchange(woken_, true);
}

void GpuCopier::refuse_broken() const {
    if (!broken_.empty()) throw Unusable<GpuCopier>("the GPU has failed: " + broken_);
}

void GpuCopier::keep_out(GpuPeer& peer) {
    if (peer.gate) peer.gate->shut();
}

// ---- the thread -------------------------------------------------------------------------------------------------

bool GpuCopier::round(Lock& lock) {
    due_ = woken_ = false;
    for (Line& line : lines_) collect(line, lock);
    if (broken_.empty()) {
        for (const auto& [name, peer] : peers_)
            if (peer->refused && peer->usable()) fail(*peer, "peer closed", Outcome::kCancelled, lock);
        launch(lock);
    }
    if (broken_.empty()) return due_;
    fail_all(lock);
    return due_ = false;
}

void GpuCopier::look(double now, Lock& lock) {
    if (std::ranges::any_of(lines_, [](const Line& line) { return !line.in_flight.empty(); })) look_by(now + kLook_s);
    for (const auto& [name, peer] : peers_)
        for (GpuBatch& batch : peer->batches)
            if (batch.launched && broken_.empty()) is_written(batch, lock);
}

void GpuCopier::heard(void* what, std::uint32_t, Lock& lock) {
    for (Line& line : lines_)
        if (what == &line) {
            line.ring.hush();
            line.bell_set = false;
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
    for (Line& line : lines_) {
        for (const InFlight& one : line.in_flight) one.peer->unfinished = true;
        line.in_flight.clear();
    }
    for (const auto& [name, peer] : peers_) {
        peer->in_flight = 0;
        if (peer->usable())
            fail(*peer, reason, Outcome::kPeerFailed, lock);
        else
            report_open(*peer, Outcome::kPeerFailed, reason);
    }
}

template <class Call>
bool GpuCopier::drive(Lock& lock, Call&& call) {
    lock.unlock();
    const Failure failure = call();
    lock.lock();
    if (failure.number == 0) return true;
    broken_ = launcher_.words(failure);
    due_ = true;
    return false;
}

void GpuCopier::launch(Lock& lock) {
    std::size_t stuck = 0;  // peers in a row, none of whose batches can go now
    while (broken_.empty() && stuck < turns_.size() && !free_.empty()) {
        GpuPeer& peer = *turns_.front();
        turns_.pop_front();
        peer.in_turn = false;
        if (!peer.memory || !peer.usable() || peer.refused) continue;
        const bool began = launch_one(peer, lock);
        if (std::ranges::find(peer.batches, false, &GpuBatch::launched) == peer.batches.end()) continue;
        take_turn(peer);
        stuck = began ? 0 : stuck + 1;
    }
    if (stuck) look_by(now_s() + kLateLook_s);
    for (Line& line : lines_) set_bell(line, lock);
}

// Its first batch that has a line.
bool GpuCopier::launch_one(GpuPeer& peer, Lock& lock) {
    std::optional<std::uintptr_t> late;  // has no line; nor has what follows after the same stream
    for (GpuBatch& batch : peer.batches) {
        if (batch.launched || (late && one_stream(batch) == late)) continue;
        Line* line = line_for(batch, lock);
        if (!broken_.empty()) return false;
        if (line) {
            begin(peer, batch, *line, lock);
            return true;
        }
        late = one_stream(batch);
    }
    return false;
}

Line* GpuCopier::line_for(GpuBatch& batch, Lock& lock) {
    if (batch.line == &lines_.front()) return batch.line;
    if (batch.moves.empty() || is_written(batch, lock)) return batch.line ? batch.line : &lines_.front();
    if (free_.size() <= slots_.size() / 4) return nullptr;
    if (batch.line) return batch.line;
    const auto behind = one_stream(batch);
    const auto takes = [&](const Line& line) { return behind && line.behind == behind && !line.in_flight.empty(); };
    auto line = std::find_if(lines_.begin() + 1, lines_.end(), takes);
    if (line == lines_.end())
        line = std::find_if(lines_.begin() + 1, lines_.end(), [](const Line& one) { return one.in_flight.empty(); });
    if (line == lines_.end()) return nullptr;
    line->behind = behind;
    return &*line;
}

// Whether its marks are reached; its time counts from then on.
bool GpuCopier::is_written(GpuBatch& batch, Lock& lock) {
    if (batch.after.empty()) return true;
    std::vector<Mark> late;
    for (const Mark& mark : batch.after) {
        bool reached = false;
        if (!drive(lock, [&] { return launcher_.query(mark.event, reached); })) return false;
        if (!reached) late.push_back(mark);
    }
    batch.after = std::move(late);
    if (!batch.after.empty()) return false;
    batch.deadline_s = now_s() + batch.timeout_s;
    look_by(batch.deadline_s);
    return true;
}

void GpuCopier::begin(GpuPeer& peer, GpuBatch& batch, Line& line, Lock& lock) {
    batch.line = &line;
    if (batch.moves.empty()) {
        batch.launched = true;
        due_ |= line.in_flight.empty();
        line.in_flight.push_back({&peer, batch.ticket, nullptr, true});
        ++peer.in_flight;
        return;
    }
    GateWriter& gate = *peer.memory->gate;
    if (!gate.enter()) {
        peer.refused = due_ = true;
        return;
    }
    const Slot* slot = free_.back();
    free_.pop_back();
    std::vector<std::uintptr_t> after;
    for (const Mark& mark : batch.after) after.push_back(mark.event);
    bool begun = false;
    drive(lock,
          [&] { return launcher_.launch(batch.moves, slot->list, slot->event, line.streams.work, begun, after); });
    if (begun) {  // it is on its way
        batch.launched = batch.moves.empty();
        line.in_flight.push_back({&peer, batch.ticket, slot, batch.launched});
        ++peer.in_flight;
    } else {
        free_.push_back(slot);
        gate.leave();
    }
}

// Report what has run.
void GpuCopier::collect(Line& line, Lock& lock) {
    while (broken_.empty() && !line.in_flight.empty()) {
        const InFlight one = line.in_flight.front();
        if (one.slot) {
            bool reached = false;
            if (!drive(lock, [&] { return launcher_.query(one.slot->event, reached); }) || !reached) return;
            free_.push_back(one.slot);
            one.peer->memory->gate->leave();
        }
        line.in_flight.pop_front();
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
void GpuCopier::set_bell(Line& line, Lock& lock) {
    if (!broken_.empty() || line.in_flight.empty()) return;
    look_by(now_s() + kLook_s);
    const auto oldest = std::ranges::find_if(line.in_flight, [](const InFlight& one) { return one.slot != nullptr; });
    if (line.bell_set || oldest == line.in_flight.end()) return;
    const std::uintptr_t event = oldest->slot->event;
    line.bell_set = drive(lock, [&] { return launcher_.ring_after(event, line.ring.fd(), line.streams.bell); });
}

void GpuCopier::take_turn(GpuPeer& peer) {
    if (!std::exchange(peer.in_turn, true)) turns_.push_back(&peer);
}

}  // namespace pdlink::cuda
