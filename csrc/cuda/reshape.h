// The one kernel that moves KV: rows of tokens from any strided, paged place to any other, a peer's memory included.
//
// A *plane* is one part (K, V, or MLA's latent) of one layer, a *row* is one token of a plane: heads, each
// contiguous. Both sides name the token by a slot, which is block * block_tokens + token inside the block. Which slot
// a token has on each side is said by a list of *units* of equally many tokens that lie in one block on both sides:
// pairs of numbers, of whole blocks where both have the same size. Gather, scatter, NHD <-> HND, K and V fused or
// apart, a slice of the heads, another block size are all only other strides and pairs; a slot for each token is
// units of one. A list of at most kInlineNbytes is in the argument itself: a kernel reads that for nothing, and
// memory of the host 32 bytes at a time.
//
// A row is cut into units of 16 bytes, or fewer where the alignment asks for it; four units that lie a quarter of the
// row apart are a *strand*: consecutive threads touch consecutive units, and the slots are looked up once for four
// loads in flight. A grid of fewer threads than strands takes them in turns, so that it can leave room for others.
//
// Addresses are sums of 64-bit numbers throughout.
#pragma once

#include <cstdint>

#include "cuda/access.h"
#include "cuda/divide.h"

namespace pdlink::cuda {

constexpr std::uint32_t kThreads = 256;  // of a block
constexpr int kUnitsPerStrand = 4;
constexpr std::uint32_t kInlineNbytes = 3200;

// Where the rows of one side are. Strides in bytes.
struct Side {
    std::uint64_t base = 0;   // address of the first head of slot 0 of the first plane, unless there is
    std::uint64_t table = 0;  // address of [num_planes] such addresses
    std::int64_t layer_stride = 0, part_stride = 0;
    std::int64_t block_stride = 0, token_stride = 0, head_stride = 0;
    std::uint64_t list = 0;  // address of the first number; 0: the slots are first_slot, first_slot + 1, ...
    std::int64_t first_slot = 0;
    std::int64_t num_slots = 0;
    Divider block_tokens;
    std::uint32_t list_step = 0;  // bytes from one number to the next

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
    Divider unit_tokens;
    std::uint32_t units_per_row = 0;
    std::uint32_t num_strands = 0;  // per plane, below 2^31
    std::uint32_t num_planes = 0;
    std::uint32_t skip = 0;       // tokens of the first unit that are not moved
    std::uint32_t is_wide = 1;    // numbers of the lists are int64, else int32
    std::uint32_t is_inline = 0;  // the list is `words`
    std::uint64_t refused = 0;    // address of a uint32 that becomes 1 if a slot was outside; 0: nobody asks
    std::uint32_t words[kInlineNbytes / 4] = {};  // pairs, low half first

    // The slots of a token; they may be outside.
    struct Slots {
        std::int64_t src, dst;
    };
    PDLINK_HD Slots slots(std::uint32_t token) const {
        const std::uint32_t unit = unit_tokens.divide(skip + token);
        const std::int64_t inside = skip + token - unit * unit_tokens.divisor();
        if (is_inline) return {in_unit(inlined(2 * unit), inside), in_unit(inlined(2 * unit + 1), inside)};
        return {listed(src, token, unit, inside), listed(dst, token, unit, inside)};
    }

  private:
    PDLINK_HD std::int64_t inlined(std::uint32_t index) const {
        if (!is_wide) return static_cast<std::int32_t>(words[index]);
        return static_cast<std::int64_t>(std::uint64_t{words[2 * index + 1]} << 32 | words[2 * index]);
    }
    PDLINK_HD std::int64_t in_unit(std::int64_t number, std::int64_t inside) const {
        return number < 0 ? number : number * unit_tokens.divisor() + inside;
    }
    PDLINK_HD std::int64_t listed(const Side& side, std::uint32_t token, std::uint32_t unit,
                                  std::int64_t inside) const {
        if (!side.list) return side.first_slot + token;
        const std::uint64_t at = side.list + std::uint64_t{unit} * side.list_step;
        return in_unit(is_wide ? load_int64(at) : load_int32(at), inside);
    }
};
static_assert(sizeof(Reshape) <= 4096, "what every GPU takes as a kernel's arguments");

// kFlat: a row is contiguous on both sides, so that a unit's place needs no division.
template <int kUnitNbytes, bool kFlat>
PDLINK_HD void move_strand(const Reshape& reshape, std::uint32_t plane, std::uint32_t strand) {
    const std::uint32_t token = reshape.strands_per_row.divide(strand);
    const std::uint32_t first = strand - token * reshape.strands_per_row.divisor();
    const Reshape::Slots slots = reshape.slots(token);
    if (slots.src == -1 || slots.dst == -1) return;
    if (slots.src < 0 || slots.src >= reshape.src.num_slots || slots.dst < 0 || slots.dst >= reshape.dst.num_slots) {
        if (reshape.refused) store(reshape.refused, Word<4>{1});
        return;
    }
    const std::uint32_t layer = reshape.num_parts.divide(plane), part = plane - layer * reshape.num_parts.divisor();
    const std::uint64_t src = reshape.src.row(plane, layer, part, slots.src);
    const std::uint64_t dst = reshape.dst.row(plane, layer, part, slots.dst);

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

struct Place {
    std::uint32_t at, of;  // a block, and how many there are
};

// One thread of the grid: x are strands, y are planes.
template <int kUnitNbytes, bool kFlat>
PDLINK_HD void move_strands(const Reshape& reshape, Place x, Place y, std::uint32_t thread) {
    for (std::uint32_t plane = y.at; plane < reshape.num_planes; plane += y.of)
        for (std::uint32_t strand = x.at * kThreads + thread; strand < reshape.num_strands; strand += x.of * kThreads)
            move_strand<kUnitNbytes, kFlat>(reshape, plane, strand);
}

}  // namespace pdlink::cuda
