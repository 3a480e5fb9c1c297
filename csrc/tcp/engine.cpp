#include "tcp/engine.h"

#include <sys/random.h>

#include <cerrno>
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

Engine::Engine(Settings settings) : settings_(std::move(settings)), address_{settings_.host, 0} {
    if (settings_.streams < 1 || settings_.streams > kMaxStreams)
        throw std::invalid_argument("streams must be 1 to " + std::to_string(kMaxStreams));
    if (settings_.pack_below > kMaxPackBelow)
        throw std::invalid_argument("pack_below must be at most " + std::to_string(kMaxPackBelow));
    if (!settings_.congestion.empty() && !congestion_usable(settings_.congestion))
        throw std::system_error(errno, std::generic_category(), "congestion control " + settings_.congestion);
    listener_ = listen_on(address_);
    if (!Base::watch(listener_.get(), &knocked_, EPOLLIN | EPOLLET))
        throw std::system_error(errno, std::generic_category(), "epoll of the tcp transport");
    start("pdlink-tcp");
}

Engine::~Engine() { close(0); }

void Engine::end(int fd) {
    unwatch(fd);
    shut(fd);
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
    const Peer* peer = named(name);
    if (guard_ && peer && peer->invited() && peer->usable()) guard_->open(peer->number, blocks);
}

void Engine::close_blocks(const std::string& name, std::span<const std::int64_t> blocks) {
    if (forked()) return;
    const std::lock_guard lock(mutex_);
    const Peer* peer = named(name);
    if (!guard_ || !peer || !peer->invited()) return;
    guard_->close(peer->number, blocks);
    for (const auto& in : peer->in) in->look_again();
}

Invitation Engine::invite(const std::string& name) {
    refuse_fork();
    Invitation made{};
    fill_random(&made.session, sizeof made.session);
    fill_random(made.token.data(), made.token.size());
    const std::lock_guard lock(mutex_);
    Peer& peer = to_open(name, &Peer::invited);
    while (!sessions_.emplace(made.session, &peer).second) ++made.session;
    peer.number = next_number_++;
    peer.session = made.session;
    peer.token = made.token;
    auto regions = std::make_shared<std::vector<Region>>();
    for (const Extent& region : regions_) {
        regions->push_back({reinterpret_cast<std::byte*>(region.base), region.nbytes});
        made.regions.push_back(region.nbytes);
    }
    peer.regions = std::move(regions);
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
    Peer& peer = to_open(name, &Peer::dialed);
    peer.address = address;
    peer.where = " to " + address.host + ":" + std::to_string(address.port);
    for (const std::uint64_t nbytes : there.regions) peer.remote.push_back({0, nbytes});
    peer.out = std::move(out);
    for (const auto& one : peer.out) watch(one->fd(), one->ready);
    peer.connect_by_s = now_s() + settings_.connect_timeout_s;
    look_by(peer.connect_by_s);
    wake_.ring();
}

void Batch::fill(std::span<const RunList> lists, std::span<const Extent> local, std::span<const Extent> remote) {
    runs = join_runs(lists, local, remote);
    for (const Run& run : runs) nbytes += run.nbytes;
}

// Send a small batch here and now if nothing precedes it and the thread looks at deadlines in time.
bool Engine::at_once(Peer& peer, Batch& batch) {
    const bool alone = peer.batches.size() == 1 || std::prev(peer.batches.end(), 2)->cut;
    if (!alone || batch.nbytes > kAtOnceNbytes || batch.deadline_s <= batch.submitted_s) return false;
    for (const auto& out : peer.out) {
        if (out->busy || !out->connected() || !out->ready.out || !out->sent()) continue;
        out->load(batch);
        if (out->send() == Turn::kBroken) out->ready.out = true;  // the thread will find out and say why
        return batch.cut && out->sent() && looks_by(batch.deadline_s);
    }
    return false;
}

std::vector<std::string> Engine::congestion(const std::string& name) {
    std::vector<std::string> names;
    if (forked()) return names;
    const std::lock_guard lock(mutex_);
    if (const Peer* peer = named(name))
        for (const auto& out : peer->out) names.push_back(congestion_of(out->fd()));
    return names;
}

std::uint64_t Engine::strangers_dropped() {
    if (forked()) return 0;
    const std::lock_guard lock(mutex_);
    return strangers_dropped_;
}

}  // namespace pdlink::tcp
