#include "ucx/unpacking.h"

#include <cstring>
#include <span>

#include "copy/stores.h"
#include "native.h"

namespace pdlink::ucx {
namespace {

void on_sent(void* request, ucs_status_t, void* library) {
    // A peer that cannot be answered finds that out by itself.
    static_cast<const Library*>(library)->ucp_request_free(request);
}

}  // namespace

Unpacking::Unpacking(Context& context, ucp_worker_h worker)
    : ucx_(context.ucx()), memory_(std::make_unique<SlotMemory>(context)) {
    for (const Region& region : context.regions()) regions_.push_back({region.base, region.nbytes});
    ucp_am_handler_param_t param;
    std::memset(&param, 0, sizeof param);
    param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    param.id = kNoteId;
    param.cb = &Unpacking::on_note;
    param.arg = this;
    check(ucx_, ucx_.ucp_worker_set_am_recv_handler(worker, &param), "ucp_worker_set_am_recv_handler");
}

bool Unpacking::place(const Note& note) {
    if (note.magic != kNoteMagic || note.slot >= kNumSlots || note.num_runs > kMaxPackedRuns ||
        note.nbytes > kSlotNbytes - note.num_runs * sizeof(PackedRun)) {
        problem_ = "a note about packed runs is malformed";
        return false;
    }
    const std::byte* from = memory_->slot(note.slot);
    runs_.resize(note.num_runs);
    std::memcpy(runs_.data(), from + note.nbytes, note.num_runs * sizeof(PackedRun));
    std::uint64_t nbytes = 0;
    if (!all_inside(std::span<const PackedRun>(runs_), std::span<const Extent>(regions_), nbytes, problem_))
        return false;
    if (nbytes != note.nbytes) {
        problem_ =
            "the packed runs have " + std::to_string(nbytes) + " bytes, the note says " + std::to_string(note.nbytes);
        return false;
    }
    const TouchesPages pages;
    for (const PackedRun& run : runs_) {
        copy_run(reinterpret_cast<std::byte*>(regions_[run.region].base + run.offset), from, run.nbytes);
        from += run.nbytes;
    }
    store_fence();
    return true;
}

void Unpacking::answer(const Note& note, bool placed, ucp_ep_h to) {
    const Answer words{kAnswerMagic, placed, note.writer, note.number};
    ucp_request_param_t param;
    std::memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
    param.cb.send = &on_sent;
    param.user_data = const_cast<Library*>(&ucx_);
    ucx_.ucp_am_send_nbx(to, kAnswerId, &words, sizeof words, nullptr, 0, &param);
}

ucs_status_t Unpacking::on_note(void* self, const void* header, std::size_t header_nbytes, void*, std::size_t nbytes,
                                const ucp_am_recv_param_t* param) {
    auto* unpacking = static_cast<Unpacking*>(self);
    if (!unpacking->problem_.empty()) return UCS_OK;
    if (header_nbytes != sizeof(Note) || nbytes != 0 || !(param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP)) {
        unpacking->problem_ = "a message that is no note about packed runs";
        return UCS_OK;
    }
    Note note;
    std::memcpy(&note, header, sizeof note);
    const bool placed = unpacking->place(note);
    unpacking->answer(note, placed, param->reply_ep);
    return UCS_OK;
}

}  // namespace pdlink::ucx
