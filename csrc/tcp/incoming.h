// One connection that a peer writes through into our regions: parse, check, scatter, answer.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/descriptor.h"
#include "copy/peer_memory.h"
#include "tcp/guard.h"
#include "tcp/wire.h"

namespace pdlink::tcp {

// The last events of a socket (edge-triggered): set by epoll, cleared by EAGAIN.
struct Ready {
    bool in = false;
    bool out = false;
};

// How a turn of a connection ended.
enum class Turn {
    kMore,    // its share is used up; there may be more to do
    kIdle,    // nothing to do until the next event
    kEnded,   // the other side has ended it between two frames
    kBroken,  // it has failed, see `reason()`
};

// Owned by the progress thread, which alone calls it, but for `look_again`.
class Incoming {
  public:
    // guard: which blocks are open to the peer of this number; null if all of the regions are.
    // pack_below: shorter runs arrive packed, and are placed when the frame is complete.
    Incoming(Descriptor socket, std::uint64_t session, std::shared_ptr<const std::vector<Region>> regions,
             std::shared_ptr<const Guard> guard, std::uint32_t peer, std::uint64_t pack_below)
        : socket_(std::move(socket)),
          session_(session),
          regions_(std::move(regions)),
          guard_(std::move(guard)),
          peer_(peer),
          pack_below_(pack_below) {
        places_.reserve(kMaxRuns + 1);
    }

    Ready ready;
    int fd() const { return socket_.get(); }
    const std::string& reason() const { return reason_; }
    bool has_work() const { return answers_.empty() ? ready.in : ready.out; }

    // Place about a frame. After a refused frame nothing more is read.
    Turn receive();

    // After blocks were closed: stop placing a frame that was accepted while they were open. Any thread; waits for
    // one recvmsg at most.
    void look_again();

  private:
    enum class Part { kHeader, kTable, kPayload };
    Turn flush_answers();
    Turn broken(std::string reason);
    void take(std::size_t nbytes);
    void header_complete();
    void table_complete();
    void unpack();
    void frame_complete();
    void refuse(Verdict verdict);
    void answer(Verdict verdict);

    Descriptor socket_;
    const std::uint64_t session_;
    const std::shared_ptr<const std::vector<Region>> regions_;
    const std::shared_ptr<const Guard> guard_;
    const std::uint32_t peer_;
    const std::uint64_t pack_below_;

    std::mutex placing_;   // a leaf; held while a frame is checked, and while bytes of it are placed
    std::string revoked_;  // why nothing more of this frame may be placed; guarded by it
    Part part_ = Part::kHeader;
    FrameHeader header_{};
    std::size_t header_nbytes_ = 0;  // received
    WireRun table_[kMaxRuns];
    std::size_t table_nbytes_ = 0;
    std::vector<iovec> places_;  // of the payload; the next header behind it
    std::size_t next_place_ = 0;
    std::uint64_t payload_left_ = 0;
    std::vector<std::byte> packed_;    // the short runs of the frame, in the order of the table
    std::span<const WireRun> unpack_;  // the table, if it has such
    std::uint64_t ticket_ = 0;
    std::uint64_t sequence_ = 0;      // of the frame that is being received
    std::vector<std::byte> answers_;  // not sent yet; while there are any, no frame is read
    bool refused_ = false;
    std::string reason_;
};

}  // namespace pdlink::tcp
