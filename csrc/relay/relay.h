// Streams of events that go from a worker's socket to a client's without Python, while there is nothing to decide.
//
// A stream is lent: its owner does not read the worker's socket meanwhile, and writes nothing to the client's. It
// comes back with the bytes that need a look, at its end, and when the client reads too slowly. Chunks are passed
// whole and as they are, so both sides are between two chunks whenever a stream changes hands.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/descriptor.h"

namespace pdlink::relay {

using Key = std::uint64_t;

struct Report {
    Key key;
    std::string passed;  // events that the client was sent, without the frames of their chunks
    bool over;           // the stream is its owner's again, with:
    std::string unsent;  // bytes that the client must be sent first, also in `passed`
    std::string unread;  // bytes of the worker's that nobody has looked at, perhaps none
};

class Relay {
  public:
    Relay();

    // Readable when `turn` has something to do.
    int fd() const { return ready_.get(); }

    // Sends `first` to the client and lends the stream: its key. 0 if it cannot be lent; then `unsent` is the part of
    // `first` that is yet to be sent. Keeps duplicates of both sockets: a number that is closed and used again must
    // not lead to another client.
    Key lend(int worker, int client, std::string_view first, unsigned marks, std::string& unsent);

    // Passes what is there. Reports of streams that have come back, and now and then of what others were sent.
    std::vector<Report> turn();

    // Takes a stream back now. The key must be of a stream that is lent.
    Report take(Key key);

    // When a stream was last heard of, on CLOCK_MONOTONIC. The key must be of a stream that is lent.
    double heard_s(Key key) const;

    std::size_t num_lent() const { return streams_.size(); }

  private:
    struct Stream {
        Descriptor worker, client;
        double heard_s;
        unsigned marks;  // that bring it back
        std::string passed;
        std::string part;  // of a chunk whose rest has not come
    };

    // False if the stream comes back, with `unread` and `unsent`.
    bool pass(Stream& stream, std::string& unread, std::string& unsent);
    Report end(Key key, std::string unread, std::string unsent);

    Descriptor ready_;
    std::unordered_map<Key, Stream> streams_;
    Key last_ = 0;
    std::vector<char> buffer_;
};

}  // namespace pdlink::relay
