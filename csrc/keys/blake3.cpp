#include "keys/blake3.h"

#include <bit>
#include <cstring>
#include <vector>

namespace pdlink::blake3 {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

constexpr std::size_t kBlockNbytes = 64, kChunkNbytes = 1024;
constexpr Digest kIv = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                        0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

enum Flag : std::uint32_t {
    kChunkStart = 1,
    kChunkEnd = 2,
    kParent = 4,
    kRoot = 8,
    kKeyed = 16,
    kDeriveContext = 32,
    kDeriveMaterial = 64,
};

// The 4 x 4 state is held by rows. The four columns of a half round are the lanes of a vector, so that one chain of
// compressions uses SIMD although each depends on the one before.
using Row = std::uint32_t __attribute__((vector_size(16)));
using RowBytes = std::uint8_t __attribute__((vector_size(16)));

#define PDLINK_INLINE inline __attribute__((always_inline))

// kShifts: the CPU rotates lanes in one instruction, which the compiler makes of two shifts.
template <int kBits, bool kShifts>
PDLINK_INLINE Row rotate_right(Row row) {
    if constexpr (!kShifts && kBits == 16) {
        const auto bytes = reinterpret_cast<RowBytes>(row);
        return reinterpret_cast<Row>(
            __builtin_shufflevector(bytes, bytes, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    } else if constexpr (!kShifts && kBits == 8) {
        const auto bytes = reinterpret_cast<RowBytes>(row);
        return reinterpret_cast<Row>(
            __builtin_shufflevector(bytes, bytes, 1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12));
    } else {
        return (row >> kBits) | (row << (32 - kBits));
    }
}

template <bool kShifts>
PDLINK_INLINE void mix(Row& a, Row& b, Row& c, Row& d, Row x, Row y) {
    a = a + b + x;
    d = rotate_right<16, kShifts>(d ^ a);
    c += d;
    b = rotate_right<12, kShifts>(b ^ c);
    a = a + b + y;
    d = rotate_right<8, kShifts>(d ^ a);
    c += d;
    b = rotate_right<7, kShifts>(b ^ c);
}

template <bool kShifts>
PDLINK_INLINE void compress_with(Digest& value, const std::uint8_t* block, std::uint32_t nbytes,
                                 std::uint64_t counter, std::uint32_t flags) {
    Row a, b, m[4];
    std::memcpy(&a, value.data(), 16);
    std::memcpy(&b, value.data() + 4, 16);
    std::memcpy(m, block, 64);
    Row c = {kIv[0], kIv[1], kIv[2], kIv[3]};
    Row d = {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), nbytes, flags};
    // First and second message word of each column, then of each diagonal.
    Row x1 = __builtin_shufflevector(m[0], m[1], 0, 2, 4, 6), y1 = __builtin_shufflevector(m[0], m[1], 1, 3, 5, 7);
    Row x2 = __builtin_shufflevector(m[2], m[3], 0, 2, 4, 6), y2 = __builtin_shufflevector(m[2], m[3], 1, 3, 5, 7);
    for (int round = 0;; ++round) {
        mix<kShifts>(a, b, c, d, x1, y1);
        b = __builtin_shufflevector(b, b, 1, 2, 3, 0);
        c = __builtin_shufflevector(c, c, 2, 3, 0, 1);
        d = __builtin_shufflevector(d, d, 3, 0, 1, 2);
        mix<kShifts>(a, b, c, d, x2, y2);
        b = __builtin_shufflevector(b, b, 3, 0, 1, 2);
        c = __builtin_shufflevector(c, c, 2, 3, 0, 1);
        d = __builtin_shufflevector(d, d, 1, 2, 3, 0);
        if (round == 6) break;
        // The message permutation 2 6 3 10 7 0 4 13 1 11 12 5 9 14 15 8, on words that lie by pairs.
        const Row next_x1 = __builtin_shufflevector(x1, y1, 1, 5, 7, 2);
        const Row next_y1 = __builtin_shufflevector(__builtin_shufflevector(x1, x2, 3, 5, 0, 0), y2, 0, 1, 2, 6);
        const Row next_x2 = __builtin_shufflevector(__builtin_shufflevector(y1, x2, 0, 6, 0, 0), y2, 0, 1, 4, 7);
        const Row next_y2 = __builtin_shufflevector(__builtin_shufflevector(x2, y1, 3, 0, 6, 0), y2, 5, 2, 0, 1);
        x1 = next_x1, y1 = next_y1, x2 = next_x2, y2 = next_y2;
    }
    a ^= c;
    b ^= d;
    std::memcpy(value.data(), &a, 16);
    std::memcpy(value.data() + 4, &b, 16);
}

void compress_portable(Digest& value, const std::uint8_t* block, std::uint32_t nbytes, std::uint64_t counter,
                       std::uint32_t flags) {
    compress_with<true>(value, block, nbytes, counter, flags);
}

#ifdef __x86_64__
__attribute__((target("avx512f,avx512vl"))) void compress_avx512(Digest& value, const std::uint8_t* block,
                                                                 std::uint32_t nbytes, std::uint64_t counter,
                                                                 std::uint32_t flags) {
    compress_with<true>(value, block, nbytes, counter, flags);
}

__attribute__((target("sse4.1"))) void compress_sse41(Digest& value, const std::uint8_t* block, std::uint32_t nbytes,
                                                      std::uint64_t counter, std::uint32_t flags) {
    compress_with<false>(value, block, nbytes, counter, flags);
}
#endif

std::vector<Kind> runnable() {
    std::vector<Kind> found;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512vl")) found.push_back({"avx512", compress_avx512});
    if (__builtin_cpu_supports("sse4.1")) found.push_back({"sse4.1", compress_sse41});
#endif
    found.push_back({"portable", compress_portable});
    return found;
}

Digest chunk(const Kind& kind, const Digest& key, const std::uint8_t* data, std::size_t nbytes, std::uint64_t counter,
             std::uint32_t flags, std::uint32_t root) {
    Digest value = key;
    std::uint32_t start = kChunkStart;
    for (; nbytes > kBlockNbytes; data += kBlockNbytes, nbytes -= kBlockNbytes, start = 0)
        kind.compress(value, data, kBlockNbytes, counter, flags | start);
    std::uint8_t last[kBlockNbytes] = {};
    if (nbytes) std::memcpy(last, data, nbytes);
    kind.compress(value, last, static_cast<std::uint32_t>(nbytes), counter, flags | start | kChunkEnd | root);
    return value;
}

// The value of the subtree over `data`, whose first chunk is number `counter`.
Digest tree(const Kind& kind, const Digest& key, const std::uint8_t* data, std::size_t nbytes, std::uint64_t counter,
            std::uint32_t flags, std::uint32_t root) {
    if (nbytes <= kChunkNbytes) return chunk(kind, key, data, nbytes, counter, flags, root);
    const std::size_t left_chunks = std::bit_floor((nbytes - 1) / kChunkNbytes), left = left_chunks * kChunkNbytes;
    const Digest children[2] = {tree(kind, key, data, left, counter, flags, 0),
                                tree(kind, key, data + left, nbytes - left, counter + left_chunks, flags, 0)};
    std::uint8_t block[kBlockNbytes];
    std::memcpy(block, children, kBlockNbytes);
    Digest value = key;
    kind.compress(value, block, kBlockNbytes, 0, flags | kParent | root);
    return value;
}

const std::uint8_t* bytes(const void* data) { return static_cast<const std::uint8_t*>(data); }

}  // namespace

std::span<const Kind> kinds() {
    static const std::vector<Kind> found = runnable();
    return found;
}

Digest keyed(const Kind& kind, const Digest& key, const void* data, std::size_t nbytes) {
    return tree(kind, key, bytes(data), nbytes, 0, kKeyed, kRoot);
}

Digest derive(std::string_view context, std::string_view material) {
    const Kind& kind = kinds().front();
    const Digest key = tree(kind, kIv, bytes(context.data()), context.size(), 0, kDeriveContext, kRoot);
    return tree(kind, key, bytes(material.data()), material.size(), 0, kDeriveMaterial, kRoot);
}

}  // namespace pdlink::blake3
