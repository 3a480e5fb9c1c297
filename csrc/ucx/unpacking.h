// The owner's ring of slots for one invited peer, and what becomes of the notes about them. See ucx/staging.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "packed.h"
#include "runs.h"
#include "ucx/staging.h"

namespace pdlink::ucx {

// Works inside the progress of the worker it was given.
class Unpacking {
  public:
    Unpacking(Context& context, ucp_worker_h worker);
    Unpacking(const Unpacking&) = delete;
    Unpacking& operator=(const Unpacking&) = delete;

    const SlotMemory& ring() const { return *memory_; }
    // Why the peer must be failed, "" while all is well. Nothing is unpacked after it has said something.
    const std::string& problem() const { return problem_; }
    // Never give the slots back: a writer that cannot be shut out may still store into them.
    void leave_behind() { (void)memory_.release(); }

  private:
    bool place(const Note& note);
    void answer(const Note& note, bool placed, ucp_ep_h to);
    static ucs_status_t on_note(void* self, const void* header, std::size_t header_nbytes, void* data,
                                std::size_t nbytes, const ucp_am_recv_param_t* param);

    const Library& ucx_;
    std::unique_ptr<SlotMemory> memory_;
    std::vector<Extent> regions_;  // what the peer was invited to
    std::vector<PackedRun> runs_;  // of the note at hand; the peer can change what is in the slot at any time
    std::string problem_;
};

}  // namespace pdlink::ucx
