#include "ucx/outgoing.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "common/peers.h"

namespace pdlink::ucx {
namespace {

// UCX reads keys and addresses up to where they say they end, not to where they end. What came over the network is
// therefore followed by zeros, so that a damaged one is refused and not read past.
std::string padded(const std::string& bytes) { return bytes + std::string(4096, '\0'); }

// The transports of an endpoint's lanes that puts may take, first the one that long puts do take. The text of
// ucp_ep_print_info is the only place where UCX says so (ucp_ep_query lists the lanes for messages too):
//   lane[1]:  2:cma/memory.0 md[1] -> md[1]/cma/sysdev[255] seg 4294967295 rma_bw#0
std::vector<std::string> put_lanes(const Library& ucx, ucp_ep_h ep) {
    char* text = nullptr;
    std::size_t nbytes = 0;
    std::FILE* stream = ::open_memstream(&text, &nbytes);
    if (!stream) return {};
    ucx.ucp_ep_print_info(ep, stream);
    std::fclose(stream);
    const std::string info(text, nbytes);
    std::free(text);

    std::vector<std::string> lanes;
    std::istringstream lines(info);
    for (std::string line; std::getline(lines, line);) {
        const std::size_t lane = line.find("lane[");
        if (lane == std::string::npos || line.find(" rma") == std::string::npos) continue;
        const std::size_t colon = line.find("]:", lane);
        const std::size_t name = colon == std::string::npos ? colon : line.find(':', colon + 2);
        const std::size_t slash = name == std::string::npos ? name : line.find('/', name);
        if (slash == std::string::npos) continue;
        const std::string transport = line.substr(name + 1, slash - name - 1);
        if (line.find(" rma_bw#0") != std::string::npos)
            lanes.insert(lanes.begin(), transport);
        else
            lanes.push_back(transport);
    }
    return lanes;
}

}  // namespace

Outgoing::Outgoing(Context& context, ucp_worker_h worker, std::string peer, Outbox& outbox,
                   std::shared_ptr<Face> face)
    : context_(context),
      ucx_(context.ucx()),
      worker_(worker),
      peer_(std::move(peer)),
      outbox_(outbox),
      face_(std::move(face)) {
    for (Op& op : ops_) free_ops_.push_back(&op);
}

Outgoing::~Outgoing() {
    if (pidfd_ >= 0) ::close(pidfd_);
}

void Outgoing::open(const Remote& remote) {
    watch(remote);
    connect(remote);
    open_gate(remote);  // last: a gate is taken once, and trying again must be possible if UCX refuses
    link_deadline_ = next_check_ = Clock::now() + kConnectLimit;
}

void Outgoing::watch(const Remote& remote) {
    if (!remote.pid) return;
    pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, remote.pid, 0));
    const int problem = pidfd_ < 0 ? errno : 0;
    if (problem == ENOSYS || problem == EPERM) return;  // an old kernel or a strict sandbox: other signs must do
    const std::uint64_t born = problem ? 0 : process_born(remote.pid);
    if (problem || (born != remote.born && born != kBornUnknown && remote.born != kBornUnknown))
        throw std::runtime_error("the inviting process " + std::to_string(remote.pid) + " has ended");
}

void Outgoing::open_gate(const Remote& remote) {
    if (!remote.gate) return;
    gate_ = pdlink::open_gate(remote.pid, *remote.gate);
    gate_->take();
}

void Outgoing::connect(const Remote& remote) {
    const std::string address = padded(remote.address);
    ep_ = context_.make_endpoint(worker_, address, &Outgoing::on_error, this);
    for (const Remote::Region& region : remote.regions) {
        const std::string key = padded(region.rkey);
        ucp_rkey_h rkey = nullptr;
        check(ucx_, ucx_.ucp_ep_rkey_unpack(ep_, key.data(), &rkey), "ucp_ep_rkey_unpack");
        rkeys_.push_back(rkey);
    }
    // The first flush goes there and back: when it is done the lanes are chosen and connected.
    const ucp_request_param_t param = calling(&Outgoing::on_connected, this);
    const ucs_status_ptr_t request = ucx_.ucp_ep_flush_nbx(ep_, &param);
    if (UCS_PTR_IS_ERR(request)) check(ucx_, UCS_PTR_STATUS(request), "ucp_ep_flush_nbx");
    connecting_ = UCS_PTR_IS_PTR(request);
    connected_ = !connecting_;
}

void Outgoing::connected() {
    const std::vector<std::string> lanes = put_lanes(ucx_, ep_);
    if (lanes.empty()) return lose("UCX has no one-sided lane to this peer");
    face_->set_lane(lanes.front());
    // Sockets are fenced by the owner's worker. Waiting at the gate for a stopped writer would only delay the owner.
    bool sockets_only = true;
    for (const std::string& lane : lanes) sockets_only = sockets_only && lane == "tcp";
    if (sockets_only) gate_.reset();
    link_ = Link::READY;
}

void Outgoing::submit(std::unique_ptr<Batch> batch) {
    batch->owner = this;
    next_check_ = std::min(next_check_, batch->deadline);
    batches_.push_back(std::move(batch));
    if (failed_) return report_open(Outcome::kPeerFailed, face_->failure());
    if (closing_) report_open(Outcome::kCancelled, "");
}

bool Outgoing::step() {
    const Link before = link_;
    if (!broken_.empty() && link_ < Link::ENDING) {
        if (!closing_) fail(broken_, nullptr);
        end();
    }
    if (link_ == Link::CONNECTING && connected_) connected();
    const bool posted = link_ == Link::READY && pump();
    reap();
    if (link_ == Link::DRAINING && batches_.empty()) end();
    if (link_ == Link::ENDING && closed_ && ops_under_way_ == 0) {
        for (const ucp_rkey_h rkey : rkeys_) ucx_.ucp_rkey_destroy(rkey);
        rkeys_.clear();
        link_ = Link::ENDED;
        reap();
    }
    return posted || link_ != before || (!broken_.empty() && link_ < Link::ENDING);
}

// True if anything was posted.
bool Outgoing::pump() {
    int posted = 0;
    std::uint64_t nbytes = 0;
    for (; posting_ < batches_.size(); ++posting_) {
        Batch& batch = *batches_[posting_];
        if (!enter_gate(batch)) return true;
        while (batch.next < batch.puts.size()) {
            if (free_ops_.empty() || nbytes_under_way_ >= kWindowNbytes) return posted > 0;
            if (posted >= kOpsPerStep || nbytes >= kNbytesPerStep || !broken_.empty()) return true;
            nbytes += batch.puts[batch.next].nbytes;
            post_put(batch);
            ++posted;
        }
        if (!broken_.empty()) return true;
        post_flush(batch);
        ++posted;
    }
    return posted > 0;
}

// False if the owner has shut its gate; the peer is failed then.
bool Outgoing::enter_gate(Batch& batch) {
    if (!gate_) return true;
    const bool open = batch.inside_gate ? !gate_->shut() : gate_->enter();
    if (open) {
        batch.inside_gate = true;
        return true;
    }
    fail("the peer has closed its memory to us", nullptr);
    drain();
    return false;
}

void Outgoing::post_put(Batch& batch) {
    const Put& put = batch.puts[batch.next++];
    Op* op = free_ops_.back();
    free_ops_.pop_back();
    *op = {&batch, put.nbytes};
    ++ops_under_way_;
    ++batch.puts_under_way;
    nbytes_under_way_ += put.nbytes;

    ucp_request_param_t param = calling(&Outgoing::on_put, op);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = context_.regions()[put.src_region].memh;
    const ucs_status_ptr_t request = ucx_.ucp_put_nbx(ep_, reinterpret_cast<const void*>(put.src), put.nbytes,
                                                      put.dst, rkeys_[put.dst_region], &param);
    if (!UCS_PTR_IS_PTR(request)) completed(op, UCS_PTR_RAW_STATUS(request));
}

void Outgoing::post_flush(Batch& batch) {
    batch.flush = Batch::Flush::POSTED;
    const ucp_request_param_t param = calling(&Outgoing::on_flush, &batch);
    const ucs_status_ptr_t request = ucx_.ucp_ep_flush_nbx(ep_, &param);
    if (UCS_PTR_IS_PTR(request)) return;
    batch.flush = Batch::Flush::DONE;
    if (UCS_PTR_IS_ERR(request))
        lose(std::string("flush failed: ") + ucx_.ucs_status_string(UCS_PTR_STATUS(request)));
}

void Outgoing::completed(Op* op, ucs_status_t status) {
    --op->batch->puts_under_way;
    --ops_under_way_;
    nbytes_under_way_ -= op->nbytes;
    free_ops_.push_back(op);
    if (status != UCS_OK) lose(std::string("put failed: ") + ucx_.ucs_status_string(status));
}

// Reports what has landed and lets go of what UCX no longer refers to.
void Outgoing::reap() {
    if (link_ == Link::ENDED)  // a flush that never comes back writes nothing
        for (const std::unique_ptr<Batch>& batch : batches_)
            if (std::exchange(batch->inside_gate, false)) gate_->leave();
    while (!batches_.empty()) {
        Batch& batch = *batches_.front();
        if (batch.puts_under_way > 0 || batch.flush == Batch::Flush::POSTED) return;
        const bool may_land_unseen = batch.next > 0 && link_ < Link::ENDING;
        if (batch.flush == Batch::Flush::NONE && (!batch.reported || may_land_unseen)) return;
        if (!batch.reported) {
            if (!broken_.empty()) return;  // step() fails the peer
            report(batch, Outcome::kOk, "");
        }
        if (batch.inside_gate) gate_->leave();
        batches_.pop_front();
        if (posting_ > 0) --posting_;
    }
}

void Outgoing::report(Batch& batch, Outcome outcome, const std::string& detail) {
    batch.reported = true;
    outbox_.put(done(peer_, batch, outcome, detail));
}

void Outgoing::report_open(Outcome outcome, const std::string& detail) {
    for (const std::unique_ptr<Batch>& batch : batches_)
        if (!batch->reported) report(*batch, outcome, detail);
}

Clock::time_point Outgoing::first_deadline() const {
    if (link_ == Link::DRAINING) return link_deadline_;
    auto first = link_ == Link::CONNECTING ? link_deadline_ : Clock::time_point::max();
    if (!failed_ && !closing_)
        for (const std::unique_ptr<Batch>& batch : batches_) first = std::min(first, batch->deadline);
    return first;
}

void Outgoing::expire(Clock::time_point now) {
    if (now < next_check_) return;
    reap();  // it may just have landed
    next_check_ = first_deadline();
    if (now < next_check_ || !broken_.empty()) return;
    if (link_ == Link::DRAINING) return end();
    const Batch* expired = nullptr;
    for (const std::unique_ptr<Batch>& batch : batches_)
        if (!expired && batch->deadline <= now) expired = batch.get();
    fail(expired ? "batch " + std::to_string(expired->ticket) + " had not landed at its deadline"
                 : "no connection within " + std::to_string(kConnectLimit.count()) + " s",
         expired);
    drain();
}

void Outgoing::lose(const std::string& reason) {
    if (broken_.empty()) broken_ = reason;
}

void Outgoing::fail(const std::string& reason, const Batch* expired) {
    if (failed_) return;
    failed_ = true;
    face_->fail(reason);
    outbox_.put({.kind = Report::Kind::kPeerFailed, .peer = peer_, .detail = reason});
    for (const std::unique_ptr<Batch>& batch : batches_)
        if (!batch->reported)
            report(*batch, batch.get() == expired ? Outcome::kTimeout : Outcome::kPeerFailed, reason);
}

void Outgoing::close(bool by_force) {
    reap();
    closing_ = true;
    report_open(Outcome::kCancelled, "");
    if (by_force)
        end();
    else
        drain();
}

void Outgoing::drain() {
    if (link_ == Link::CONNECTING) return end();
    if (link_ != Link::READY) return;
    link_ = Link::DRAINING;
    link_deadline_ = next_check_ = Clock::now() + kDrainLimit;
    if (posting_ < batches_.size() && batches_[posting_]->next > 0) post_flush(*batches_[posting_]);
}

void Outgoing::end() {
    if (link_ >= Link::ENDING) return;
    link_ = Link::ENDING;
    closed_ = !ep_ || context_.end(ep_, &Outgoing::on_closed, this);
}

void Outgoing::on_error(void* self, ucp_ep_h, ucs_status_t status) {
    auto* outgoing = static_cast<Outgoing*>(self);
    outgoing->lose(std::string("connection failed: ") + outgoing->ucx_.ucs_status_string(status));
}

void Outgoing::on_connected(void* request, ucs_status_t status, void* self) {
    auto* outgoing = static_cast<Outgoing*>(self);
    outgoing->ucx_.ucp_request_free(request);
    outgoing->connecting_ = false;
    if (status == UCS_OK)
        outgoing->connected_ = true;
    else
        outgoing->lose(std::string("cannot connect: ") + outgoing->ucx_.ucs_status_string(status));
}

void Outgoing::on_put(void* request, ucs_status_t status, void* op) {
    Outgoing* outgoing = static_cast<Op*>(op)->batch->owner;
    outgoing->ucx_.ucp_request_free(request);
    outgoing->completed(static_cast<Op*>(op), status);
}

void Outgoing::on_flush(void* request, ucs_status_t status, void* batch) {
    auto* flushed = static_cast<Batch*>(batch);
    Outgoing* outgoing = flushed->owner;
    outgoing->ucx_.ucp_request_free(request);
    flushed->flush = Batch::Flush::DONE;
    if (status != UCS_OK) outgoing->lose(std::string("flush failed: ") + outgoing->ucx_.ucs_status_string(status));
}

void Outgoing::on_closed(void* request, ucs_status_t, void* self) {
    auto* outgoing = static_cast<Outgoing*>(self);
    outgoing->ucx_.ucp_request_free(request);
    outgoing->closed_ = true;
}

}  // namespace pdlink::ucx
