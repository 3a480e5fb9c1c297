#include "index/held.h"

#include <algorithm>
#include <utility>

namespace pdlink::index {

const Share* Held::find(Holder worker) const {
    const auto at = std::ranges::lower_bound(shares, worker, {}, &Share::worker);
    return at != shares.end() && at->worker == worker ? &*at : nullptr;
}

double Held::most() const {
    double found = 0;
    for (const Share& share : shares) found = std::max(found, share.tokens);
    return found;
}

void Publishers::of(Holder publisher, std::vector<Holder> workers, bool shared) {
    if (publisher >= of_.size()) of_.resize(publisher + 1);
    of_[publisher] = {std::move(workers), shared};
}

Held Publishers::held(std::span<Prefixes> by_size, Key root, std::span<const std::uint32_t> tokens) {
    struct Said {
        double tokens, loading;
        Holder publisher;
    };
    std::vector<Said> said;
    for (Prefixes& prefixes : by_size)
        for (const auto& [publisher, by_medium] : prefixes.lookup(root, tokens)) {
            if (publisher >= of_.size()) continue;
            Said one{0, 0, publisher};
            for (std::size_t medium = 0; medium < kNumMedia; ++medium) {
                one.tokens += static_cast<double>(by_medium[medium]);
                one.loading += static_cast<double>(by_medium[medium]) * loading_[medium];
            }
            if (of_[publisher].shared) one.loading = std::max(one.loading, one.tokens * loading_.back());
            said.push_back(one);
        }
    std::ranges::sort(said, {}, &Said::tokens);
    std::vector<Share> shares;
    for (const Said& one : said)
        for (const Holder worker : of_[one.publisher].workers) shares.push_back({worker, one.tokens, one.loading});
    // Of one worker the least comes first: what another publisher says adds what is beyond it.
    std::ranges::stable_sort(shares, {}, &Share::worker);
    std::size_t num = 0;
    for (const Share next : shares) {
        if (!num || shares[num - 1].worker != next.worker) {
            shares[num++] = next;
            continue;
        }
        Share& share = shares[num - 1];
        const double beyond = next.tokens - share.tokens;
        share.loading = std::min(next.loading, share.loading + beyond * next.loading / next.tokens);
        share.tokens = next.tokens;
    }
    shares.resize(num);
    return {std::move(shares)};
}

}  // namespace pdlink::index
