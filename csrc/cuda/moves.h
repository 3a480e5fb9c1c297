// `Moves`: what a batch copies, in parts of a few launches that share one list.
//
// A plan is strides and pairs of blocks, the same for all layers of a class: its planes that lie evenly are one
// launch. Runs are rows at any addresses: those of one length are one launch, whose pairs are the addresses; lengths
// that are multiples of a long one are cut to it. Both are checked against the regions before anything moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "common/runs.h"
#include "cuda/launches.h"

namespace pdlink::cuda {

// One side of a plan. The byte of (block, token, head) is that of the part's offset and so many strides.
struct PlanSide {
    std::int64_t block_tokens, block_stride, token_stride, head_stride;
    bool operator==(const PlanSide&) const = default;
};

// What layers of one class have in common.
struct PlanShape {
    std::int64_t num_heads, head_nbytes;
    PlanSide src, dst;
    bool operator==(const PlanShape&) const = default;
};

// Where one part of a layer begins.
struct PlanPart {
    std::int64_t src_region, src_offset, dst_region, dst_offset;
};

struct PlanLayer {
    PlanShape shape;
    std::vector<PlanPart> parts;
};

// Tokens between blocks, for some layers. Pairs name units of `unit_tokens` tokens on both sides.
struct PlanOfLayers {
    std::span<const std::int32_t> pairs;  // source unit, destination unit, ...
    std::int64_t unit_tokens;
    std::int64_t skip;  // tokens of the first unit that are not moved
    std::int64_t num_tokens;
    std::vector<PlanLayer> layers;
};

// Limits of a part.
struct PartLimits {
    std::uint64_t nbytes = ~std::uint64_t{0};  // about
    std::uint64_t list_nbytes = ~std::uint64_t{0};
};

// Launches that share a list.
struct MovePart {
    std::vector<std::byte> list;
    bool is_wide = false;
    std::vector<Request> requests;  // addresses of lists count from the beginning of `list`
    std::uint64_t nbytes = 0;
};

class Moves {
  public:
    Moves() = default;

    // Throws std::invalid_argument for a unit or a run outside its region.
    Moves(const PlanOfLayers& plan, std::span<const Extent> local, std::span<const Extent> remote,
          const PartLimits& limits);
    Moves(std::span<const RunList> lists, std::span<const Extent> local, std::span<const Extent> remote,
          const PartLimits& limits);
    // One part, of addresses that were checked by others.
    explicit Moves(MovePart part);

    bool empty() const { return parts_.empty(); }
    std::uint64_t nbytes() const { return nbytes_; }  // of the whole batch
    const MovePart& next() const { return parts_.front(); }
    std::size_t num_parts() const { return parts_.size(); }
    std::size_t num_launches() const;  // at least
    void take() { parts_.pop_front(); }

  private:
    std::deque<MovePart> parts_;
    std::uint64_t nbytes_ = 0;
};

}  // namespace pdlink::cuda
