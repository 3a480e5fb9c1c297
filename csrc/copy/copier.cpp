#include "copy/copier.h"

#include <pthread.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>
#include <utility>

namespace pdlink {
namespace {

// When a closing peer's gate is looked at again; then rarer.
constexpr double kFirstQuietLook_s = 0.0002;
// Most bytes that a caller copies itself. That takes less time than a thread needs to wake up (5 to 20 us).
constexpr std::uint64_t kAtOnceNbytes = std::uint64_t{64} << 10;
// Wake the second thread for batches of this size; waking takes as long as copying half of it.
constexpr std::uint64_t kWakeSecondNbytes = std::uint64_t{1} << 20;

Batch resolve(const std::vector<Piece>& pieces, const std::vector<Extent>& local, const std::vector<Extent>& remote) {
    Batch batch;
    std::size_t num_runs = 0;
    for (const Piece& piece : pieces) num_runs += piece.num_runs;
    batch.runs.reserve(num_runs);
    for (std::size_t p = 0; p < pieces.size(); ++p) {
        const Bases bases = check_piece(pieces[p], p, local, remote);
        auto* dst = reinterpret_cast<std::byte*>(bases.dst);
        const auto* src = reinterpret_cast<const std::byte*>(bases.src);
        const std::int64_t* run = pieces[p].runs;
        for (std::size_t i = 0; i < pieces[p].num_runs; ++i, run += 3) {
            batch.runs.push_back({dst + run[1], src + run[0], static_cast<std::size_t>(run[2])});
            batch.nbytes += static_cast<std::uint64_t>(run[2]);
        }
    }
    return batch;
}

}  // namespace

Copier::Copier(int num_threads) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (num_threads != 1 && num_threads != 2)
        throw std::invalid_argument("a copier has 1 or 2 threads, not " + std::to_string(num_threads));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;  // the wake-up; a peer's life carries the peer
    if (epoll_.get() < 0 || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.fd(), &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll of the copier");
    if (num_threads == 2) second_ = std::make_unique<Second>();
    const SignalsBlocked blocked;
    thread_ = new std::thread([this] { run(); });
    pthread_setname_np(thread_->native_handle(), "pdlink-copy");
    if (!second_) return;
    try {
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

void Copier::refuse_fork() const {
    if (forked()) throw PeerUnusable("this transport belongs to the parent of this forked process; open one here");
}

std::size_t Copier::add_region(std::byte* base, std::size_t nbytes) {
    refuse_fork();
    const std::lock_guard lock(mutex_);
    regions_.push_back({reinterpret_cast<std::uintptr_t>(base), nbytes});
    return regions_.size() - 1;
}

void Copier::refuse_closed() const {
    if (std::isfinite(give_up_s_)) throw PeerUnusable("the transport is closed");
}

GateName Copier::invite(const std::string& name) {
    refuse_fork();
    auto gate = std::make_unique<GateOwner>();
    const GateName gate_name = gate->name();
    const std::lock_guard lock(mutex_);
    refuse_closed();
    peers_.to_open(name, [](const Peer& peer) { return peer.gate != nullptr; }).gate = std::move(gate);
    return gate_name;
}

void Copier::connect(const std::string& name, std::int64_t pid, const std::vector<PeerFile>& files,
                     const GateName& gate) {
    refuse_fork();
    auto memory = std::make_shared<PeerMemory>(pid, files, gate);
    const std::lock_guard lock(mutex_);
    refuse_closed();
    Peer& peer = peers_.to_open(name, [](const Peer& one) { return one.connected(); });
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &peer;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, memory->life_fd(), &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll of a peer's life");
    peer.memory = std::move(memory);
    take_turn(peer);
    wake_.ring();
}

std::uint64_t Copier::submit(const std::string& name, const std::vector<Piece>& pieces, double timeout_s) {
    refuse_fork();
    if (std::isnan(timeout_s)) throw std::invalid_argument("timeout_s is not a number");
    const double submitted_s = now_s();
    std::shared_ptr<PeerMemory> memory;
    std::vector<Extent> local;
    {
        const std::lock_guard lock(mutex_);
        memory = peers_.to_write(name).memory;
        local = regions_;
    }
    bool grew = false;
    const std::vector<Extent> remote = memory->extents(grew);
    Batch batch = resolve(pieces, local, remote);
    batch.submitted_s = submitted_s;
    batch.deadline_s = submitted_s + timeout_s;

    const std::lock_guard lock(mutex_);
    Peer& peer = peers_.to_write(name);
    if (peer.memory != memory) throw PeerUnusable("peer " + name + " was connected anew");
    if (grew) peer.prepared = false;
    batch.ticket = next_ticket_++;
    const std::uint64_t ticket = batch.ticket;
    peer.earliest_deadline_s = std::min(peer.earliest_deadline_s, batch.deadline_s);
    peer.waiting_nbytes += batch.nbytes;
    peer.queue.push_back(std::move(batch));
    if (!landed_at_once(peer)) {
        take_turn(peer);
        wake_.ring();
    }
    return ticket;
}

// Copy a peer's only batch here and now if it is small. False if something is left to do.
bool Copier::landed_at_once(Peer& peer) {
    Batch& batch = peer.queue.front();
    if (peer.queue.size() > 1 || batch.nbytes > kAtOnceNbytes || !peer.prepared || batch.deadline_s <= now_s())
        return false;
    const Slice slice = batch.take(kSliceNbytes);
    peer.waiting_nbytes -= slice.nbytes;
    peer.refused = !copied(*peer.memory, batch, slice);
    if (peer.refused) return false;
    batch.slice_landed();
    report_landed(peer);
    return peer.queue.empty();
}

std::array<std::uint64_t, 2> Copier::slices_taken() {
    const std::lock_guard lock(mutex_);
    return slices_taken_;
}

bool Copier::connected(const std::string& name) {
    if (forked()) return false;
    const std::lock_guard lock(mutex_);
    const Peer* peer = peers_.named(name);
    return peer && peer->connected();
}

void Copier::begin_closing(Peer& peer) {
    if (peer.closing) return;
    peer.closing = true;
    if (peer.gate) peer.gate->shut();
    closing_.push_back(&peer);
    next_quiet_look_s_ = 0;
    quiet_look_period_s_ = kFirstQuietLook_s;
}

void Copier::close_peer(const std::string& name) {
    if (forked()) return;
    const std::lock_guard lock(mutex_);
    if (Peer* peer = peers_.named(name)) begin_closing(*peer);
    wake_.ring();
}

std::vector<Report> Copier::poll() {
    if (forked()) return {};
    return outbox_.take_all();
}

void Copier::close(double grace_s) {
    if (forked()) return;
    const std::lock_guard one_at_a_time(join_mutex_);
    if (!thread_) return;
    {
        const std::lock_guard lock(mutex_);
        give_up_s_ = now_s() + grace_s;
        for (auto& [name, peer] : peers_) begin_closing(*peer);
        wake_.ring();
        if (second_) second_->much_to_copy.notify_one();
    }
    thread_->join();
    delete std::exchange(thread_, nullptr);
    if (second_ && second_->thread.joinable()) second_->thread.join();
}

void Copier::take_turn(Peer& peer) {
    if (std::exchange(peer.in_turn, true)) return;
    turns_.push_back(&peer);
    if (second_ && second_->sleeps && peer.prepared && peer.waiting_nbytes >= kWakeSecondNbytes && !computing_) {
        second_->sleeps = false;
        second_->much_to_copy.notify_one();
    }
}

}  // namespace pdlink
