#include "ucx/engine.h"

#include <system_error>
#include <utility>

namespace pdlink::ucx {

Engine::Engine(Library library, const Choice& choice)
    : context_(std::make_shared<Context>(std::move(library), choice)), writing_(context_->make_worker()) {
    try {
        if (!watch(context_->worker_fd(writing_), &writing_watch_, EPOLLIN))
            throw std::system_error(errno, std::generic_category(), "epoll of a UCX worker");
        start("pdlink-ucx");
    } catch (...) {
        context_->ucx().ucp_worker_destroy(writing_);
        throw;
    }
}

Engine::~Engine() {
    close(0);
    if (!forked()) return;
    new std::shared_ptr<Context>(context_);  // never freed
    new decltype(peers_)(std::move(peers_));
    new decltype(leaving_)(std::move(leaving_));
}

Registered Engine::register_memory(std::uintptr_t base, std::uint64_t nbytes, std::uintptr_t cuda_context) {
    const std::shared_ptr<Context> context = open_context();
    const Region& region = context->add_region(base, nbytes, cuda_context);
    const std::lock_guard lock(mutex_);
    if (cuda_context) cuda_context_ = cuda_context;
    regions_.push_back({base, nbytes});
    memory_.push_back(region.memh);
    return {regions_.size() - 1, region.rkey};
}

Opening Engine::invite(const std::string& name) {
    auto incoming = std::make_unique<Incoming>(open_context());
    const std::lock_guard lock(mutex_);
    Peer& peer = to_open(name, &Peer::invited);
    if (!watch(incoming->fd(), &peer.worker, EPOLLIN))
        throw std::system_error(errno, std::generic_category(), "epoll of a UCX worker");
    peer.incoming = std::move(incoming);
    peer.awake = true;
    wake_.ring();
    return {peer.incoming->address(), peer.incoming->gate().name()};
}

void Engine::connect(const std::string& name, Remote remote) {
    const std::shared_ptr<Context> context = open_context();
    std::vector<Extent> extents;
    for (const Remote::Region& region : remote.regions) extents.push_back({region.base, region.nbytes});
    try {
        auto outgoing =
            std::make_unique<Outgoing>(*context, writing_, known_memory_, name, outbox_, std::move(remote));
        const std::lock_guard lock(mutex_);
        Peer& peer = to_open(name, &Peer::dialed);
        if (outgoing->pidfd() >= 0 && !watch(outgoing->pidfd(), &peer.process, EPOLLIN))
            throw std::system_error(errno, std::generic_category(), "epoll of a peer's life");
        peer.outgoing = std::move(outgoing);
        peer.remote = std::move(extents);
        peer.connect_by_s = now_s() + kConnectLimit_s;
        look_by(peer.connect_by_s);
        wake_.ring();
    } catch (const NameTaken&) {
        throw;
    } catch (const std::exception& error) {  // std::invalid_argument too: the gate is not valid
        throw PeerUnusable("cannot connect to " + name + ": " + error.what());
    }
}

std::shared_ptr<Context> Engine::open_context() {
    refuse_fork();
    const std::lock_guard lock(mutex_);
    refuse_closed();
    return context_;
}

std::string Engine::lane(const std::string& name) {
    if (forked()) return "";
    const std::lock_guard lock(mutex_);
    const Peer* peer = named(name);
    return peer ? peer->lane : "";
}

// Direct stores of the peer. What comes by sockets or RDMA is cut off when its worker goes.
void Engine::keep_out(Peer& peer) {
    if (peer.incoming) peer.incoming->shut_gate();
}

void Batch::fill(std::span<const RunList> lists, std::span<const Extent> local, std::span<const Extent> remote) {
    runs = join_runs(lists, local, remote);
    for (const Run& run : runs) nbytes += run.nbytes;
}

}  // namespace pdlink::ucx
