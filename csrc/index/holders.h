// Which holders have which prefix. Most prefixes have one holder, and cost no more than that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/table.h"

namespace pdlink::index {

using Key = std::uint64_t;     // names a prefix: the fold of all that it consists of. Not 0
using Holder = std::uint32_t;  // a worker

// One holder of a prefix, and the media in which it has it, at least one.
struct Holding {
    Holder holder = 0;
    std::uint8_t media = 0;
};

// For one thread.
class Holders {
  public:
    // By holder, ascending; until something changes.
    std::span<const Holding> of(Key key);
    // What this holder has of the prefix; null if it has nothing.
    Holding* find(Key key, Holder holder);
    // `fresh.holder` has nothing of the prefix yet.
    void add(Key key, Holding fresh);
    // The holder has it, and has it no more.
    void remove(Key key, Holder holder);

    void prefetch(Key key) const { of_.prefetch(key); }
    std::size_t nbytes() const;

  private:
    Table<Holding> of_;  // without media, `holder` is the number of a list of several in `shared_`
    std::vector<std::vector<Holding>> shared_;
    std::vector<Holder> spare_;  // free places in it
};

}  // namespace pdlink::index
