// The one kernel that reshapes paged KV: rows of tokens from any strided, paged place to any other.
//
// A *plane* is one part (K, V, or MLA's latent) of one layer, a *row* is one token of a plane: heads, each
// contiguous. Both sides name the token by a slot, which is block * block_tokens + token inside the block. Gather,
// scatter, NHD
// <-> HND, K and V fused or apart, a slice of the heads, another block size are all only other strides and slots. A
// row is cut into units of 16 bytes, or fewer where the alignment asks for it; four units that lie a quarter of the
// row apart are a *strand*, the work of one thread: consecutive threads touch consecutive units, and the slots are
// looked up once for four loads in flight.
//
// Addresses are sums of 64-bit numbers throughout.
#pragma once

#include <cstdint>

#include "cuda/access.h"
#include "cuda/divide.h"

namespace pdlink::cuda {

constexpr std::uint32_t kThreads = 256;  // of a block
constexpr int kUnitsPerStrand = 4;

// Where the rows of one side are. Strides in bytes.
struct Side {
    std::uint64_t base = 0;   // address of the first head of slot 0 of the first plane, unless there is
    std::uint64_t table = 0;  // address of [num_planes] such addresses
    std::int64_t layer_stride = 0, part_stride = 0;
    std::int64_t block_stride = 0, token_stride = 0, head_stride = 0;
    std::uint64_t slots = 0;  // address of [num_tokens] slots; 0: first_slot, first_slot + 1, ...
    std::int64_t first_slot = 0;
    std::int64_t num_slots = 0;
    Divider block_tokens;

    // The slot of a token; it may be outside.
    PDLINK_HD std::int64_t slot(std::uint32_t token) const {
        return slots ? load_int64(slots + std::uint64_t{token} * 8) : first_slot + token;
    }

    PDLINK_HD std::uint64_t row(std::uint32_t plane, std::uint32_t layer, std::uint32_t part,
                                std::int64_t slot) const {
        const std::uint64_t start = table ? static_cast<std::uint64_t>(load_int64(table + std::uint64_t{plane} * 8))
                                          : base + layer * layer_stride + part * part_stride;
        const std::int64_t block = block_tokens.divide_any(slot);
        const std::int64_t token = slot - block * block_tokens.divisor();
        return start + block * block_stride + token * token_stride;
    }
};

// One launch. Everything in it is plain data: it is the kernel's only argument.
struct Reshape {
    Side src, dst;
    Divider num_parts;
    Divider strands_per_row;
    Divider units_per_head;
    std::uint32_t units_per_row = 0;
    std::uint32_t num_strands = 0;  // per plane, below 2^31
    std::uint64_t refused = 0;      // address of a uint32 that becomes 1 if a slot was outside; 0: nobody asks
};

// One thread. kFlat: a row is contiguous on both sides, so that a unit's place needs no division.
template <int kUnitNbytes, bool kFlat>
PDLINK_HD void move_strand(const Reshape& reshape, std::uint32_t plane, std::uint32_t strand) {
    if (strand >= reshape.num_strands) return;
    const std::uint32_t token = reshape.strands_per_row.divide(strand);
    const std::uint32_t first = strand - token * reshape.strands_per_row.divisor();
    const std::int64_t src_slot = reshape.src.slot(token), dst_slot = reshape.dst.slot(token);
    if (src_slot == -1 || dst_slot == -1) return;
    if (src_slot < 0 || src_slot >= reshape.src.num_slots || dst_slot < 0 || dst_slot >= reshape.dst.num_slots) {
        if (reshape.refused) store(reshape.refused, Word<4>{1});
        return;
    }
    const std::uint32_t layer = reshape.num_parts.divide(plane), part = plane - layer * reshape.num_parts.divisor();
    const std::uint64_t src = reshape.src.row(plane, layer, part, src_slot);
    const std::uint64_t dst = reshape.dst.row(plane, layer, part, dst_slot);

    Word<kUnitNbytes> loaded[kUnitsPerStrand] = {};
    std::uint64_t to[kUnitsPerStrand] = {};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < kUnitsPerStrand; ++i) {
        const std::uint32_t unit = first + i * reshape.strands_per_row.divisor();
        if (unit >= reshape.units_per_row) break;
        std::uint64_t from = src;
        to[i] = dst;
        std::uint32_t inside = unit;
        if constexpr (!kFlat) {
            const std::uint32_t head = reshape.units_per_head.divide(unit);
            inside -= head * reshape.units_per_head.divisor();
            from += head * reshape.src.head_stride;
            to[i] += head * reshape.dst.head_stride;
        }
        to[i] += std::uint64_t{inside} * kUnitNbytes;
        loaded[i] = load(from + std::uint64_t{inside} * kUnitNbytes, Word<kUnitNbytes>{});
    }
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < kUnitsPerStrand; ++i) {
        if (first + i * reshape.strands_per_row.divisor() >= reshape.units_per_row) break;
        store(to[i], loaded[i]);
    }
}

}  // namespace pdlink::cuda
