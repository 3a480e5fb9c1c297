// Copying a run past the cache.
//
// KV pages are written once by this process and read later by another one. An ordinary store first reads the
// destination line into the cache and later writes it back: three crossings of the memory bus per byte instead of
// two. Non-temporal stores skip the read and do not evict the cache of computing threads. They are weakly ordered, so
// a batch ends with `store_fence()` before its report.
#pragma once

#include <cstddef>
#include <span>

namespace pdlink {

// One instruction set. `stream` is right for any length and alignment; the caller fences.
struct StoreKind {
    const char* name;
    void (*stream)(std::byte* dst, const std::byte* src, std::size_t nbytes);
};

// What this CPU can run, best first; the last is portable and always there.
std::span<const StoreKind> store_kinds();

// Copy one run with the best kind if it is long or fills whole lines, else with memcpy. The ranges do not overlap.
void copy_run(std::byte* dst, const std::byte* src, std::size_t nbytes);

// The CPU's prefetcher does not follow short scattered runs. So a loop over a list of runs prefetches the source this
// many runs ahead (256-byte runs, one core of an EPYC, Zen 5, GB/s: none 13.3, 4 ahead 15.7, 16 ahead 17.8, 128 ahead
// 15.8; runs of 32 KiB 19.6).
constexpr std::size_t kPrefetchAhead = 16;
void prefetch_run(const std::byte* src, std::size_t nbytes);

// Everything stored so far by this thread is visible before anything it stores later.
void store_fence();

}  // namespace pdlink
