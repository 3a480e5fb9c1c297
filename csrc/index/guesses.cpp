#include "index/guesses.h"

#include <algorithm>

#include "index/prefixes.h"

namespace pdlink::index {
namespace {

// A key as `Table` takes it, where 0 is no key.
Key nonzero(Key key) { return key + 1 ? key + 1 : 1; }

}  // namespace

std::vector<Key> keys_of(Key seed, std::span<const std::uint8_t> data, std::size_t piece_nbytes) {
    std::vector<Key> keys;
    keys.reserve(data.size() / piece_nbytes);
    for (std::size_t begin = 0; begin + piece_nbytes <= data.size(); begin += piece_nbytes)
        keys.push_back(seed = follow_long(seed, data.subspan(begin, piece_nbytes)));
    return keys;
}

std::size_t Guesses::note(Holder holder, std::span<const Key> keys, std::size_t most) {
    if (holder >= sent_.size()) sent_.resize(holder + 1);
    if (!sent_[holder]) sent_[holder] = std::make_unique<Sent>();
    Sent& sent = *sent_[holder];
    std::size_t had = 0;
    for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
        const Key name = nonzero(*key);
        const auto [at, fresh] = sent.at.put(name, 0);
        if (!fresh) {
            ++had;
            sent.unlink(*at);
            sent.append(*at);
            continue;
        }
        if (sent.spare.empty()) {
            *at = static_cast<std::uint32_t>(sent.ring.size());
            sent.ring.emplace_back();
        } else {
            *at = sent.spare.back();
            sent.spare.pop_back();
        }
        sent.ring[*at].key = name;
        sent.append(*at);
        holders_.add(name, {holder, 1});
        ++num_keys_;
    }
    while (sent.at.size() > most) drop_oldest(holder, sent);
    while (num_keys_ > max_keys_) shrink();
    return had;
}

void Guesses::forget(Holder holder) {
    if (holder >= sent_.size() || !sent_[holder]) return;
    while (sent_[holder]->at.size()) drop_oldest(holder, *sent_[holder]);
    sent_[holder].reset();
}

void Guesses::leading(std::span<const Key> keys, std::span<const WorkerLoad* const> rows, std::span<double> found) {
    depths_.resize(sent_.size());
    std::vector<Holder> touched;
    for (std::size_t at = 0; at < keys.size();) {
        const std::span<const Holding> have = holders_.of(nonzero(keys[at]));
        if (have.empty()) break;
        std::size_t last = at, beyond = keys.size();
        while (beyond - last > 1) {
            const std::size_t middle = (last + beyond) / 2;
            (holders_.of(nonzero(keys[middle])).size() == have.size() ? last : beyond) = middle;
        }
        at = last + 1;
        for (const Holding& each : have) {
            depths_[each.holder] = at;
            touched.push_back(each.holder);
        }
    }
    for (std::size_t row = 0; row < rows.size(); ++row) {
        const Holder number = rows[row]->number;
        found[row] = number < depths_.size() ? static_cast<double>(depths_[number]) : 0.0;
    }
    for (const Holder each : touched) depths_[each] = 0;
}

std::size_t Guesses::nbytes() const {
    std::size_t sum = holders_.nbytes();
    for (const auto& sent : sent_)
        if (sent) sum += sent->ring.capacity() * sizeof(Sent::Link) + sent->at.nbytes();
    return sum;
}

void Guesses::Sent::unlink(std::uint32_t link) {
    ring[ring[link].before].after = ring[link].after;
    ring[ring[link].after].before = ring[link].before;
}

void Guesses::Sent::append(std::uint32_t link) {
    ring[link].before = ring[0].before;
    ring[link].after = 0;
    ring[ring[0].before].after = link;
    ring[0].before = link;
}

// The holder has a key.
void Guesses::drop_oldest(Holder holder, Sent& sent) {
    const std::uint32_t oldest = sent.ring[0].after;
    const Key key = sent.ring[oldest].key;
    sent.unlink(oldest);
    sent.spare.push_back(oldest);
    sent.at.erase(key);
    holders_.remove(key, holder);
    --num_keys_;
}

// Halve the share of the holder that has most.
void Guesses::shrink() {
    const auto size = [](const std::unique_ptr<Sent>& sent) { return sent ? sent->at.size() : 0; };
    const auto most = std::ranges::max_element(sent_, {}, size);
    for (std::size_t left = (size(*most) + 1) / 2; left; --left)
        drop_oldest(static_cast<Holder>(most - sent_.begin()), **most);
}

}  // namespace pdlink::index
