// Which worker was sent which beginning of a prompt: a guess of who has its KV, where nobody says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/holders.h"
#include "index/table.h"
#include "index/worker_load.h"

namespace pdlink::index {

// The names of the beginnings of `data`, each `piece_nbytes` longer than the one before; a last piece that is shorter
// has none. Quick, and without a secret, so that every router finds the same: unequal data of equal keys, which a
// stranger may look for, send a prompt where it has no KV or count its tokens wrongly; no answer depends on them.
std::vector<Key> keys_of(Key seed, std::span<const std::uint8_t> data, std::size_t piece_nbytes);

// The keys sent to each holder, the least recent forgotten first. For one thread.
//
// Keys are noted last one first, so a beginning is always newer than what follows it: who has a key has all before
// it. So the holders of a key are some of those of the key before it, and as many of them are the same ones: along a
// prompt only the keys count after which there are fewer.
class Guesses {
  public:
    // max_keys: of all holders.
    explicit Guesses(std::size_t max_keys) : max_keys_(max_keys) {}
    Guesses(const Guesses&) = delete;
    Guesses& operator=(const Guesses&) = delete;

    // The holder is sent a prompt with these keys, and keeps `most` keys. Returns how many of these it had.
    std::size_t note(Holder holder, std::span<const Key> keys, std::size_t most);
    // The holder has nothing.
    void forget(Holder holder);
    // By row: how many leading keys the worker was sent.
    void leading(std::span<const Key> keys, std::span<const WorkerLoad* const> rows, std::span<double> found);

    std::size_t num_keys() const { return num_keys_; }  // of all holders
    std::size_t nbytes() const;

  private:
    // The keys of one holder in a ring, the least recent first. Link 0 is its end, and has no key.
    struct Sent {
        struct Link {
            Key key = 0;
            std::uint32_t before = 0, after = 0;
        };
        std::vector<Link> ring{1};
        std::vector<std::uint32_t> spare;
        Table<std::uint32_t> at;

        void unlink(std::uint32_t link);
        void append(std::uint32_t link);
    };
    void drop_oldest(Holder holder, Sent& sent);
    void shrink();

    std::size_t max_keys_, num_keys_ = 0;
    Holders holders_;
    std::vector<std::unique_ptr<Sent>> sent_;  // by holder
    std::vector<std::size_t> depths_;          // by holder, in `leading`; zeros outside of it
};

}  // namespace pdlink::index
