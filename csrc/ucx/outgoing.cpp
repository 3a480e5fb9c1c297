#include "ucx/outgoing.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>
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

Outgoing::Outgoing(Context& context, ucp_worker_h worker, const std::vector<ucp_mem_h>& memory, std::string peer,
                   Outbox& outbox, Remote remote)
    : context_(context),
      ucx_(context.ucx()),
      worker_(worker),
      memory_(memory),
      peer_(std::move(peer)),
      outbox_(outbox),
      remote_(std::move(remote)) {
    for (Op& op : ops_) free_ops_.push_back(&op);
    watch();
    if (!remote_.gate) return;
    gate_ = open_gate(remote_.pid, *remote_.gate);
    gate_->take();
}

void Outgoing::watch() {
    if (!remote_.pid) return;
    pidfd_ = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, remote_.pid, 0)));
    const int problem = pidfd_.get() < 0 ? errno : 0;
    if (problem == ENOSYS || problem == EPERM) return;  // an old kernel or a strict sandbox: other signs must do
    const std::uint64_t born = problem ? 0 : process_born(remote_.pid);
    if (problem || (born != remote_.born && born != kBornUnknown && remote_.born != kBornUnknown))
        throw std::runtime_error("the inviting process " + std::to_string(remote_.pid) + " has ended");
}

void Outgoing::open() {
    link_ = Link::CONNECTING;
    const std::string address = padded(remote_.address);
    ep_ = context_.make_endpoint(worker_, address, &Outgoing::on_error, this);
    for (const Remote::Region& region : remote_.regions) {
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
    lane_ = lanes.front();
    // Sockets are fenced by the owner's worker. Waiting at the gate for a stopped writer would only delay the owner.
    if (std::ranges::all_of(lanes, [](const std::string& lane) { return lane == "tcp"; })) gate_.reset();
    link_ = Link::READY;
}

void Outgoing::take(std::list<Batch>& batches) {
    for (Batch& batch : batches) batch.owner = this;
    waiting_.splice(waiting_.end(), batches);
}

bool Outgoing::step() {
    const Link before = link_;
    if (link_ == Link::ASKED) {
        try {
            open();
        } catch (const std::exception& error) {
            lose(std::string("cannot connect: ") + error.what());
        }
    }
    if (link_ == Link::CONNECTING && connected_ && !broken_) connected();
    const bool posted = link_ == Link::READY && problem_.empty() && pump();
    reap();
    if (link_ == Link::DRAINING && (posted_.empty() || broken_)) end();
    if (link_ == Link::ENDING && closed_ && ops_under_way_ == 0) {
        for (const ucp_rkey_h rkey : rkeys_) ucx_.ucp_rkey_destroy(rkey);
        rkeys_.clear();
        link_ = Link::ENDED;
        reap();
    }
    return posted || link_ != before;
}

// True if anything was posted.
bool Outgoing::pump() {
    int posted = 0;
    std::uint64_t nbytes = 0;
    while (!waiting_.empty()) {
        Batch& batch = waiting_.front();
        if (!enter_gate(batch)) return true;
        while (batch.next < batch.runs.size()) {
            if (free_ops_.empty() || nbytes_under_way_ >= kWindowNbytes) return posted > 0;
            if (posted >= kOpsPerStep || nbytes >= kNbytesPerStep || broken_) return true;
            nbytes += batch.runs[batch.next].nbytes;
            post_put(batch);
            ++posted;
        }
        if (broken_) return true;
        post_flush(batch);
        wholly_posted();
        ++posted;
    }
    return posted > 0;
}

// False if the owner has shut its gate; the peer has to be failed then.
bool Outgoing::enter_gate(Batch& batch) {
    if (!gate_) return true;
    const bool open = batch.inside_gate ? !gate_->shut() : gate_->enter();
    if (open)
        batch.inside_gate = true;
    else
        problem_ = "the peer has closed its memory to us";
    return open;
}

void Outgoing::wholly_posted() { posted_.splice(posted_.end(), waiting_, waiting_.begin()); }

void Outgoing::post_put(Batch& batch) {
    const Run& run = batch.runs[batch.next++];
    Op* op = free_ops_.back();
    free_ops_.pop_back();
    *op = {&batch, run.nbytes};
    ++ops_under_way_;
    ++batch.puts_under_way;
    nbytes_under_way_ += run.nbytes;

    ucp_request_param_t param = calling(&Outgoing::on_put, op);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = memory_[run.src_region];
    const ucs_status_ptr_t request = ucx_.ucp_put_nbx(ep_, reinterpret_cast<const void*>(run.src), run.nbytes,
                                                      run.dst, rkeys_[run.dst_region], &param);
    if (!UCS_PTR_IS_PTR(request)) completed(op, UCS_PTR_RAW_STATUS(request));
}

void Outgoing::post_flush(Batch& batch) {
    const ucp_request_param_t param = calling(&Outgoing::on_flush, &batch);
    const ucs_status_ptr_t request = ucx_.ucp_ep_flush_nbx(ep_, &param);
    batch.flushing = UCS_PTR_IS_PTR(request);
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
        for (Batch& batch : posted_)
            if (std::exchange(batch.inside_gate, false)) gate_->leave();
    while (!posted_.empty()) {
        Batch& batch = posted_.front();
        if (batch.puts_under_way > 0 || batch.flushing) return;
        if (!batch.reported) {
            if (broken_) return;  // it is reported when the peer is failed
            outbox_.put(done(peer_, batch));
        }
        if (batch.inside_gate) gate_->leave();
        posted_.pop_front();
    }
}

void Outgoing::report_open(Outcome outcome, const std::string& detail) {
    for (std::list<Batch>* batches : {&posted_, &waiting_})
        for (Batch& batch : *batches)
            if (!std::exchange(batch.reported, true)) outbox_.put(pdlink::ended(peer_, batch, outcome, detail));
}

double Outgoing::earliest() const {
    double earliest_s = kForever;
    for (const std::list<Batch>* batches : {&posted_, &waiting_})
        for (const Batch& batch : *batches)
            if (!batch.reported) earliest_s = std::min(earliest_s, batch.deadline_s);
    return earliest_s;
}

void Outgoing::lose(const std::string& reason) {
    if (!std::exchange(broken_, true) && problem_.empty()) problem_ = reason;
}

bool Outgoing::leave(bool by_force) {
    const Link before = link_;
    if (link_ == Link::ASKED) link_ = Link::ENDED;
    if (link_ == Link::READY && !by_force && !broken_) {
        link_ = Link::DRAINING;
        if (!waiting_.empty() && waiting_.front().next > 0) post_flush(waiting_.front());  // what is posted may land
        keep_begun();
    } else if (link_ == Link::CONNECTING || link_ == Link::READY || (link_ == Link::DRAINING && by_force)) {
        end();
    }
    waiting_.clear();
    return link_ != before;
}

// The first batch that waits is part of what is under way, if anything of it was posted or it is inside the gate.
void Outgoing::keep_begun() {
    if (!waiting_.empty() && (waiting_.front().next > 0 || waiting_.front().inside_gate)) wholly_posted();
}

void Outgoing::end() {
    keep_begun();
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
    flushed->flushing = false;
    if (status != UCS_OK) outgoing->lose(std::string("flush failed: ") + outgoing->ucx_.ucs_status_string(status));
}

void Outgoing::on_closed(void* request, ucs_status_t, void* self) {
    auto* outgoing = static_cast<Outgoing*>(self);
    outgoing->ucx_.ucp_request_free(request);
    outgoing->closed_ = true;
}

}  // namespace pdlink::ucx
