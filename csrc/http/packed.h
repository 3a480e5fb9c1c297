// Events of a stream, remembered in little memory: each is written as its differences from the one before, which are
// its text and its token ids.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pdlink::http {

class Packed {
  public:
    // Remembers these bytes. Whole events take least.
    void add(std::string_view data);

    // All bytes that were added; forgets them.
    std::string take();

    std::size_t nbytes() const { return codes_.capacity() + last_.capacity(); }

  private:
    void write(std::string_view event);
    void put(std::size_t number);

    // For each event: its size, then until there is so much of it: how much of the last one is copied, how much of
    // that is then passed over, and a piece of its own, with its size before it.
    std::string codes_;
    std::string last_;
};

// How many events these bytes end: empty lines of them.
std::size_t num_events(std::string_view data);

}  // namespace pdlink::http
