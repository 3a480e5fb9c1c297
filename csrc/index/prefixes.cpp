#include "index/prefixes.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace pdlink::index {
namespace {

constexpr std::uint64_t kOdd = 0xA0761D6478BD642Fu, kStep = 0xE7037ED1A0B428DBu;  // wyhash's constants
constexpr std::size_t kBatch = 32;  // blocks that are folded before the first of them is looked up

std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

Id nonzero(Id id) { return id ? id : 1; }

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

std::size_t Prefixes::stored(Holder holder, Key medium, std::span<const Id> ids, const Id* parent, Key root,
                             std::span<const std::uint32_t> tokens) {
    if (holder >= held_.size()) held_.resize(holder + 1);
    Table<Key>& held = held_[holder];
    Key key = root;
    if (parent) {
        const Key* found = held.find(nonzero(*parent));
        if (!found) return 0;
        key = *found & ~kMedia;
    }
    std::size_t taken = 0;
    for (; taken < ids.size() && (taken + 1) * block_tokens_ <= tokens.size(); ++taken) {
        if (num_blocks_ >= max_blocks_) break;
        key = follow(key, tokens.subspan(taken * block_tokens_, block_tokens_));
        const auto [known, fresh] = held.put(nonzero(ids[taken]), key | medium);
        if (fresh) {
            ++num_blocks_;
        } else if ((*known & ~kMedia) == key) {
            *known |= medium;
            continue;
        } else {
            drop(*known & ~kMedia, holder);
            *known = key | medium;
        }
        add(key, holder);
    }
    return taken;
}

void Prefixes::removed(Holder holder, Key medium, std::span<const Id> ids) {
    if (holder >= held_.size()) return;
    Table<Key>& held = held_[holder];
    for (const Id id : ids) {
        Key* known = held.find(nonzero(id));
        if (!known) continue;
        *known &= ~medium;
        if (*known & kMedia) continue;
        drop(*known, holder);
        held.erase(nonzero(id));
        --num_blocks_;
    }
}

void Prefixes::cleared(Holder holder) {
    if (holder >= held_.size()) return;
    num_blocks_ -= held_[holder].size();
    held_[holder].each([&](Id, Key known) { drop(known & ~kMedia, holder); });
    held_[holder] = {};
}

std::vector<std::pair<Holder, std::size_t>> Prefixes::lookup(Key root, std::span<const std::uint32_t> tokens) {
    std::vector<std::pair<Holder, std::size_t>> found;
    std::vector<Holder> active, still;
    std::array<Key, kBatch> keys;
    const std::size_t num_blocks = tokens.size() / block_tokens_;
    Key key = root;
    for (std::size_t block = 0; block < num_blocks; ++block) {
        if (block % kBatch == 0)
            for (std::size_t next = block; next < std::min(block + kBatch, num_blocks); ++next) {
                keys[next - block] = key = follow(key, tokens.subspan(next * block_tokens_, block_tokens_));
                prefixes_.prefetch(key);
            }
        const Owners* of = prefixes_.find(keys[block % kBatch]);
        const std::span<const Holder> have = of ? owners(*of) : std::span<const Holder>{};
        if (block == 0) {
            active.assign(have.begin(), have.end());
        } else if (active.size() != have.size() || !std::equal(active.begin(), active.end(), have.begin())) {
            still.clear();
            std::set_intersection(active.begin(), active.end(), have.begin(), have.end(), std::back_inserter(still));
            auto stays = still.begin();
            for (const Holder holder : active) {
                if (stays != still.end() && *stays == holder)
                    ++stays;
                else
                    found.emplace_back(holder, block * block_tokens_);
            }
            active.swap(still);
        }
        if (active.empty()) return found;
    }
    for (const Holder holder : active) found.emplace_back(holder, num_blocks * block_tokens_);
    return found;
}

std::size_t Prefixes::nbytes() const {
    std::size_t sum = prefixes_.nbytes();
    for (const Table<Key>& held : held_) sum += held.nbytes();
    for (const std::vector<Holder>& list : shared_) sum += sizeof list + list.capacity() * sizeof(Holder);
    return sum;
}

void Prefixes::add(Key key, Holder holder) {
    const auto [of, fresh] = prefixes_.put(key, {holder, false});
    if (fresh || (!of->many && of->value == holder)) return;
    if (!of->many) {
        std::uint32_t list = static_cast<std::uint32_t>(shared_.size());
        if (spare_.empty()) {
            shared_.emplace_back();
        } else {
            list = spare_.back();
            spare_.pop_back();
        }
        shared_[list] = {of->value};
        *of = {list, true};
    }
    std::vector<Holder>& list = shared_[of->value];
    const auto at = std::lower_bound(list.begin(), list.end(), holder);
    if (at == list.end() || *at != holder) list.insert(at, holder);
}

void Prefixes::drop(Key key, Holder holder) {
    Owners* of = prefixes_.find(key);
    if (!of) return;
    if (!of->many) {
        if (of->value == holder) prefixes_.erase(key);
        return;
    }
    std::vector<Holder>& list = shared_[of->value];
    const auto at = std::lower_bound(list.begin(), list.end(), holder);
    if (at != list.end() && *at == holder) list.erase(at);
    if (list.size() == 1) {
        spare_.push_back(of->value);
        const Holder last = list.front();
        list = {};
        *of = {last, false};
    }
}

}  // namespace pdlink::index
