// The writing side's slots: short runs go in, puts and notes come out, answers make them free. See ucx/staging.h.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "packed.h"
#include "runs.h"
#include "ucx/staging.h"

namespace pdlink::ucx {

class Outgoing;
struct Batch;

// Belongs to one Outgoing and its thread.
class Packing {
  public:
    // ring: where the owner's slots begin in its process. bases: of its regions.
    Packing(Context& context, Outgoing& owner, ucp_ep_h ep, ucp_rkey_h rkey, std::uint64_t ring,
            std::vector<std::uint64_t> bases);

    std::uint64_t writer() const { return writer_; }
    // Puts that UCX has.
    std::size_t puts_under_way() const { return puts_under_way_; }

    // The first slot is under way: nothing else may be (see ucx/staging.h).
    bool alone() const { return way_back_ == WayBack::OPENING; }
    // Copy a run into a slot; one that is full is sent. False if that must wait, or the peer was lost: then the run
    // is still to be done.
    bool add(Batch& batch, const Put& put);
    // Send what add() has left; before the next batch. False if that must wait.
    bool finish();
    // The owner has dealt with a slot. Tells the Outgoing if that makes no sense.
    void answered(const Answer& answer);

  private:
    struct Slot {
        enum class State { FREE, OPEN, PUTTING, NOTED } state = State::FREE;
        Packing* packing = nullptr;
        Batch* batch = nullptr;
        std::uint64_t number = 0;
        std::uint64_t nbytes = 0;
        std::vector<PackedRun> runs;
    };

    std::byte* memory_of(const Slot& slot) const;
    std::uint32_t index_of(const Slot& slot) const { return static_cast<std::uint32_t>(&slot - slots_.data()); }
    void send(Slot& slot);
    void landed(Slot& slot, ucs_status_t status);
    void give_up(Slot& slot);
    // Whether UCX has a request of ours now. One that has failed loses the peer.
    bool open(ucs_status_ptr_t request, Batch& batch, const char* what);

    static void on_put(void* request, ucs_status_t status, void* slot);
    static void on_noted(void* request, ucs_status_t status, void* batch);
    static void on_landed(void* request, ucs_status_t status, void* slot);

    Context& context_;
    const Library& ucx_;
    Outgoing& owner_;
    const ucp_ep_h ep_;
    const ucp_rkey_h rkey_;
    const std::uint64_t ring_;
    const std::vector<std::uint64_t> bases_;
    std::uint64_t writer_ = 0;
    std::uint64_t next_number_ = 0;
    std::unique_ptr<SlotMemory> memory_;  // made for the first run
    std::array<Slot, kNumSlots> slots_;
    Slot* open_ = nullptr;
    // The owner's, for answers.
    enum class WayBack { NONE, OPENING, OPEN } way_back_ = WayBack::NONE;
    std::size_t puts_under_way_ = 0;
};

}  // namespace pdlink::ucx
