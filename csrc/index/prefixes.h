// Which holder has the KV of which prefix: for a router that hears of stored and removed blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "index/holders.h"
#include "index/table.h"

namespace pdlink::index {

using Id = std::uint64_t;  // names a block in the words of its publisher

constexpr unsigned kNumMedia = 4;  // kinds of memory that a holder may have a block in, the quickest first
constexpr Key kMedia = (1 << kNumMedia) - 1;

// The key of `parent` followed by these tokens. Two prompts meet by chance with 2^-60; that misleads a placement, no
// more.
Key follow(Key parent, std::span<const std::uint32_t> tokens);
// The same of a long piece, a multiple of 4 bytes: each step of `follow` waits for the one before, here for a
// quarter.
Key follow_long(Key parent, std::span<const std::uint8_t> data);

// Of one model and one number of tokens per block. For one thread.
class Prefixes {
  public:
    explicit Prefixes(std::size_t block_tokens, std::size_t max_blocks)
        : block_tokens_(block_tokens), max_blocks_(max_blocks) {}

    // The holder has these blocks in `medium`, a bit of kMedia. They follow the one named `parent`, or `root` if
    // there is none. Returns how many were taken: none where the parent is unknown, as after missed events.
    //
    // A block that is told again is another copy of it, which stays when the first one is removed. Only blocks
    // without a parent are not counted again: vLLM tells the hits of a request so (kv_cache_report_mode "full"),
    // which add no copy, and a copy too many would never go.
    std::size_t stored(Holder holder, Key medium, std::span<const Id> ids, const Id* parent, Key root,
                       std::span<const std::uint32_t> tokens);
    void removed(Holder holder, Key medium, std::span<const Id> ids);
    // The holder has nothing.
    void cleared(Holder holder);

    // A holder of the first block, and how many leading tokens it has, each counted in its quickest medium.
    using Found = std::pair<Holder, std::array<std::size_t, kNumMedia>>;
    std::vector<Found> lookup(Key root, std::span<const std::uint32_t> tokens);

    std::size_t block_tokens() const { return block_tokens_; }
    std::size_t num_blocks() const { return num_blocks_; }  // of all holders
    std::size_t nbytes() const;

  private:
    struct Held {
        Table<Key> blocks;          // prefix | media of each block, by its id
        Table<std::uint32_t> more;  // copies of a block beyond the first, and blocks of a prefix beyond the first
    };
    void add(Key key, Holder holder, Key medium);
    void drop(Key key, Holder holder, Key media);
    void leave(Key key, Holder holder, Key media);

    std::size_t block_tokens_, max_blocks_, num_blocks_ = 0;
    Holders prefixes_;
    std::vector<Held> held_;  // by holder
};

}  // namespace pdlink::index
