// One part of a batch as one native call.
//
// As separate driver calls from Python a push costs more than its bytes, because each call releases the GIL and waits
// for it again. Here one call puts the list where the kernel reads it (in its argument, if it is short), launches,
// and records the slot's event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/moves.h"

namespace pdlink::cuda {

// A call into the driver that failed. `call` is null if none did.
struct Failure {
    const char* call = nullptr;
    int number = 0;
};

// The list of one part until it has run: pinned memory, copied to the GPU before it is read. A kernel reads memory of
// the host 32 bytes at a time: 32,768 runs of 256 bytes took 560 us (H200), where the copy of their list, 0.5 MB,
// should take 10.
struct SlotMemory {
    std::byte* host = nullptr;
    std::uint64_t device = 0;  // the same memory, for kernels
    std::size_t nbytes = 0;
    std::uint64_t copy = 0;  // as much memory of the GPU; 0 if there is none
};

// A kernel, by its name and the driver's handle.
using Kernel = std::pair<std::string, std::uintptr_t>;

// The calls of the driver in `library`, for one context and its kernels. Streams and events are handles of the
// driver. Any thread may call.
class KernelLauncher {
  public:
    // max_blocks: of a launch, 1 or more. Throws std::runtime_error if the library cannot be loaded or lacks a call.
    KernelLauncher(const std::string& library, std::uintptr_t context, std::vector<Kernel> kernels,
                   std::uint32_t max_blocks);
    ~KernelLauncher();
    KernelLauncher(const KernelLauncher&) = delete;
    KernelLauncher& operator=(const KernelLauncher&) = delete;

    // In the stream `work`: wait for the events `after`, launch the next part of `moves`, and record `event` behind
    // it. After a failure `begun` tells whether a kernel of it was launched; if not, `moves` is as it was.
    Failure launch(Moves& moves, const SlotMemory& slot, std::uintptr_t event, std::uintptr_t work, bool& begun,
                   std::span<const std::uintptr_t> after = {}) const;

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
    Failure wait(Handle stream, std::span<const std::uintptr_t> after) const;
    Failure give(const Launch& launch, Handle stream) const;

    void* library_;
    Calls calls_;
    const Handle context_;
    const std::vector<Kernel> kernels_;
    const std::uint32_t max_blocks_;
};

}  // namespace pdlink::cuda
