// A hash table of 64-bit keys, for an index of millions of blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pdlink::index {

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

}  // namespace pdlink::index
