// Short runs over UCX: a put has a price of 1 to 4 us, however short it is, so many short ones are packed into one.
//
// The owner of the memory keeps a ring of slots for each invited peer, which the peer puts into. A slot that has
// landed (its flush came back: messages may overtake puts, UCX 1.21) is announced by a small message, a Note. The
// owner's progress thread takes a copy of the slot's list of runs, checks every one of them, puts the bytes into
// their places and answers; only then does the slot count as landed. So the writer needs no other credits.
//
// One slot is under way at a time, and no other put: where a put follows a note in one TCP stream, UCX crashed in the
// owner now and then (1.22, a null receive buffer in uct_tcp_ep_progress_data_rx; 4 of 6 runs of 134 MB on a loaded
// machine). Meanwhile the next slot is filled.
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
