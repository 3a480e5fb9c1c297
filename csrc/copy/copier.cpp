#include "copy/copier.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace pdlink::copy {
namespace {

// Most bytes that a caller copies itself. That takes less time than a thread needs to wake up (5 to 20 us).
constexpr std::uint64_t kAtOnceNbytes = std::uint64_t{64} << 10;
// Wake the second thread for batches of this size; waking takes as long as copying half of it.
constexpr std::uint64_t kWakeSecondNbytes = std::uint64_t{1} << 20;

}  // namespace

void Batch::fill(std::span<const RunList> lists, std::span<const Extent> local,
                 const std::shared_ptr<PeerMemory>& memory) {
    const std::vector<Extent> remote = memory->extents(memory_grew);
    std::size_t num_runs = 0;
    for (const RunList& list : lists) num_runs += list.num_runs;
    runs.reserve(num_runs);
    for (std::size_t p = 0; p < lists.size(); ++p) {
        const Bases bases = check_list(lists[p], p, local, remote);
        auto* dst = reinterpret_cast<std::byte*>(bases.dst);
        const auto* src = reinterpret_cast<const std::byte*>(bases.src);
        const std::int64_t* run = lists[p].runs;
        for (std::size_t i = 0; i < lists[p].num_runs; ++i, run += 3) {
            runs.push_back({dst + run[1], src + run[0], static_cast<std::size_t>(run[2])});
            nbytes += static_cast<std::uint64_t>(run[2]);
        }
    }
}

Copier::Copier(int num_threads) {
    if (num_threads != 1 && num_threads != 2)
        throw std::invalid_argument("a copier has 1 or 2 threads, not " + std::to_string(num_threads));
    if (num_threads == 2) second_ = std::make_unique<Second>();
    start("pdlink-copy");
    if (!second_) return;
    try {
        const SignalsBlocked blocked;
        second_->thread = std::thread([this] { run_second(); });
    } catch (...) {
        close(0);
        throw;
    }
    pthread_setname_np(second_->thread.native_handle(), "pdlink-copy-2");
}

Copier::~Copier() {
    close(0);
    if (forked()) (void)second_.release();
}

GateName Copier::invite(const std::string& name) {
    refuse_fork();
    auto gate = std::make_unique<GateOwner>();
    const GateName gate_name = gate->name();
    const std::lock_guard lock(mutex_);
    to_open(name, &Peer::invited).gate = std::move(gate);
    return gate_name;
}

void Copier::connect(const std::string& name, std::int64_t pid, const std::vector<PeerFile>& files,
                     const GateName& gate) {
    refuse_fork();
    auto memory = std::make_shared<PeerMemory>(pid, files, gate);
    const std::lock_guard lock(mutex_);
    Peer& peer = to_open(name, &Peer::dialed);
    if (!watch(memory->life_fd(), &peer, EPOLLIN))
        throw std::system_error(errno, std::generic_category(), "epoll of a peer's life");
    peer.memory = std::move(memory);
    take_turn(peer);
    wake_.ring();
}

std::shared_ptr<PeerMemory> Copier::memory_of(const std::string& name) {
    refuse_fork();
    const std::lock_guard lock(mutex_);
    return to_write(name).memory;
}

// Copy a peer's only batch here and now if it is small.
bool Copier::at_once(Peer& peer, Batch& batch) {
    if (batch.memory_grew) peer.prepared = false;
    peer.waiting_nbytes += batch.nbytes;
    if (peer.batches.size() == 1 && batch.nbytes <= kAtOnceNbytes && peer.prepared && batch.deadline_s > now_s()) {
        const RunRange range = batch.take(kRangeNbytes);
        peer.waiting_nbytes -= range.nbytes;
        peer.refused = !copied(*peer.memory, batch, range);
        if (!peer.refused) {
            batch.range_landed();
            report_landed(peer);
            if (peer.batches.empty()) return true;
        }
    }
    take_turn(peer);
    return false;
}

std::array<std::uint64_t, 2> Copier::ranges_taken() {
    if (forked()) return {};
    const std::lock_guard lock(mutex_);
    return ranges_taken_;
}

void Copier::keep_out(Peer& peer) {
    if (peer.gate) peer.gate->shut();
}

void Copier::take_turn(Peer& peer) {
    if (std::exchange(peer.in_turn, true)) return;
    turns_.push_back(&peer);
    if (second_ && second_->sleeps && peer.prepared && peer.waiting_nbytes >= kWakeSecondNbytes && !computing_) {
        second_->sleeps = false;
        second_->much_to_copy.notify_one();
    }
}

}  // namespace pdlink::copy
