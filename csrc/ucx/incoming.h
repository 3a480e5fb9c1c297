// What one invited peer may reach: its own worker, and a gate.
//
// UCX over TCP checks no keys: any connected peer can write, also after a batch was cancelled, while bytes of it are
// in socket buffers (measured: 1021 of 4096 cancelled pages landed later). Destroying the worker closes the sockets,
// so one worker per peer makes `shut()` the fence: 0 of 4096. Against a peer that stores directly into our memory
// (cross-memory attach) the gate is the fence, see gate.h.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "common/gate.h"
#include "ucx/context.h"

namespace pdlink::ucx {

// Made by any thread, used by one.
class Incoming {
  public:
    explicit Incoming(std::shared_ptr<Context> context)
        : context_(std::move(context)), worker_(context_->make_worker()) {
        ucp_address_t* address = nullptr;
        std::size_t nbytes = 0;
        try {
            fd_ = context_->worker_fd(worker_);
            check(context_->ucx(), context_->ucx().ucp_worker_get_address(worker_, &address, &nbytes),
                  "ucp_worker_get_address");
        } catch (...) {
            if (address) context_->ucx().ucp_worker_release_address(worker_, address);
            context_->ucx().ucp_worker_destroy(worker_);
            throw;
        }
        address_.assign(reinterpret_cast<const char*>(address), nbytes);
        context_->ucx().ucp_worker_release_address(worker_, address);
    }
    Incoming(const Incoming&) = delete;
    Incoming& operator=(const Incoming&) = delete;
    ~Incoming() { shut(); }

    const std::string& address() const { return address_; }
    const GateOwner& gate() const { return gate_; }
    int fd() const { return fd_; }
    ucp_worker_h worker() const { return worker_; }  // nullptr once shut

    // No direct store of the peer begins from here on. Any thread.
    void shut_gate() { gate_.shut(); }

    // Nothing new gets in from here on; what travels by sockets or RDMA is cut off now.
    void shut() {
        gate_.shut();
        if (worker_) context_->ucx().ucp_worker_destroy(worker_);
        worker_ = nullptr;
    }

    // Meaningful after shut(): no direct store of the peer is under way any more.
    bool quiet() const { return gate_.quiet(); }

  private:
    const std::shared_ptr<Context> context_;
    GateOwner gate_;
    ucp_worker_h worker_;
    int fd_ = -1;
    std::string address_;
};

}  // namespace pdlink::ucx
