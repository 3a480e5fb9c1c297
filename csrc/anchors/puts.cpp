#include "anchors/puts.h"

#include <poll.h>

#include <stdexcept>

#include "common/native.h"

namespace pdlink::anchors {
namespace {

// Any window from 4 to 2048 was equally fast over tcp (UCX 1.21, 32 KiB runs); cma completes each put at once.
constexpr std::uint64_t kWindow = 256;
constexpr int kNap_ms = 50;
constexpr double kCloseLimit_s = 2;

}  // namespace

PutSide::PutSide(const std::string& library, const std::string& tls, std::uintptr_t base, std::uint64_t nbytes)
    : context_(ucx::Library::load(library, false), {tls, ""}),
      region_(context_.add_region(base, nbytes)),
      ucx_(context_.ucx()),
      worker_(context_.make_worker()) {}

PutSide::~PutSide() { ucx_.ucp_worker_destroy(worker_); }

PutTarget::PutTarget(const std::string& library, const std::string& tls, std::uintptr_t base, std::uint64_t nbytes)
    : PutSide(library, tls, base, nbytes), fd_(context_.worker_fd(worker_)) {
    ucp_address_t* address = nullptr;
    std::size_t size = 0;
    ucx::check(ucx_, ucx_.ucp_worker_get_address(worker_, &address, &size), "ucp_worker_get_address");
    address_.assign(reinterpret_cast<const char*>(address), size);
    ucx_.ucp_worker_release_address(worker_, address);
    thread_ = std::thread(&PutTarget::progress, this);
}

PutTarget::~PutTarget() {
    stopping_ = true;
    thread_.join();
}

void PutTarget::progress() {
    while (!stopping_) {
        while (ucx_.ucp_worker_progress(worker_)) continue;
        if (ucx_.ucp_worker_arm(worker_) != UCS_OK) continue;
        pollfd wanted{fd_, POLLIN, 0};
        ::poll(&wanted, 1, kNap_ms);
    }
}

PutSource::PutSource(const std::string& library, const std::string& tls, std::uintptr_t base, std::uint64_t nbytes,
                     const std::string& address, const std::string& rkey, std::uintptr_t remote_base)
    : PutSide(library, tls, base, nbytes), base_(base), remote_base_(remote_base), nbytes_(nbytes) {
    ep_ = context_.make_endpoint(worker_, address, &PutSource::on_error, this);
    ucx::check(ucx_, ucx_.ucp_ep_rkey_unpack(ep_, rkey.data(), &rkey_), "ucp_ep_rkey_unpack");
}

PutSource::~PutSource() {
    if (rkey_) ucx_.ucp_rkey_destroy(rkey_);
    if (!context_.end(ep_, &PutSource::on_put, this)) ++under_way_;
    const double deadline_s = now_s() + kCloseLimit_s;
    while (under_way_ > 0 && now_s() < deadline_s) ucx_.ucp_worker_progress(worker_);
}

std::uint32_t PutSource::declare(const std::vector<Run>& runs) {
    for (const Run& run : runs)
        if (run.src > nbytes_ || run.nbytes > nbytes_ - run.src)
            throw std::invalid_argument("a run lies outside of the buffer");
    batches_.push_back(runs);
    return static_cast<std::uint32_t>(batches_.size() - 1);
}

void PutSource::push(std::uint32_t batch, double timeout_s) {
    const double deadline_s = now_s() + timeout_s;
    const ucp_request_param_t param = ucx::calling(&PutSource::on_put, this);
    ucp_request_param_t put = param;
    put.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    put.memh = region_.memh;
    for (const Run& each : batches_.at(batch)) {
        if (under_way_ >= kWindow) wait_below(kWindow, deadline_s);
        started(ucx_.ucp_put_nbx(ep_, reinterpret_cast<const void*>(base_ + each.src), each.nbytes,
                                 remote_base_ + each.dst, rkey_, &put));
    }
    started(ucx_.ucp_ep_flush_nbx(ep_, &param));
    wait_below(1, deadline_s);
}

void PutSource::started(ucs_status_ptr_t request) {
    if (UCS_PTR_IS_PTR(request))
        ++under_way_;
    else
        ucx::check(ucx_, UCS_PTR_RAW_STATUS(request), "ucp_put_nbx");
}

void PutSource::wait_below(std::uint64_t limit, double deadline_s) {
    for (unsigned turn = 1; under_way_ >= limit; ++turn) {
        ucx_.ucp_worker_progress(worker_);
        ucx::check(ucx_, problem_, "ucp_put");
        if (turn % 1024 == 0 && now_s() > deadline_s) throw std::runtime_error("puts missed their deadline");
    }
}

void PutSource::on_put(void* request, ucs_status_t status, void* self) {
    auto* source = static_cast<PutSource*>(self);
    source->ucx_.ucp_request_free(request);
    --source->under_way_;
    if (status != UCS_OK) source->problem_ = status;
}

void PutSource::on_error(void* self, ucp_ep_h, ucs_status_t status) {
    static_cast<PutSource*>(self)->problem_ = status;
}

}  // namespace pdlink::anchors
