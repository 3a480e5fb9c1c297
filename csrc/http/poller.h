// Sockets that are read on the thread of an event loop, in one native turn for all that have something.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/descriptor.h"

namespace pdlink::http {

// Has a socket that is read.
class Reader {
  public:
    virtual ~Reader() = default;

    // Bytes came; they are valid during the call.
    virtual void came(std::string_view bytes) = 0;

    // The other side sends no more (0), or the connection broke (errno).
    virtual void ended(int error) = 0;
};

// Not for threads: all calls, and those to readers, are in one.
class SocketPoller {
  public:
    using Key = std::uint64_t;

    SocketPoller();

    // Readable when there is something to read.
    int fd() const { return ready_.get(); }

    // The socket stays the caller's. The key is never used again.
    Key watch(int socket, Reader& reader);

    // From now on the reader hears nothing. The socket must still be open. Nothing for a key that is not watched.
    void unwatch(Key key);

    // Reads once from each socket that has something, 64 of them at most. If a reader throws, the others have their
    // turn in the next call.
    void turn();

  private:
    struct Watched {
        int socket;
        Reader* reader;
    };

    Descriptor ready_;
    std::unordered_map<Key, Watched> watched_;
    Key last_ = 0;
    std::vector<char> buffer_;
};

}  // namespace pdlink::http
