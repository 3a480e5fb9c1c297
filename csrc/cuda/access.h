// Words of 1 to 16 bytes, loaded and stored in one instruction where the hardware can.
//
// Every kernel body here is compiled twice: by nvcc for a GPU, and by the C++ compiler as a plain loop that the tests
// compare with torch on machines without one. PDLINK_HD marks what belongs to both.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define PDLINK_HD __host__ __device__ __forceinline__
#else
#define PDLINK_HD inline
#endif

namespace pdlink::cuda {

template <int kNbytes>
struct Word;

template <>
struct alignas(16) Word<16> {
    std::uint32_t x, y, z, w;
};
template <>
struct alignas(8) Word<8> {
    std::uint32_t x, y;
};
template <>
struct Word<4> {
    std::uint32_t x;
};
template <>
struct Word<2> {
    std::uint16_t x;
};
template <>
struct Word<1> {
    std::uint8_t x;
};

#ifdef __CUDA_ARCH__

// Addresses are of the global state space: device memory, a peer's, or mapped host memory. The compiler cannot know
// that of a number and would emit generic accesses, hence the instructions by name.
__device__ __forceinline__ Word<16> load(std::uint64_t at, Word<16>) {
    Word<16> v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ __forceinline__ Word<8> load(std::uint64_t at, Word<8>) {
    Word<8> v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
__device__ __forceinline__ Word<4> load(std::uint64_t at, Word<4>) {
    Word<4> v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v.x) : "l"(at));
    return v;
}
__device__ __forceinline__ Word<2> load(std::uint64_t at, Word<2>) {
    Word<2> v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v.x) : "l"(at));
    return v;
}
__device__ __forceinline__ Word<1> load(std::uint64_t at, Word<1>) {
    std::uint32_t v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(at));
    return {static_cast<std::uint8_t>(v)};
}
__device__ __forceinline__ void store(std::uint64_t at, Word<16> v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store(std::uint64_t at, Word<8> v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store(std::uint64_t at, Word<4> v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v.x) : "memory");
}
__device__ __forceinline__ void store(std::uint64_t at, Word<2> v) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(v.x) : "memory");
}
__device__ __forceinline__ void store(std::uint64_t at, Word<1> v) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"(static_cast<std::uint32_t>(v.x)) : "memory");
}

#else

template <class W>
W load(std::uint64_t at, W word) {
    std::memcpy(&word, reinterpret_cast<const void*>(at), sizeof word);
    return word;
}
template <class W>
void store(std::uint64_t at, W word) {
    std::memcpy(reinterpret_cast<void*>(at), &word, sizeof word);
}

#endif

// Numbers at addresses that are multiples of their size.
PDLINK_HD std::int64_t load_int64(std::uint64_t at) {
    const Word<8> v = load(at, Word<8>{});
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(v.y) << 32 | v.x);
}

PDLINK_HD std::int64_t load_int32(std::uint64_t at) { return static_cast<std::int32_t>(load(at, Word<4>{}).x); }

}  // namespace pdlink::cuda
