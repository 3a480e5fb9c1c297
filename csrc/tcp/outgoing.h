// One connection that we write through into a peer's regions: cut frames, gather, read the answers.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "common/descriptor.h"
#include "common/engine.h"
#include "common/runs.h"
#include "tcp/incoming.h"
#include "tcp/wire.h"

namespace pdlink::tcp {

// One batch of runs (`dst` counts from the beginning of the peer's region) and its progress.
struct Batch : BatchBase {
    std::vector<Run> runs;

    std::size_t next_run = 0;       // first that is not in a frame in full
    std::uint64_t next_nbytes = 0;  // bytes of it that are
    std::size_t unanswered = 0;     // frames
    bool cut = false;               // all of it is in frames; an empty batch is one empty frame

    bool landed() const { return cut && unanswered == 0; }
    // Throws as join_runs.
    void fill(std::span<const RunList> lists, std::span<const Extent> local, std::span<const Extent> remote);
};

// Used under the engine's mutex, and by the progress thread without it while `busy`.
class Outgoing {
  public:
    // pack_below: shorter runs are packed before they are sent.
    Outgoing(Descriptor socket, const Hello& hello, std::uint64_t pack_below);

    Ready ready;
    bool busy = false;
    int fd() const { return socket_.get(); }
    const std::string& reason() const { return reason_; }
    bool connected() const { return connected_; }
    void set_connected() { connected_ = true; }

    // Nothing is left to send of what was loaded.
    bool sent() const { return next_iovec_ == iovecs_.size(); }

    // Load the next frame of a batch to send; the batch must stay until its answer.
    void load(Batch& batch);
    Turn send();

    // Read answers; appends the batches of answered frames, one entry each.
    Turn receive(std::vector<Batch*>& answered);

    // Stop sending. Sent bytes may still be placed until the owner ends its side; `receive` then waits for that, and
    // ignores answers. False if nothing is in flight.
    bool drain();

  private:
    Turn broken(std::string reason);
    void gather(const std::byte* src, std::uint64_t nbytes, bool pack);

    Descriptor socket_;
    const Hello hello_;
    const std::uint64_t pack_below_;
    bool connected_ = false;
    bool draining_ = false;

    FrameHeader header_{};
    std::vector<WireRun> table_;
    std::vector<iovec> iovecs_;
    std::size_t next_iovec_ = 0;
    std::vector<std::byte> packed_;  // the short runs of the frame, one after the other; its room is made once
    std::uint64_t sequence_ = 0;

    struct Asked {
        Batch* batch;
        std::uint64_t ticket;
    };
    std::deque<Asked> asked_;  // frames without an answer, oldest first
    std::uint64_t answered_sequence_ = 0;
    std::byte answer_[64 * sizeof(Answer)];
    std::size_t answer_nbytes_ = 0;
    std::string reason_;
};

}  // namespace pdlink::tcp
