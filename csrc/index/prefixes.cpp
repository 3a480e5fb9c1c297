#include "index/prefixes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace pdlink::index {
namespace {

constexpr std::uint64_t kOdd = 0xA0761D6478BD642Fu, kStep = 0xE7037ED1A0B428DBu;  // wyhash's constants
constexpr std::size_t kBatch = 32;  // blocks that are folded before the first of them is looked up

std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

Id nonzero(Id id) { return id ? id : 1; }

Key prefix_of(Key known) { return known & ~kMedia; }

// Where `Held::more` counts the copies of a block in a medium, and the blocks of a prefix there.
std::uint64_t copies_of(Id id, Key medium) { return nonzero(fold(id ^ kOdd, medium ^ kStep)); }
std::uint64_t blocks_of(Key prefix, Key medium) { return nonzero(fold(prefix ^ kStep, medium ^ kOdd)); }

// Whether there was one more.
bool take(Table<std::uint32_t>& more, std::uint64_t what) {
    std::uint32_t* const num = more.find(what);
    if (!num) return false;
    if (--*num == 0) more.erase(what);
    return true;
}

}  // namespace

Key follow(Key parent, std::span<const std::uint32_t> tokens) {
    Key key = parent;
    std::size_t at = 0;
    for (; at + 1 < tokens.size(); at += 2)
        key = fold(key ^ kOdd ^ (tokens[at] | std::uint64_t{tokens[at + 1]} << 32), key + kStep);
    if (at < tokens.size()) key = fold(key ^ kOdd ^ tokens[at], key + kStep + 1);
    key &= ~kMedia;
    return key ? key : kMedia + 1;
}

Key follow_long(Key parent, std::span<const std::uint8_t> data) {
    constexpr std::size_t kLanes = 4, kWide = sizeof(std::uint64_t);
    std::array<std::uint64_t, kLanes> lanes = {1, 2, 3, 4};
    for (; data.size() >= kLanes * kWide; data = data.subspan(kLanes * kWide)) {
        std::array<std::uint64_t, kLanes> next;
        std::memcpy(next.data(), data.data(), sizeof next);
        for (std::size_t lane = 0; lane < kLanes; ++lane)
            lanes[lane] = fold(lanes[lane] ^ kOdd ^ next[lane], lanes[lane] + kStep);
    }
    std::array<std::uint32_t, kLanes * 4> words{};  // the lanes, and what is left of the data
    std::memcpy(words.data(), lanes.data(), sizeof lanes);
    std::memcpy(words.data() + kLanes * 2, data.data(), data.size());
    return follow(parent, std::span(words).first(kLanes * 2 + data.size() / sizeof(std::uint32_t)));
}

std::size_t Prefixes::stored(Holder holder, Key medium, std::span<const Id> ids, const Id* parent, Key root,
                             std::span<const std::uint32_t> tokens) {
    if (holder >= held_.size()) held_.resize(holder + 1);
    Held& held = held_[holder];
    Key key = root;
    if (parent) {
        const Key* found = held.blocks.find(nonzero(*parent));
        if (!found) return 0;
        key = prefix_of(*found);
    }
    std::size_t taken = 0;
    for (; taken < ids.size() && (taken + 1) * block_tokens_ <= tokens.size(); ++taken) {
        if (num_blocks_ >= max_blocks_) break;
        key = follow(key, tokens.subspan(taken * block_tokens_, block_tokens_));
        const Id id = nonzero(ids[taken]);
        const auto [known, fresh] = held.blocks.put(id, key | medium);
        if (fresh) {
            ++num_blocks_;
        } else if (prefix_of(*known) != key) {  // the name has been given to another block
            for (Key bit = 1; bit & kMedia; bit <<= 1) held.more.erase(copies_of(id, bit));
            drop(prefix_of(*known), holder, *known & kMedia);
            *known = key | medium;
        } else if (*known & medium) {
            if (parent) ++*held.more.put(copies_of(id, medium), 0).first;
            continue;
        } else {
            *known |= medium;
        }
        add(key, holder, medium);
    }
    return taken;
}

void Prefixes::removed(Holder holder, Key medium, std::span<const Id> ids) {
    if (holder >= held_.size()) return;
    Held& held = held_[holder];
    for (const Id each : ids) {
        const Id id = nonzero(each);
        Key* const known = held.blocks.find(id);
        if (!known || !(*known & medium) || take(held.more, copies_of(id, medium))) continue;
        *known &= ~medium;
        drop(prefix_of(*known), holder, medium);
        if (*known & kMedia) continue;
        held.blocks.erase(id);
        --num_blocks_;
    }
}

void Prefixes::cleared(Holder holder) {
    if (holder >= held_.size()) return;
    num_blocks_ -= held_[holder].blocks.size();
    held_[holder].blocks.each([&](Id, Key known) { leave(prefix_of(known), holder, kMedia); });
    held_[holder] = {};
}

std::vector<Prefixes::Found> Prefixes::lookup(Key root, std::span<const std::uint32_t> tokens) {
    std::vector<Found> found, active;
    std::array<Key, kBatch> keys;
    const std::size_t num_blocks = tokens.size() / block_tokens_;
    Key key = root;
    for (std::size_t block = 0; block < num_blocks; ++block) {
        if (block % kBatch == 0) {
            if (block == 0 && prefixes_.of(follow(key, tokens.first(block_tokens_))).empty()) return found;
            for (std::size_t next = block; next < std::min(block + kBatch, num_blocks); ++next) {
                keys[next - block] = key = follow(key, tokens.subspan(next * block_tokens_, block_tokens_));
                prefixes_.prefetch(key);
            }
        }
        const std::span<const Holding> have = prefixes_.of(keys[block % kBatch]);
        if (block == 0)
            for (const Holding& each : have) active.push_back({each.holder, {}});
        // Both are by holder, ascending: the holders of this block, too, stay.
        auto at = have.begin();
        std::size_t still = 0;
        for (Found& each : active) {
            while (at != have.end() && at->holder < each.first) ++at;
            if (at == have.end() || at->holder != each.first) {
                found.push_back(each);
                continue;
            }
            each.second[std::countr_zero(at->media)] += block_tokens_;
            active[still++] = each;
        }
        active.resize(still);
        if (active.empty()) return found;
    }
    found.insert(found.end(), active.begin(), active.end());
    return found;
}

std::size_t Prefixes::nbytes() const {
    std::size_t sum = prefixes_.nbytes();
    for (const Held& held : held_) sum += held.blocks.nbytes() + held.more.nbytes();
    return sum;
}

// Another block of the holder is this prefix.
void Prefixes::add(Key key, Holder holder, Key medium) {
    if (Holding* const mine = prefixes_.find(key, holder)) {
        if (mine->media & medium) ++*held_[holder].more.put(blocks_of(key, medium), 0).first;
        mine->media |= medium;
    } else {
        prefixes_.add(key, {holder, static_cast<std::uint8_t>(medium)});
    }
}

// A block of the holder is not this prefix any more, in these media. Others of it may be.
void Prefixes::drop(Key key, Holder holder, Key media) {
    for (Key bit = 1; bit & kMedia; bit <<= 1)
        if ((media & bit) && !take(held_[holder].more, blocks_of(key, bit))) leave(key, holder, bit);
}

// The holder has the prefix in these media no more.
void Prefixes::leave(Key key, Holder holder, Key media) {
    Holding* const mine = prefixes_.find(key, holder);
    if (!mine) return;
    const std::uint8_t left = mine->media & ~static_cast<std::uint8_t>(media);
    if (left) {
        mine->media = left;
    } else {
        prefixes_.remove(key, holder);
    }
}

}  // namespace pdlink::index
