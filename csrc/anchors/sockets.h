// A bare pair of sockets: what TCP can do for scattered runs if nothing is checked, queued or shared.
//
// Two blocking threads on one connection over loopback. The writer gathers up to 64 runs into each sendmsg, the
// reader scatters into as many with each recvmsg. Where the runs of a batch go is told once, before it is measured; a
// push is then eight bytes that name the batch, the payload, and one byte back when it lies in place. For two
// processes of one benchmark on one host, not for anybody else.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "common/descriptor.h"
#include "common/runs.h"
#include "tcp/sockets.h"

namespace pdlink::anchors {

class SocketReader {
  public:
    // Listens on 127.0.0.1 and serves the first connection. Offsets of runs are from base.
    SocketReader(std::uintptr_t base, std::uint64_t nbytes, std::string congestion);
    ~SocketReader();
    SocketReader(const SocketReader&) = delete;
    SocketReader& operator=(const SocketReader&) = delete;
    std::uint16_t port() const { return port_; }

  private:
    void serve();
    void serve_connection(int fd);
    bool learn(int fd, std::uint64_t num_runs);

    const std::uintptr_t base_;
    const std::uint64_t nbytes_;
    const std::string congestion_;
    Descriptor listener_;
    std::uint16_t port_ = 0;
    std::atomic<int> connection_{-1};
    std::atomic<bool> stopping_{false};
    std::vector<std::vector<iovec>> batches_;
    std::thread thread_;
};

class SocketWriter {
  public:
    SocketWriter(std::uintptr_t base, std::uint64_t nbytes, std::uint16_t port, const std::string& congestion);

    // Tell the reader where these runs go; returns the number of the batch.
    std::uint32_t declare(const std::vector<Run>& runs);
    // Send a batch and wait until it lies in the reader's memory. Throws std::system_error.
    void push(std::uint32_t batch, double timeout_s);
    std::string congestion() const { return tcp::congestion_of(socket_.get()); }

  private:
    const std::uintptr_t base_;
    const std::uint64_t nbytes_;
    Descriptor socket_;
    std::vector<std::vector<iovec>> batches_;
};

}  // namespace pdlink::anchors
