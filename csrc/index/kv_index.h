// Which worker has the KV of which prompt, by the events that the workers publish.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "index/events.h"
#include "index/held.h"
#include "index/prefixes.h"

namespace pdlink::index {

// Of all workers of one proxy; a publisher is a number as in `Prefixes`. For one thread.
class KVIndex {
  public:
    // max_sizes: block sizes that are told apart; events about others are passed over.
    KVIndex(std::size_t max_blocks, std::size_t max_sizes, std::array<double, kNumMedia> loading)
        : max_blocks_(max_blocks), max_sizes_(max_sizes), publishers_(loading) {}

    // Notes the next events that are about this model: those of 64 KB, or one that is larger. Whether there are more.
    // Throws std::invalid_argument for other bytes.
    //
    // scope: what the publisher calls this model, for one that has KV of several; it says so of first blocks, and
    // blocks after one that is not known here are passed over.
    bool apply(Holder publisher, std::string_view model, std::string_view scope, Events& events);
    // It has nothing, or nobody knows what.
    void forget(Holder publisher);
    void assign(Holder publisher, std::vector<Holder> workers, bool shared) {
        publishers_.of(publisher, std::move(workers), shared);
    }
    // What each worker has of a prompt with these tokens. extra: name of a LoRA, salt.
    Held held(std::string_view model, std::span<const std::string_view> extra, std::span<const std::uint32_t> tokens);

    std::size_t num_blocks() const;  // of all publishers
    std::size_t nbytes() const;

  private:
    void stored(Holder publisher, std::string_view model, std::string_view scope, const Event& event);
    Prefixes* of_size(std::size_t block_tokens);

    std::size_t max_blocks_, max_sizes_;
    std::vector<Prefixes> by_size_;
    Publishers publishers_;
    struct Group {
        bool known = false;
        std::optional<std::uint64_t> number;
    };
    std::vector<Group> groups_;  // by publisher, of the layers that count: the first that keeps whole prefixes
};

}  // namespace pdlink::index
