#include "ucx/engine.h"

#include <pthread.h>

#include <cmath>
#include <new>

namespace pdlink::ucx {
namespace {

// Finding devices and reading their state; on a host with many NICs and GPUs this is slow.
constexpr std::chrono::seconds kStartLimit{60};
// Registering a large pool with an RDMA device takes seconds. Nobody else waits for it: it is done before any
// session.
constexpr std::chrono::seconds kRegisterLimit{60};
// A turn of the progress thread takes milliseconds. The caller is an endpoint, and all of its sessions wait with it.
constexpr std::chrono::seconds kPeerLimit{2};
constexpr std::chrono::milliseconds kCloseLimit{1500};
constexpr std::chrono::milliseconds kJoinLimit{1900};
constexpr double kLongestTimeout_s = 1e8;

// The progress thread does something else for too long; what was asked of it may still be done.
struct NoAnswer : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace

bool CommandQueue::post(Command command) {
    const std::lock_guard lock(mutex_);
    if (shut_) return false;
    waiting_.push_back(std::move(command));
    bell_.ring();
    return true;
}

bool CommandQueue::run(Progress& progress) {
    std::deque<Command> commands;
    {
        const std::lock_guard lock(mutex_);
        if (waiting_.empty()) return false;
        bell_.hush();
        commands.swap(waiting_);
    }
    for (Command& command : commands) command(progress);
    return true;
}

void CommandQueue::shut() {
    const std::lock_guard lock(mutex_);
    shut_ = true;
}

Engine::Engine(Library library, Choice choice) : owner_(::getpid()), shared_(std::make_shared<Shared>()) {
    auto started = std::make_shared<std::promise<void>>();
    auto finished = std::make_shared<std::promise<void>>();
    std::future<void> start = started->get_future();
    finished_ = finished->get_future();
    {
        const SignalsBlocked blocked;
        thread_ = std::thread(
            [shared = shared_, library = std::move(library), choice = std::move(choice), started, finished] {
                run(*shared, library, choice, *started);
                finished->set_value();
            });
    }
    ::pthread_setname_np(thread_.native_handle(), "pdlink-ucx");
    if (start.wait_for(kStartLimit) != std::future_status::ready) {
        thread_.detach();
        throw std::runtime_error("UCX did not start within " + std::to_string(kStartLimit.count()) + " s");
    }
    try {
        start.get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

Engine::~Engine() {
    if (forked()) {
        new std::shared_ptr<Shared>(shared_);  // never freed: descriptors must stay open here as they are there
        new std::thread(std::move(thread_));
        return;
    }
    close();
}

void Engine::run(Shared& shared, const Library& library, const Choice& choice, std::promise<void>& started) {
    std::unique_ptr<Progress> progress;
    try {
        progress = std::make_unique<Progress>(library, choice, shared.outbox, shared.commands.bell());
    } catch (...) {
        started.set_exception(std::current_exception());
        return;
    }
    started.set_value();
    while (!shared.stopping) {
        const bool commanded = shared.commands.run(*progress);
        if (!progress->turn() && !commanded) progress->sleep();
    }
    shared.commands.shut();  // from here on nobody is promised anything
    shared.commands.run(*progress);
    progress->close(Clock::now() + kCloseLimit);
}

void Engine::require_usable() const {
    if (forked()) throw PeerUnusable("this transport belongs to the process that forked this one");
    if (closed_) throw PeerUnusable("this transport is closed");
}

// Has `work(progress)` done in the progress thread; the answer will be what it returns.
template <class Work>
auto Engine::ask(Work work) {
    using Answer = std::invoke_result_t<Work, Progress&>;
    auto task = std::make_shared<std::packaged_task<Answer(Progress&)>>(std::move(work));
    std::future<Answer> answer = task->get_future();
    if (!shared_->commands.post([task = std::move(task)](Progress& progress) { (*task)(progress); }))
        throw PeerUnusable("this transport is closed");
    return answer;
}

template <class Answer>
Answer Engine::answer_of(std::future<Answer> answer, std::chrono::seconds limit) {
    if (answer.wait_for(limit) != std::future_status::ready)
        throw NoAnswer("the UCX progress thread did not answer within " + std::to_string(limit.count()) + " s");
    return answer.get();
}

// The entry of a peer of which one side is being opened. Throws NameTaken if that side is open already.
Engine::Seen& Engine::begin(const std::string& peer, bool Seen::* side) {
    Seen& seen = peers_[peer];
    if (seen.*side || seen.closing) throw NameTaken("peer name " + peer + " is used twice");
    seen.*side = true;
    if (!seen.face) seen.face = std::make_shared<Face>();
    return seen;
}

void Engine::undo(const std::string& peer, bool Seen::* side) {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(peer);
    if (found == peers_.end() || found->second.closing) return;
    found->second.*side = false;
    if (!found->second.invited && !found->second.connected) peers_.erase(found);
}

Registered Engine::register_memory(std::uintptr_t base, std::uint64_t nbytes, std::uintptr_t cuda_context) {
    require_usable();
    Registered region = answer_of(
        ask([=](Progress& progress) { return progress.add_region(base, nbytes, cuda_context); }), kRegisterLimit);
    const std::lock_guard lock(mutex_);
    if (local_.size() <= region.index) local_.resize(region.index + 1, Extent{0, 0});
    local_[region.index] = {base, nbytes};
    return region;
}

Opening Engine::invite(const std::string& peer) {
    require_usable();
    std::future<Opening> opening;
    {
        // Posted under the lock, so that a close_peer() of another thread comes after it.
        const std::lock_guard lock(mutex_);
        begin(peer, &Seen::invited);
        opening = ask([peer](Progress& progress) { return progress.invite(peer); });
    }
    try {
        return answer_of(std::move(opening), kPeerLimit);
    } catch (const NoAnswer&) {
        close_peer(peer);  // behind the invitation, which may still be made
        throw;
    } catch (...) {
        undo(peer, &Seen::invited);
        throw;
    }
}

void Engine::connect(const std::string& peer, Remote remote) {
    require_usable();
    std::future<void> connecting;
    {
        const std::lock_guard lock(mutex_);
        Seen& seen = begin(peer, &Seen::connected);
        for (const Remote::Region& region : remote.regions) seen.remote.push_back({region.base, region.nbytes});
        connecting = ask([peer, remote = std::move(remote), face = seen.face](Progress& progress) {
            progress.connect(peer, remote, face);
        });
    }
    try {
        answer_of(std::move(connecting), kPeerLimit);
    } catch (const NoAnswer& error) {
        close_peer(peer);
        throw PeerUnusable("cannot connect to " + peer + ": " + error.what());
    } catch (const std::exception& error) {  // std::invalid_argument too: the gate is not valid
        undo(peer, &Seen::connected);
        throw PeerUnusable("cannot connect to " + peer + ": " + error.what());
    }
}

std::uint64_t Engine::submit(const std::string& peer, std::span<const Piece> pieces, double timeout_s) {
    require_usable();
    if (!(timeout_s > 0 && timeout_s <= kLongestTimeout_s))
        throw std::invalid_argument("timeout_s must be positive, got " + std::to_string(timeout_s));
    auto batch = std::make_unique<Batch>();
    std::vector<Extent> local, remote;
    {
        const std::lock_guard lock(mutex_);
        const auto found = peers_.find(peer);
        if (found == peers_.end() || !found->second.connected) throw PeerUnusable("no connection to peer " + peer);
        if (found->second.closing) throw PeerUnusable("the connection to peer " + peer + " is closed");
        const std::string failure = found->second.face->failure();
        if (!failure.empty()) throw PeerUnusable("peer " + peer + " has failed: " + failure);
        local = local_;
        remote = found->second.remote;
    }
    batch->puts = plan_puts(pieces, local, remote);
    for (const Put& put : batch->puts) batch->nbytes += put.nbytes;
    batch->submitted_s = now_s();
    batch->deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));

    // Under one lock with the check, so that it is in the queue before a close_peer() of another thread.
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(peer);
    if (found == peers_.end() || found->second.closing)
        throw PeerUnusable("the connection to peer " + peer + " is closed");
    const std::uint64_t ticket = batch->ticket = next_ticket_++;
    // std::function wants to be copyable, a batch is not.
    auto holder = std::make_shared<std::unique_ptr<Batch>>(std::move(batch));
    const bool posted =
        shared_->commands.post([peer, holder](Progress& progress) { progress.submit(peer, std::move(*holder)); });
    if (!posted) throw PeerUnusable("this transport is closed");
    return ticket;
}

std::vector<Report> Engine::poll() {
    if (forked()) return {};
    std::vector<Report> reports = shared_->outbox.take_all();
    const std::lock_guard lock(mutex_);
    for (const Report& report : reports)
        if (report.kind == Report::Kind::kPeerClosed) peers_.erase(report.peer);
    return reports;
}

int Engine::fd() const { return shared_->outbox.fd(); }

std::string Engine::lane(const std::string& peer) const {
    if (forked()) return "";
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(peer);
    return found == peers_.end() ? "" : found->second.face->lane();
}

void Engine::close_peer(const std::string& peer) {
    if (forked() || closed_) return;
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(peer);
    if (found == peers_.end() || found->second.closing) return;
    found->second.closing = true;
    shared_->commands.post([peer](Progress& progress) { progress.close_peer(peer); });
}

void Engine::close() {
    if (forked()) return;
    const std::lock_guard lock(close_mutex_);
    if (closed_.exchange(true)) return;
    shared_->commands.post([shared = shared_.get()](Progress&) { shared->stopping = true; });
    if (finished_.wait_for(kJoinLimit) == std::future_status::ready)
        thread_.join();
    else
        thread_.detach();  // it holds what it uses, and ends when UCX lets it
}

}  // namespace pdlink::ucx
