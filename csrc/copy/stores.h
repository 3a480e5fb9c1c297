// Copying a run past the cache.
//
// KV pages are written once by this process and read later by another one. An ordinary store first reads the
// destination line into the cache and later writes it back: three crossings of the memory bus per byte instead of
// two. Non-temporal stores skip the read and leave the cache to whoever computes. They are weakly ordered, so a
// batch of them ends with `store_fence()` before anybody is told.
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

// Copy one run with the best kind if it is long, with memcpy if it is short. The ranges do not overlap.
void copy_run(std::byte* dst, const std::byte* src, std::size_t nbytes);

// Everything stored so far by this thread is visible before anything it stores later.
void store_fence();

}  // namespace pdlink
