// The progress thread's work: it alone touches UCX.
//
//   worker for writing ── one endpoint per connected peer (Outgoing)
//   worker per invited peer (Incoming)
//
// A turn progresses the workers that have something to do and lets every Outgoing post, reap and end. When a turn
// finds nothing, all workers are armed and the thread sleeps in epoll on their descriptors, on the command bell and
// on the pidfds of connected processes. The order matters: progress until there is nothing, look at our own queues,
// arm (BUSY means: turn again), then sleep. Arming after a single progress call stalls TCP for good (measured, 1.21).
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/bell.h"
#include "common/descriptor.h"
#include "common/outbox.h"
#include "ucx/context.h"
#include "ucx/incoming.h"
#include "ucx/outgoing.h"

namespace pdlink::ucx {

struct Registered {
    std::uint32_t index;
    std::string rkey;
};

// Our part of an invitation.
struct Opening {
    std::string address;
    GateName gate;
};

// Made, used and destroyed in one thread.
class Progress {
  public:
    // bell: readable when there are commands.
    Progress(const Library& library, const Choice& choice, Outbox& outbox, const Bell& bell);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    Registered add_region(std::uintptr_t base, std::uint64_t nbytes, std::uintptr_t cuda_context);
    Opening invite(const std::string& name);
    void connect(const std::string& name, const Remote& remote, std::shared_ptr<Face> face);
    void submit(const std::string& name, std::unique_ptr<Batch> batch);
    void close_peer(const std::string& name);

    // True if it should be called again before sleeping.
    bool turn();
    void sleep();
    // Ends every peer by force, waiting for stopped writers no longer than until then.
    void close(Clock::time_point until);

  private:
    struct Peer;
    struct Watch {
        enum class Kind { COMMANDS, WRITING, INCOMING, PROCESS } kind = Kind::COMMANDS;
        Peer* peer = nullptr;
        int fd = -1;
    };
    struct Peer {
        explicit Peer(std::string peer_name) : name(std::move(peer_name)) {}
        const std::string name;
        std::unique_ptr<Incoming> incoming;
        std::unique_ptr<Outgoing> outgoing;
        Watch incoming_watch{};
        Watch process_watch{};
        bool incoming_awake = false;  // its worker is not armed
        bool closing = false;
    };

    void watch(Watch& watch, Watch::Kind kind, Peer* peer, int fd);
    void unwatch(Watch& watch);
    Peer& peer_named(const std::string& name);
    bool progress_worker(ucp_worker_h worker);
    void pause_if_fruitless();
    bool arm(ucp_worker_h worker);
    void begin_closing(Peer& peer, bool by_force);
    void finish_closing(Clock::time_point now);
    int sleep_ms(Clock::time_point now) const;

    Outbox& outbox_;
    std::unique_ptr<Context> context_;
    ucp_worker_h writing_ = nullptr;
    const Bell& bell_;
    Descriptor epoll_;
    Watch commands_watch_{};
    Watch writing_watch_{};
    std::unordered_map<std::string, std::unique_ptr<Peer>> peers_;
    std::vector<std::unique_ptr<Outgoing>> leaving_;  // of peers that are gone; UCX may still refer to them
    bool worked_ = false;                             // something was done since the last sleep
    int fruitless_wakeups_ = 0;                       // in a row
    Clock::time_point next_gate_check_ = Clock::time_point::max();
    std::chrono::milliseconds gate_pause_{1};
};

}  // namespace pdlink::ucx
