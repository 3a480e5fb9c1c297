// One launch of runs of a batch as one native call.
//
// A push of 32 layers is 32 launches. As separate driver calls from Python they cost more than the bytes, because
// each call releases the GIL and waits for it again. Here one call copies the list into the memory of its slot,
// launches, and records the slot's event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/runs.h"

namespace pdlink::cuda {

// As the kernel reads it.
struct KernelRun {
    std::uint64_t src, dst, nbytes;
};
static_assert(sizeof(KernelRun) == 24);

// The next runs of a batch for one launch.
struct RunRange {
    std::size_t num_runs = 0;
    std::uint64_t longest_nbytes = 0;
    std::uint64_t cut_nbytes = 0;  // of the last run, if only a part of it is in the range
};

// The runs of a batch that are not launched yet.
class RunQueue {
  public:
    RunQueue() = default;
    explicit RunQueue(std::span<const Run> runs);

    bool empty() const { return at_ == runs_.size(); }
    std::uint64_t nbytes() const { return nbytes_; }  // of the whole batch

    // Runs for one launch, copied to `to`: as many as it has room for, about `launch_nbytes` bytes, the last cut if
    // need be. They are taken off by `take`, once they are launched.
    RunRange copy_next(std::span<KernelRun> to, std::uint64_t launch_nbytes) const;
    void take(const RunRange& range);

  private:
    std::vector<KernelRun> runs_;
    std::size_t at_ = 0;
    std::uint64_t nbytes_ = 0;
};

// A call into the driver that failed. `call` is null if none did.
struct Failure {
    const char* call = nullptr;
    int number = 0;
};

// The list of one launch until it has run: pinned memory, which the kernel reads in place where the list is short.
struct SlotMemory {
    KernelRun* host = nullptr;
    std::uint64_t device = 0;  // the same memory, for kernels
    std::size_t num_runs = 0;
    std::uint64_t copy = 0;  // as much memory of the GPU, for a long list; 0 if there is none
};

// From this many runs on a list is copied to the GPU before it is read. A kernel reads host memory 32 bytes at a
// time: 32,768 runs of 256 bytes took 560 us (H200), where the copy of their list, 0.8 MB, should take 15.
constexpr std::size_t kCopiedRuns = 1024;

// The calls of the driver in `library`, for one context and one kernel. Streams and events are handles of the driver.
// Any thread may call.
class KernelLauncher {
  public:
    // max_blocks: of a launch, 1 or more. Throws std::runtime_error if the library cannot be loaded or lacks a call.
    KernelLauncher(const std::string& library, std::uintptr_t context, std::uintptr_t kernel,
                   std::uint32_t max_blocks);
    ~KernelLauncher();
    KernelLauncher(const KernelLauncher&) = delete;
    KernelLauncher& operator=(const KernelLauncher&) = delete;

    // In the stream `work`: wait for the events `after`, launch the next range of `runs`, and record `event` behind
    // it. If "cuLaunchKernel" or a call before it failed, no kernel was launched and `runs` is as it was.
    Failure launch_runs(RunQueue& runs, std::uint64_t launch_nbytes, const SlotMemory& slot, std::uintptr_t event,
                        std::uintptr_t work, std::span<const std::uintptr_t> after = {}) const;

    // Make an eventfd readable once `event` is reached. bell: a stream for this alone, since what follows in it waits
    // for the host.
    Failure ring_after(std::uintptr_t event, int fd, std::uintptr_t bell) const;

    // Whether `event` is reached. Fails if the work before it has.
    Failure query(std::uintptr_t event, bool& reached) const;

    // As `CudaFailure` of pdlink/cuda/driver.py says it.
    std::string words(const Failure& failure) const;

  private:
    using Handle = void*;
    struct Calls {
        int (*push)(Handle);
        int (*pop)(Handle*);
        int (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,
                      void**);
        int (*copy)(std::uint64_t, std::uint64_t, std::size_t, Handle);
        int (*record)(Handle, Handle);
        int (*query)(Handle);
        int (*wait)(Handle, Handle, unsigned);
        int (*host)(Handle, void (*)(void*), void*);
        int (*name)(int, const char**);
        int (*text)(int, const char**);
    };
    void* library_;
    Calls calls_;
    Handle context_, kernel_;
    const std::uint32_t max_blocks_;
};

}  // namespace pdlink::cuda
