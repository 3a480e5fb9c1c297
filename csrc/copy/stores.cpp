#include "copy/stores.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pdlink {
namespace {

// The loops below store one line each: longer ones were slower (32 KiB runs, AVX-512, 64 / 128 / 256 bytes per turn:
// 19.0 / 17.7 / 16.6 GB/s on one core of an EPYC, Zen 5).

// Bytes up to the next destination address that is a multiple of `align`; non-temporal stores need whole lines to
// leave the CPU in one piece, so heads and tails go through memcpy.
[[maybe_unused]] std::size_t head_nbytes(const std::byte* dst, std::size_t align, std::size_t nbytes) {
    const std::size_t head = (align - reinterpret_cast<std::uintptr_t>(dst) % align) % align;
    return head < nbytes ? head : nbytes;
}

void stream_portable(std::byte* dst, const std::byte* src, std::size_t nbytes) { std::memcpy(dst, src, nbytes); }

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void stream_avx512(std::byte* dst, const std::byte* src, std::size_t nbytes) {
    const std::size_t head = head_nbytes(dst, 64, nbytes);
    std::memcpy(dst, src, head);
    dst += head, src += head, nbytes -= head;
    for (; nbytes >= 64; dst += 64, src += 64, nbytes -= 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
    std::memcpy(dst, src, nbytes);
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* dst, const std::byte* src, std::size_t nbytes) {
    // Aligned to a whole line, not to 32: two stores must fill one line.
    const std::size_t head = head_nbytes(dst, 64, nbytes);
    std::memcpy(dst, src, head);
    dst += head, src += head, nbytes -= head;
    for (; nbytes >= 64; dst += 64, src += 64, nbytes -= 64) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), high);
    }
    std::memcpy(dst, src, nbytes);
}

#elif defined(__aarch64__)

// STNP is a hint, not a different kind of store; GCC has no intrinsic for it. Not measured.
void stream_neon(std::byte* dst, const std::byte* src, std::size_t nbytes) {
    const std::size_t head = head_nbytes(dst, 64, nbytes);
    std::memcpy(dst, src, head);
    dst += head, src += head, nbytes -= head;
    for (; nbytes >= 64; dst += 64, src += 64, nbytes -= 64)
        asm volatile(
            "ldp q0, q1, [%1]\n\t"
            "ldp q2, q3, [%1, #32]\n\t"
            "stnp q0, q1, [%0]\n\t"
            "stnp q2, q3, [%0, #32]"
            :
            : "r"(dst), "r"(src)
            : "v0", "v1", "v2", "v3", "memory");
    std::memcpy(dst, src, nbytes);
}

#endif

std::vector<StoreKind> find_kinds() {
    std::vector<StoreKind> kinds;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) kinds.push_back({"avx512", stream_avx512});
    if (__builtin_cpu_supports("avx2")) kinds.push_back({"avx2", stream_avx2});
#elif defined(__aarch64__)
    kinds.push_back({"neon", stream_neon});
#endif
    kinds.push_back({"portable", stream_portable});
    return kinds;
}

// Shorter runs lose more on their unaligned heads and tails than they gain, unless they have none. Scattered runs in
// a 256 MiB memory file, one core of an EPYC (Zen 5), at an odd offset, GB/s memcpy / AVX-512 / AVX2: 512 B 7.9 / 5.7
// / 5.1, 4 KiB 11.7 / 12.4 / 12.1, 32 KiB 13.8 / 18.0 / 17.5 (whole lines: 17.1 / 18.6 / 18.1, of 256 B: 11.1 / 13.3
// / -); a Xeon: 32 KiB 6.3 / - / 7.6.
constexpr std::size_t kStreamFromNbytes = 2048;
constexpr std::size_t kLineNbytes = 64;

}  // namespace

std::span<const StoreKind> store_kinds() {
    static const std::vector<StoreKind> kinds = find_kinds();
    return kinds;
}

void copy_run(std::byte* dst, const std::byte* src, std::size_t nbytes) {
    static const auto stream = store_kinds().front().stream;
    const bool whole_lines = (reinterpret_cast<std::uintptr_t>(dst) | nbytes) % kLineNbytes == 0;
    if (nbytes >= kStreamFromNbytes || whole_lines)
        stream(dst, src, nbytes);
    else
        std::memcpy(dst, src, nbytes);
}

void prefetch_run(const std::byte* src, std::size_t nbytes) {
    if (nbytes >= kStreamFromNbytes) return;
    for (std::size_t at = 0; at < nbytes; at += kLineNbytes) __builtin_prefetch(src + at, 0, 0);
}

void store_fence() {
#if defined(__x86_64__)
    _mm_sfence();  // non-temporal stores are not ordered by anything weaker
#endif
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace pdlink
