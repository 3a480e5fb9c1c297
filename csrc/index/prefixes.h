// Which holder has the KV of which prefix: for a router that hears of stored and removed blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace pdlink::index {

using Key = std::uint64_t;     // names a prefix: the fold of all its tokens. The bits of kMedia are zero
using Id = std::uint64_t;      // names a block in the words of its publisher
using Holder = std::uint32_t;  // a worker

constexpr unsigned kNumMedia = 4;  // kinds of memory that a holder may have a block in, the quickest first
constexpr Key kMedia = (1 << kNumMedia) - 1;

// The key of `parent` followed by these tokens. Two prompts meet by chance with 2^-60; that misleads a placement, no
// more.
Key follow(Key parent, std::span<const std::uint32_t> tokens);

// From non-zero keys to values; linear probing, 16 bytes a slot, at most 3/4 full.
template <class Value>
class Table {
  public:
    Value* find(std::uint64_t key) {
        if (slots_.empty()) return nullptr;
        for (std::size_t at = home(key);; at = (at + 1) & mask()) {
            if (slots_[at].key == key) return &slots_[at].value;
            if (slots_[at].key == 0) return nullptr;
        }
    }
    // The value, and whether the key is new.
    std::pair<Value*, bool> put(std::uint64_t key, Value value) {
        if ((size_ + 1) * 4 > slots_.size() * 3) grow();
        std::size_t at = home(key);
        for (; slots_[at].key != 0; at = (at + 1) & mask())
            if (slots_[at].key == key) return {&slots_[at].value, false};
        slots_[at] = {key, value};
        ++size_;
        return {&slots_[at].value, true};
    }
    void erase(std::uint64_t key) {
        if (slots_.empty()) return;
        std::size_t at = home(key);
        for (; slots_[at].key != key; at = (at + 1) & mask())
            if (slots_[at].key == 0) return;
        // Those behind it that may not lie beyond a free slot move up.
        for (std::size_t next = (at + 1) & mask(); slots_[next].key != 0; next = (next + 1) & mask()) {
            if (((next - home(slots_[next].key)) & mask()) < ((next - at) & mask())) continue;
            slots_[at] = slots_[next];
            at = next;
        }
        slots_[at] = {};
        --size_;
    }
    void prefetch(std::uint64_t key) const {
        if (!slots_.empty()) __builtin_prefetch(&slots_[home(key)]);
    }
    template <class Visit>
    void each(Visit&& visit) const {
        for (const Slot& slot : slots_)
            if (slot.key != 0) visit(slot.key, slot.value);
    }
    std::size_t size() const { return size_; }
    std::size_t nbytes() const { return slots_.capacity() * sizeof(Slot); }

  private:
    struct Slot {
        std::uint64_t key = 0;
        Value value{};
    };
    std::size_t mask() const { return slots_.size() - 1; }
    std::size_t home(std::uint64_t key) const { return (key * 0x9E3779B97F4A7C15u >> 20) & mask(); }
    void grow() {
        std::vector<Slot> old(slots_.empty() ? 16 : slots_.size() * 2);
        old.swap(slots_);
        size_ = 0;
        for (const Slot& slot : old)
            if (slot.key != 0) put(slot.key, slot.value);
    }
    std::vector<Slot> slots_;
    std::size_t size_ = 0;
};

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
    // One holder of a prefix, and the media in which it has it. Without media `holder` is the number of a list of
    // several in `shared_`.
    struct Holding {
        Holder holder = 0;
        std::uint8_t media = 0;
    };
    struct Held {
        Table<Key> blocks;          // prefix | media of each block, by its id
        Table<std::uint32_t> more;  // copies of a block beyond the first, and blocks of a prefix beyond the first
    };
    void add(Key key, Holder holder, Key medium);
    void drop(Key key, Holder holder, Key media);
    void leave(Key key, Holder holder, Key media);
    Holding* holding(Key key, Holder holder);

    std::size_t block_tokens_, max_blocks_, num_blocks_ = 0;
    Table<Holding> prefixes_;
    std::vector<std::vector<Holding>> shared_;  // by holder, ascending
    std::vector<Holder> spare_;                 // free places in it
    std::vector<Held> held_;                    // by holder
};

}  // namespace pdlink::index
