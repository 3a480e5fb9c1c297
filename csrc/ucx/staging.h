// Short runs over UCX: a put has a price of 1 to 4 us, however short it is, so many short ones are packed into one.
//
// The owner of the memory keeps a ring of slots for each invited peer, which the peer puts into. A slot that has
// landed (its flush came back: messages may overtake puts, UCX 1.21) is announced by a small message, a Note. The
// owner's progress thread takes a copy of the slot's list of runs, checks every one of them, puts the bytes into
// their places and answers; only then does the slot count as landed. So the writer needs no other credits.
//
// The first slot of a connection travels alone: nothing is put until its answer is there. An endpoint's first message
// makes the owner's UCX build its own endpoint for the way back, and where that takes over a socket on which a put is
// arriving, uct_tcp_ep_replace_ep leaves the put's receive buffer behind and the owner dies of a null pointer (1.22;
// 20 of 30 runs with lo and eth0, where the message takes one socket and the put the other; 0 of 30 with one of them,
// 0 of 120 with the first slot alone). From then on one slot is filled while the other travels.
//
// Both promises hold on the owner's progress thread: it answers after the bytes are in their places, and it unpacks
// only inside the progress of the peer's own worker, which `close_peer` destroys on the same thread.
//
// Whole messages instead (ucp_am_send of what was packed) were slower, since UCX cuts them into 8 KiB and joins them
// again: 1 MiB over TCP 1.0 GB/s, by a put 3.7 (1.22, 2 cores).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ucx/context.h"

namespace pdlink::ucx {

constexpr std::size_t kNumSlots = 2;
constexpr std::size_t kSlotNbytes = std::size_t{1} << 20;  // packed bytes, and behind them the list of runs
constexpr std::size_t kMaxPackedRuns = 4096;
// Runs may be packed if they are shorter than a limit no larger than this.
constexpr std::uint64_t kMaxStageBelow = std::uint64_t{128} << 10;

constexpr unsigned kNoteId = 1;  // of the messages
constexpr unsigned kAnswerId = 2;
constexpr std::uint32_t kNoteMagic = 0x4e554450;    // "PDUN"
constexpr std::uint32_t kAnswerMagic = 0x41554450;  // "PDUA"

struct Note {
    std::uint32_t magic;
    std::uint32_t slot;
    std::uint64_t num_runs;
    std::uint64_t nbytes;  // of all runs
    std::uint64_t writer;  // drawn at random; the answer says it again
    std::uint64_t number;  // rises with every note
};
static_assert(sizeof(Note) == 40);

struct Answer {
    std::uint32_t magic;
    std::uint32_t placed;  // 1, or 0: refused
    std::uint64_t writer;
    std::uint64_t number;
};
static_assert(sizeof(Answer) == 24);

// Registered memory for all slots of one side. Pages come with their first use.
class SlotMemory {
  public:
    explicit SlotMemory(Context& context);
    SlotMemory(const SlotMemory&) = delete;
    SlotMemory& operator=(const SlotMemory&) = delete;
    ~SlotMemory();

    std::byte* slot(std::size_t index) const { return base_ + index * kSlotNbytes; }
    std::uint64_t base() const { return reinterpret_cast<std::uintptr_t>(base_); }
    ucp_mem_h memh() const { return memh_; }
    const std::string& rkey() const { return rkey_; }

  private:
    Context& context_;
    std::byte* base_ = nullptr;
    ucp_mem_h memh_ = nullptr;
    std::string rkey_;
};

}  // namespace pdlink::ucx
