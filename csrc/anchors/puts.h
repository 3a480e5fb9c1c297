// A bare loop over ucp_put: what UCX can do for scattered runs if nothing is checked, queued or shared.
//
// Same library, same context and same error mode as pdlink's ucx transport; one endpoint, one thread that posts and
// polls without ever sleeping, one flush at the end. For two processes of one benchmark on one host.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "common/runs.h"
#include "ucx/context.h"

namespace pdlink::anchors {

// A worker and its context.
class PutSide {
  public:
    PutSide(const std::string& library, const std::string& tls, std::uintptr_t base, std::uint64_t nbytes);
    ~PutSide();
    PutSide(const PutSide&) = delete;
    PutSide& operator=(const PutSide&) = delete;

  protected:
    ucx::Context context_;
    const ucx::Region& region_;
    const ucx::Library& ucx_;
    ucp_worker_h worker_;
};

class PutTarget : public PutSide {
  public:
    PutTarget(const std::string& library, const std::string& tls, std::uintptr_t base, std::uint64_t nbytes);
    ~PutTarget();
    const std::string& address() const { return address_; }
    const std::string& rkey() const { return region_.rkey; }

  private:
    void progress();

    std::string address_;
    int fd_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

class PutSource : public PutSide {
  public:
    PutSource(const std::string& library, const std::string& tls, std::uintptr_t base, std::uint64_t nbytes,
              const std::string& address, const std::string& rkey, std::uintptr_t remote_base);
    ~PutSource();

    std::uint32_t declare(const std::vector<Run>& runs);
    // Put every run and flush. Throws std::runtime_error.
    void push(std::uint32_t batch, double timeout_s);

  private:
    static void on_put(void* request, ucs_status_t status, void* self);
    static void on_error(void* self, ucp_ep_h, ucs_status_t status);
    void wait_below(std::uint64_t limit, double deadline_s);
    void started(ucs_status_ptr_t request);

    const std::uintptr_t base_, remote_base_;
    const std::uint64_t nbytes_;
    ucp_ep_h ep_ = nullptr;
    ucp_rkey_h rkey_ = nullptr;
    std::uint64_t under_way_ = 0;
    ucs_status_t problem_ = UCS_OK;
    std::vector<std::vector<Run>> batches_;
};

}  // namespace pdlink::anchors
