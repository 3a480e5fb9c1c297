#include "ucx/packing.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "native.h"
#include "ucx/outgoing.h"

namespace pdlink::ucx {

Packing::Packing(Context& context, Outgoing& owner, ucp_ep_h ep, ucp_rkey_h rkey, std::uint64_t ring,
                 std::vector<std::uint64_t> bases)
    : context_(context),
      ucx_(context.ucx()),
      owner_(owner),
      ep_(ep),
      rkey_(rkey),
      ring_(ring),
      bases_(std::move(bases)) {
    if (::getrandom(&writer_, sizeof writer_, 0) != sizeof writer_)
        throw std::system_error(errno, std::generic_category(), "getrandom");
    for (Slot& slot : slots_) slot.packing = this;
}

std::byte* Packing::memory_of(const Slot& slot) const { return memory_->slot(index_of(slot)); }

bool Packing::add(Batch& batch, const Put& put) {
    const std::uint64_t list_nbytes = open_ ? (open_->runs.size() + 1) * sizeof(PackedRun) : 0;
    if (open_ && (open_->nbytes + put.nbytes + list_nbytes > kSlotNbytes || open_->runs.size() == kMaxPackedRuns) &&
        !finish())
        return false;
    if (!open_) {
        try {
            if (!memory_) memory_ = std::make_unique<SlotMemory>(context_);
        } catch (const std::runtime_error& error) {
            owner_.lose(std::string("no memory to pack short runs in: ") + error.what());
            return false;
        }
        for (Slot& slot : slots_)
            if (!open_ && slot.state == Slot::State::FREE) open_ = &slot;
        if (!open_) return false;
        open_->state = Slot::State::OPEN;
        open_->batch = &batch;
        open_->number = next_number_++;
        open_->nbytes = 0;
        open_->runs.clear();
    }
    {
        const TouchesPages pages;
        std::memcpy(memory_of(*open_) + open_->nbytes, reinterpret_cast<const void*>(put.src), put.nbytes);
    }
    append_run(open_->runs, put.dst_region, put.dst - bases_[put.dst_region], put.nbytes);
    open_->nbytes += put.nbytes;
    return true;
}

bool Packing::finish() {
    if (!open_) return true;
    if (alone()) return false;
    if (way_back_ == WayBack::NONE) way_back_ = WayBack::OPENING;
    send(*std::exchange(open_, nullptr));
    return true;
}

bool Packing::open(ucs_status_ptr_t request, Batch& batch, const char* what) {
    if (UCS_PTR_IS_PTR(request)) {
        ++batch.requests;
        return true;
    }
    if (UCS_PTR_IS_ERR(request))
        owner_.lose(std::string(what) + " failed: " + ucx_.ucs_status_string(UCS_PTR_STATUS(request)));
    return false;
}

void Packing::send(Slot& slot) {
    const std::size_t list_nbytes = slot.runs.size() * sizeof(PackedRun);
    std::memcpy(memory_of(slot) + slot.nbytes, slot.runs.data(), list_nbytes);
    slot.state = Slot::State::PUTTING;
    ++slot.batch->slots_under_way;

    ucp_request_param_t param;
    std::memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
    param.cb.send = &Packing::on_put;
    param.user_data = &slot;
    param.memh = memory_->memh();
    const ucs_status_ptr_t put = ucx_.ucp_put_nbx(ep_, memory_of(slot), slot.nbytes + list_nbytes,
                                                  ring_ + index_of(slot) * kSlotNbytes, rkey_, &param);
    if (open(put, *slot.batch, "put of a slot")) ++puts_under_way_;

    std::memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = &Packing::on_landed;
    param.user_data = &slot;
    const ucs_status_ptr_t flush = ucx_.ucp_ep_flush_nbx(ep_, &param);
    if (!open(flush, *slot.batch, "flush of a slot")) landed(slot, UCS_PTR_RAW_STATUS(flush));
}

// The slot is in the owner's memory: tell it. Not if the peer is being left: what is not announced is never unpacked.
void Packing::landed(Slot& slot, ucs_status_t status) {
    if (status != UCS_OK) owner_.lose(std::string("flush of a slot failed: ") + ucx_.ucs_status_string(status));
    if (!owner_.ready()) return give_up(slot);
    slot.state = Slot::State::NOTED;
    const Note note{kNoteMagic, index_of(slot), slot.runs.size(), slot.nbytes, writer_, slot.number};
    ucp_request_param_t param;
    std::memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
    param.cb.send = &Packing::on_noted;
    param.user_data = slot.batch;
    open(ucx_.ucp_am_send_nbx(ep_, kNoteId, &note, sizeof note, nullptr, 0, &param), *slot.batch, "note");
}

void Packing::give_up(Slot& slot) {
    --slot.batch->slots_under_way;
    slot.state = Slot::State::FREE;
}

void Packing::answered(const Answer& answer) {
    for (Slot& slot : slots_) {
        if (slot.state != Slot::State::NOTED || slot.number != answer.number) continue;
        way_back_ = WayBack::OPEN;
        if (answer.placed == 1) return give_up(slot);
        return owner_.lose("the peer refused packed runs");
    }
    owner_.lose("the peer answers what was not asked");
}

void Packing::on_put(void* request, ucs_status_t status, void* slot) {
    auto* there = static_cast<Slot*>(slot);
    --there->packing->puts_under_way_;
    on_noted(request, status, there->batch);
}

void Packing::on_noted(void* request, ucs_status_t status, void* batch) {
    auto* sent = static_cast<Batch*>(batch);
    sent->owner->ucx().ucp_request_free(request);
    --sent->requests;
    if (status != UCS_OK)
        sent->owner->lose(std::string("sending a slot failed: ") + sent->owner->ucx().ucs_status_string(status));
}

void Packing::on_landed(void* request, ucs_status_t status, void* slot) {
    auto* there = static_cast<Slot*>(slot);
    there->packing->ucx_.ucp_request_free(request);
    --there->batch->requests;
    there->packing->landed(*there, status);
}

}  // namespace pdlink::ucx
