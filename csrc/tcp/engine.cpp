#include "tcp/engine.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/random.h>

#include <cerrno>
#include <cmath>
#include <system_error>
#include <utility>

namespace pdlink::tcp {
namespace {

// Most bytes that a caller sends itself: about what the kernel takes while the thread would wake up (10 to 20 us).
constexpr std::uint64_t kAtOnceNbytes = std::uint64_t{64} << 10;

void fill_random(void* at, std::size_t nbytes) {
    if (::getrandom(at, nbytes, 0) != static_cast<ssize_t>(nbytes))  // up to 256 bytes come whole
        throw std::system_error(errno, std::generic_category(), "getrandom");
}

}  // namespace

Engine::Engine(Settings settings)
    : settings_(std::move(settings)), address_{settings_.host, 0}, epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (settings_.streams < 1 || settings_.streams > kMaxStreams)
        throw std::invalid_argument("streams must be 1 to " + std::to_string(kMaxStreams));
    if (settings_.pack_below > kMaxPackBelow)
        throw std::invalid_argument("pack_below must be at most " + std::to_string(kMaxPackBelow));
    if (!settings_.congestion.empty() && !congestion_usable(settings_.congestion))
        throw std::system_error(errno, std::generic_category(), "congestion control " + settings_.congestion);
    listener_ = listen_on(address_);
    if (!watch(wake_.fd(), woken_, EPOLLIN) || !watch(listener_.get(), knocked_, EPOLLIN))
        throw std::system_error(errno, std::generic_category(), "epoll of the tcp transport");
    {
        const SignalsBlocked blocked;
        thread_ = new std::thread([this] { run(); });
    }
    pthread_setname_np(thread_->native_handle(), "pdlink-tcp");
}

Engine::~Engine() { close(0); }

void Engine::refuse_fork() const {
    if (forked()) throw PeerUnusable("this transport belongs to the parent of this forked process; open one here");
}

bool Engine::watch(int fd, Ready& ready, std::uint32_t events) {
    epoll_event event{};
    event.events = events | EPOLLET;
    event.data.ptr = &ready;
    return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0 ||
           (errno == EEXIST && ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0);
}

void Engine::end(int fd) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    shut(fd);
}

std::size_t Engine::add_region(std::byte* base, std::size_t nbytes) {
    refuse_fork();
    const std::lock_guard lock(mutex_);
    regions_.push_back({base, nbytes});
    return regions_.size() - 1;
}

void Engine::guard(std::vector<Band> bands, std::uint64_t num_blocks) {
    refuse_fork();
    auto made = std::make_shared<Guard>(std::move(bands), num_blocks);
    const std::lock_guard lock(mutex_);
    if (guard_ || next_number_ > 1) throw std::invalid_argument("blocks are guarded once, before anybody is invited");
    guard_ = std::move(made);
}

void Engine::open_blocks(const std::string& name, std::span<const std::int64_t> blocks) {
    refuse_fork();
    const std::lock_guard lock(mutex_);
    const Peer* peer = peers_.named(name);
    if (guard_ && peer && peer->invited && peer->usable()) guard_->open(peer->number, blocks);
}

void Engine::close_blocks(const std::string& name, std::span<const std::int64_t> blocks) {
    if (forked()) return;
    const std::lock_guard lock(mutex_);
    const Peer* peer = peers_.named(name);
    if (!guard_ || !peer || !peer->invited) return;
    guard_->close(peer->number, blocks);
    for (const auto& in : peer->in) in->look_again();
}

void Engine::refuse_closed() const {
    if (std::isfinite(give_up_s_)) throw PeerUnusable("the transport is closed");
}

Invitation Engine::invite(const std::string& name) {
    refuse_fork();
    Invitation made{};
    fill_random(&made.session, sizeof made.session);
    fill_random(made.token.data(), made.token.size());
    const std::lock_guard lock(mutex_);
    refuse_closed();
    Peer& peer = peers_.to_open(name, [](const Peer& one) { return one.invited; });
    while (!sessions_.emplace(made.session, &peer).second) ++made.session;
    peer.invited = true;
    peer.number = next_number_++;
    peer.session = made.session;
    peer.token = made.token;
    peer.regions = std::make_shared<const std::vector<Region>>(regions_);
    for (const Region& region : regions_) made.regions.push_back(region.nbytes);
    return made;
}

void Engine::connect(const std::string& name, const Address& address, const Invitation& there) {
    refuse_fork();
    std::vector<std::unique_ptr<Outgoing>> out;
    for (std::uint16_t stream = 0; stream < settings_.streams; ++stream) {
        Hello hello{kHelloMagic, kVersion, stream, there.session, {}};
        std::copy(there.token.begin(), there.token.end(), hello.token);
        out.push_back(std::make_unique<Outgoing>(begin_connect(address), hello, settings_.pack_below));
    }
    const std::lock_guard lock(mutex_);
    refuse_closed();
    Peer& peer = peers_.to_open(name, [](const Peer& one) { return one.dialed; });
    peer.dialed = true;
    peer.address = address;
    for (const std::uint64_t nbytes : there.regions) peer.remote.push_back({0, nbytes});
    peer.out = std::move(out);
    for (const auto& one : peer.out) watch(one->fd(), one->ready, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
    peer.connect_by_s = now_s() + settings_.connect_timeout_s;
    look_by(peer.connect_by_s);
    wake_.ring();
}

std::uint64_t Engine::submit(const std::string& name, const std::vector<Piece>& pieces, double timeout_s) {
    refuse_fork();
    if (std::isnan(timeout_s)) throw std::invalid_argument("timeout_s is not a number");
    std::list<Batch> one(1);
    Batch& batch = one.front();
    batch.submitted_s = now_s();
    batch.deadline_s = batch.submitted_s + timeout_s;
    std::vector<Extent> local, remote;
    {
        const std::lock_guard lock(mutex_);
        remote = peers_.to_write(name).remote;
        for (const Region& region : regions_)
            local.push_back({reinterpret_cast<std::uintptr_t>(region.base), region.nbytes});
    }
    batch.puts = plan_puts(pieces, local, remote);
    for (const Put& put : batch.puts) batch.nbytes += put.nbytes;

    const std::lock_guard lock(mutex_);
    Peer& peer = peers_.to_write(name);  // a name is not used twice, so it is the one whose regions were looked at
    const std::uint64_t ticket = batch.ticket = next_ticket_++;
    const bool alone = peer.batches.empty() || peer.batches.back().cut;
    const bool looks_in_time = look_s_ <= batch.deadline_s;
    look_by(batch.deadline_s);
    peer.batches.splice(peer.batches.end(), one);
    if (!(alone && timeout_s > 0 && sent_at_once(peer, batch) && looks_in_time)) wake_.ring();
    return ticket;
}

// Whether all of a batch has been sent here and now.
bool Engine::sent_at_once(Peer& peer, Batch& batch) {
    if (batch.nbytes > kAtOnceNbytes) return false;
    for (const auto& out : peer.out) {
        if (out->busy || !out->connected() || !out->ready.out || !out->sent()) continue;
        out->load(batch);
        if (out->send() == Turn::kBroken) out->ready.out = true;  // the thread will find out and say why
        return batch.cut && out->sent();
    }
    return false;
}

bool Engine::connected(const std::string& name) {
    if (forked()) return false;
    const std::lock_guard lock(mutex_);
    const Peer* peer = peers_.named(name);
    return peer && !peer->out.empty() && peer->out.front()->connected();
}

std::vector<std::string> Engine::congestion(const std::string& name) {
    std::vector<std::string> names;
    if (forked()) return names;
    const std::lock_guard lock(mutex_);
    if (const Peer* peer = peers_.named(name))
        for (const auto& out : peer->out) names.push_back(congestion_of(out->fd()));
    return names;
}

std::uint64_t Engine::strangers_dropped() {
    const std::lock_guard lock(mutex_);
    return strangers_dropped_;
}

void Engine::close_peer(const std::string& name) {
    if (forked()) return;
    const std::lock_guard lock(mutex_);
    if (Peer* peer = peers_.named(name)) {
        peer->closing = ending_ = true;
        wake_.ring();
    }
}

std::vector<Report> Engine::poll() {
    if (forked()) return {};
    return outbox_.take_all();
}

void Engine::close(double grace_s) {
    if (forked()) return;
    const std::lock_guard one_at_a_time(join_mutex_);
    if (!thread_) return;
    {
        const std::lock_guard lock(mutex_);
        give_up_s_ = now_s() + grace_s;
        look_by(give_up_s_);
        for (auto& [name, peer] : peers_) peer->closing = ending_ = true;
        wake_.ring();
    }
    thread_->join();
    delete std::exchange(thread_, nullptr);
}

}  // namespace pdlink::tcp
