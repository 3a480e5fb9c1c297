// What Python holds: checks in the caller's thread, does everything else in the progress thread.
//
// No callback ever goes from the progress thread to Python, and no method waits for the network: commands go in
// through one queue, events come out through another, each with a descriptor that wakes its reader. Methods that need
// an answer wait for the thread to take its next turn. The interpreter lock must not be held while calling.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/peers.h"
#include "ucx/progress.h"

namespace pdlink::ucx {

using PeerUnusable = Unusable<class Engine>;  // also of one that cannot be connected from here
using NameTaken = Taken<class Engine>;

using Command = std::function<void(Progress&)>;

class CommandQueue {
  public:
    // False once the queue is shut.
    bool post(Command command);
    // Runs what is there; true if there was anything.
    bool run(Progress& progress);
    void shut();  // what was posted before can still be run
    const Bell& bell() const { return bell_; }

  private:
    std::mutex mutex_;
    std::deque<Command> waiting_;
    bool shut_ = false;
    Bell bell_;
};

class Engine {
  public:
    // Throws std::runtime_error if no context or worker can be made with these transports.
    Engine(Library library, Choice choice);
    // Closes. In a forked child it does nothing at all: the descriptors there are the parent's too, and destroying a
    // worker in the child breaks the parent's connections (measured, tcp).
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // cuda_context: of device memory; 0 for host memory.
    Registered register_memory(std::uintptr_t base, std::uint64_t nbytes, std::uintptr_t cuda_context);
    Opening invite(const std::string& peer);
    void connect(const std::string& peer, Remote remote);
    std::uint64_t submit(const std::string& peer, std::span<const Piece> pieces, double timeout_s);
    std::vector<Report> poll();
    int fd() const;
    std::string lane(const std::string& peer) const;
    void close_peer(const std::string& peer);
    void close();

  private:
    // A peer as callers see it.
    struct Seen {
        bool invited = false;
        bool connected = false;
        bool closing = false;
        std::vector<Extent> remote;
        std::shared_ptr<Face> face;
    };
    // What the thread uses. Kept alive by the thread if it must be left behind.
    struct Shared {
        Outbox outbox;
        CommandQueue commands;
        bool stopping = false;  // set by a command
    };

    static void run(Shared& shared, const Library& library, const Choice& choice, std::promise<void>& started);
    void require_usable() const;
    Seen& begin(const std::string& peer, bool Seen::* side);
    void undo(const std::string& peer, bool Seen::* side);
    template <class Work>
    auto ask(Work work);
    template <class Answer>
    static Answer answer_of(std::future<Answer> answer, std::chrono::seconds limit);

    bool forked() const { return ::getpid() != owner_; }

    const pid_t owner_;
    const std::shared_ptr<Shared> shared_;
    std::thread thread_;
    std::future<void> finished_;
    std::mutex close_mutex_;
    std::atomic<bool> closed_ = false;

    mutable std::mutex mutex_;  // the three below
    std::unordered_map<std::string, Seen> peers_;
    std::vector<Extent> local_;
    std::uint64_t next_ticket_ = 1;
};

}  // namespace pdlink::ucx
