// Sockets that are read on the thread of an event loop, in one native turn for all that have something. The loop
// waits here for its own sockets, too.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <bitset>
#include <cstdint>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/descriptor.h"

namespace pdlink::http {

// Has a socket that is read.
class Reader {
  public:
    virtual ~Reader() = default;

    // Bytes came; they are valid during the call. Whether that was told on.
    virtual bool came(std::string_view bytes) = 0;

    // It most likely tells nobody, so it is read before those that do: they take their time.
    virtual bool is_quick() const { return false; }

    // Asked after `came`: whether what comes in the next `kRestMs` is read together. A read, a write to the client
    // and a wake cost more than the bytes of an event.
    virtual bool rests() const { return false; }

    // The other side sends no more (0), or the connection broke (errno).
    virtual void ended(int error) = 0;
};

constexpr int kRestMs = 1;
constexpr std::size_t kMostReady = 64;  // sockets of one turn

// Not for threads: all calls, and those to readers, are in one.
class SocketPoller {
  public:
    using Key = std::uint64_t;

    // What a wait has found.
    struct Ready {
        std::array<epoll_event, kMostReady> events;
        int num = 0;
    };

    struct Turn {
        bool told = false;    // a reader told on what it has read
        bool others = false;  // sockets of others have something
    };

    // loop: an epoll with the sockets of others, which its owner reads, and keeps open; -1 for none.
    explicit SocketPoller(int loop = -1);

    // Readable when there is something to read.
    int fd() const { return ready_.get(); }

    // The socket stays the caller's. The key is never used again.
    Key watch(int socket, Reader& reader);

    // From now on the reader hears nothing. The socket must still be open. Nothing for a key that is not watched.
    void unwatch(Key key);

    // Before each wait: ends the rests that are over, and says how long the wait may take, which is to take
    // `most_ms`.
    int end_rests(int most_ms);

    // Waits until there is something, so many ms at most; without end for -1. A signal ends it. For any thread.
    Ready wait(int most_ms) const;

    // Reads once from each socket that has something, of quick readers first. What is behind a reader that throws has
    // its turn in the next call.
    Turn turn(const Ready& ready);

  private:
    struct Watched {
        int socket;
        Reader* reader;
    };

    struct Resting {
        Key key;
        double until_s;
    };

    void add(int socket, Key key);
    // As of epoll_ctl.
    int control(int how, int socket, Key key, std::uint32_t events) const;
    bool read(Key key, Watched watched);

    Descriptor ready_;
    std::unordered_map<Key, Watched> watched_;
    std::deque<Resting> resting_;  // the one that ends first is first
    Key last_ = 0;
    std::vector<char> buffer_;
};

}  // namespace pdlink::http
