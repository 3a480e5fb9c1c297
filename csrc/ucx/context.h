// A UCX context with the memory that was registered with it.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "ucx/library.h"

namespace pdlink::ucx {

// Throws std::runtime_error "what: UCX's own words" unless status is UCS_OK.
void check(const Library& ucx, ucs_status_t status, const char* what);

// Parameters of a request that calls `done` with `with`.
ucp_request_param_t calling(ucp_send_nbx_callback_t done, void* with);

struct Region {
    std::uintptr_t base;
    std::uint64_t nbytes;
    ucp_mem_h memh;
    std::string rkey;  // what a peer unpacks to write here
};

// What UCX may use.
struct Choice {
    std::string tls;      // "auto" leaves it to UCX, "tcp" and "shm" are ours, anything else is a UCX_TLS list
    std::string devices;  // a UCX_NET_DEVICES list; empty leaves it to UCX, which listens on every interface it finds
};

// Regions and workers may be made by any thread; a worker is used by one at a time.
class Context {
  public:
    Context(Library library, const Choice& choice);
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    const Library& ucx() const { return library_; }

    // cuda_context: of device memory; 0 for host memory. The region stays where it is.
    const Region& add_region(std::uintptr_t base, std::uint64_t nbytes, std::uintptr_t cuda_context = 0);

    ucp_worker_h make_worker() const;
    // The descriptor that becomes readable when an armed worker has something to do.
    int worker_fd(ucp_worker_h worker) const;

    // An endpoint that reports the failure of its peer.
    ucp_ep_h make_endpoint(ucp_worker_h worker, const std::string& address, ucp_err_handler_cb_t on_error,
                           void* with) const;
    // End it by force. True if that is done; otherwise `done` will be called.
    bool end(ucp_ep_h ep, ucp_send_nbx_callback_t done, void* with) const;

  private:
    const Library library_;
    ucp_context_h handle_ = nullptr;
    std::mutex mutex_;
    std::deque<Region> regions_;  // guarded by it
};

}  // namespace pdlink::ucx
