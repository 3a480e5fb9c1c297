// What workers say that they have of one prompt.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "index/prefixes.h"

namespace pdlink::index {

struct Share {
    Holder worker;
    double tokens;   // of the prompt, from its beginning
    double loading;  // what bringing them to its device costs, in tokens computed
};

struct Held {
    std::vector<Share> shares;  // by worker, ascending

    // What this worker has; null if it has nothing.
    const Share* find(Holder worker) const;
    double most() const;  // tokens
};

// Whose blocks a publisher tells: those of one worker, or of several that have a store in common. For one thread.
class Publishers {
  public:
    // loading: by medium, the quickest first, what bringing a token to the device costs, in tokens computed.
    explicit Publishers(std::array<double, kNumMedia> loading) : loading_(loading) {}

    // The blocks of this holder are of these workers. shared: of a store, which is near none of them.
    void of(Holder publisher, std::vector<Holder> workers, bool shared);
    // What each worker has by all that is told, in blocks of these sizes. What one publisher says beyond another one
    // costs what it costs by the former.
    Held held(std::span<Prefixes> by_size, Key root, std::span<const std::uint32_t> tokens);

  private:
    std::array<double, kNumMedia> loading_;
    struct Of {
        std::vector<Holder> workers;
        bool shared = false;
    };
    std::vector<Of> of_;  // by publisher
};

}  // namespace pdlink::index
