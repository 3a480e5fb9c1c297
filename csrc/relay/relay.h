// Streams of events that go from a worker's socket to a client's without Python, while there is nothing to decide.
//
// A stream is lent: its owner does not read the worker's socket meanwhile, and writes nothing to the client's. It
// comes back with the bytes that need a look, at its end, and when the client reads too slowly. Chunks are passed
// whole and as they are, so both sides are between two chunks whenever a stream changes hands.
//
// A thread passes them: an event waits for no request that Python works on, and wakes no loop. It never needs the
// interpreter, so callers may hold that while they wait for a chunk that passes.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
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
    ~Relay();  // streams that are lent do not come back

    // Readable when there are reports.
    int fd() const { return told_.get(); }

    // Sends `first` to the client and lends the stream: its key. 0 if it cannot be lent; then `unsent` is the part of
    // `first` that is yet to be sent. Keeps duplicates of both sockets: a number that is closed and used again must
    // not lead to another client.
    Key lend(int worker, int client, std::string_view first, unsigned marks, std::string& unsent);

    // Of streams that have come back, and now and then of what others were sent.
    std::vector<Report> reports();

    // Takes a stream back now, with what is in its reports. The key must be of a stream whose last report nobody has.
    Report take(Key key);

    // When a stream was last heard of, on CLOCK_MONOTONIC; 0 of one that has come back.
    double heard_s(Key key) const;

    std::size_t num_lent() const;

  private:
    struct Stream {
        Descriptor worker, client;
        double heard_s;
        unsigned marks;  // that bring it back
        std::string passed;
        std::string part;  // of a chunk whose rest has not come
    };

    void run();
    void turn(Key key, bool broken);

    // False if the stream comes back, with `unread` and `unsent`.
    bool pass(Stream& stream, std::string& unread, std::string& unsent);
    Report end(Key key, std::string unread, std::string unsent);
    void tell(Report report);

    Descriptor ready_, told_, stop_;
    mutable std::mutex mutex_;
    // Guarded by it:
    std::unordered_map<Key, Stream> streams_;
    std::vector<Report> reports_;
    Key last_ = 0;

    std::vector<char> buffer_;  // of the thread
    std::thread thread_;
};

}  // namespace pdlink::relay
