#include "index/holders.h"

#include <algorithm>

namespace pdlink::index {

std::span<const Holding> Holders::of(Key key) {
    const Holding* const only = of_.find(key);
    if (!only) return {};
    return only->media ? std::span(only, 1) : std::span<const Holding>(shared_[only->holder]);
}

Holding* Holders::find(Key key, Holder holder) {
    Holding* const only = of_.find(key);
    if (!only) return nullptr;
    if (only->media) return only->holder == holder ? only : nullptr;
    std::vector<Holding>& list = shared_[only->holder];
    const auto at = std::ranges::lower_bound(list, holder, {}, &Holding::holder);
    return at != list.end() && at->holder == holder ? &*at : nullptr;
}

void Holders::add(Key key, Holding fresh) {
    const auto [only, alone] = of_.put(key, fresh);
    if (alone) return;
    if (only->media) {
        Holder number = static_cast<Holder>(shared_.size());
        if (spare_.empty()) {
            shared_.emplace_back();
        } else {
            number = spare_.back();
            spare_.pop_back();
        }
        shared_[number] = {*only};
        *only = {number, 0};
    }
    std::vector<Holding>& list = shared_[only->holder];
    list.insert(std::ranges::lower_bound(list, fresh.holder, {}, &Holding::holder), fresh);
}

void Holders::remove(Key key, Holder holder) {
    Holding* const only = of_.find(key);
    if (only->media) {
        of_.erase(key);
        return;
    }
    const Holder number = only->holder;
    std::vector<Holding>& list = shared_[number];
    list.erase(std::ranges::lower_bound(list, holder, {}, &Holding::holder));
    if (list.size() > 1) return;
    *only = list.front();
    list = {};
    spare_.push_back(number);
}

std::size_t Holders::nbytes() const {
    std::size_t sum = of_.nbytes();
    for (const std::vector<Holding>& list : shared_) sum += sizeof list + list.capacity() * sizeof(Holding);
    return sum;
}

}  // namespace pdlink::index
