// The blocks of our regions that each peer may write now: only the blocks offered to it, not the whole pool.
//
// One word for each block holds the number of the peer that it is open to: one peer at most. Bands give the bytes of
// blocks: in a band of a region, block `first` + b has the bytes [begin + b * stride, begin + b * stride + extent),
// for b below `count`. Groups of layers with memory of their own have blocks of their own, behind each other.
//
// Any thread opens and closes blocks; the placing thread looks them up.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tcp/wire_runs.h"

namespace pdlink::tcp {

struct Band {
    std::uint64_t region;
    std::uint64_t begin;
    std::uint64_t stride;
    std::uint64_t extent;  // at most `stride`
    std::uint64_t first;
    std::uint64_t count;  // at least 1
};

class Guard {
  public:
    static constexpr std::uint32_t kNobody = 0;

    // bands: in order of region and begin, not overlapping. Throws std::invalid_argument.
    Guard(std::vector<Band> bands, std::uint64_t num_blocks)
        : bands_(std::move(bands)), num_blocks_(num_blocks), open_to_(new std::atomic<std::uint32_t>[num_blocks]) {
        const Band* before = nullptr;
        for (const Band& band : bands_) {
            if (band.extent < 1 || band.extent > band.stride || num_blocks > (std::uint64_t{1} << 62) / band.stride ||
                band.begin > std::uint64_t{1} << 62 || band.count < 1 || band.count > num_blocks ||
                band.first > num_blocks - band.count)
                throw std::invalid_argument("a band of blocks is malformed");
            if (before &&
                (before->region > band.region || (before->region == band.region && end(*before) > band.begin)))
                throw std::invalid_argument("bands of blocks overlap or are out of order");
            before = &band;
        }
        for (std::uint64_t block = 0; block < num_blocks_; ++block) open_to_[block] = kNobody;
    }

    // Throws std::invalid_argument for a block that does not exist, before anything is changed.
    void open(std::uint32_t peer, std::span<const std::int64_t> blocks) {
        check(blocks);
        for (const std::int64_t block : blocks) at(block).store(peer, std::memory_order_release);
    }

    // Blocks that are open to another peer stay open to it.
    void close(std::uint32_t peer, std::span<const std::int64_t> blocks) {
        check(blocks);
        for (const std::int64_t block : blocks) {
            std::uint32_t expected = peer;
            at(block).compare_exchange_strong(expected, kNobody);
        }
    }

    // Whether every byte of a list is in blocks that are open to this peer; `why` names the first that is not.
    bool all_open(std::span<const WireRun> list, std::uint32_t peer, std::string& why) const {
        Found found;
        for (const WireRun& run : list) {
            // Neighbours in the list are usually in one block: 1 ns instead of 25.
            if (run.region == found.region && run.offset >= found.from && run.offset < found.to &&
                run.nbytes <= found.to - run.offset)
                continue;
            if (is_open(run, peer, found)) continue;
            why = std::to_string(run.nbytes) + " bytes at " + std::to_string(run.offset) + " of region " +
                  std::to_string(run.region) + " are not in blocks that are offered to it";
            return false;
        }
        return true;
    }

  private:
    static std::uint64_t end(const Band& band) { return band.begin + (band.count - 1) * band.stride + band.extent; }

    std::atomic<std::uint32_t>& at(std::int64_t block) { return open_to_[static_cast<std::uint64_t>(block)]; }

    void check(std::span<const std::int64_t> blocks) const {
        for (const std::int64_t block : blocks)
            if (static_cast<std::uint64_t>(block) >= num_blocks_)
                throw std::invalid_argument("no block " + std::to_string(block) + " among " +
                                            std::to_string(num_blocks_));
    }

    static bool holds(const Band* band, std::uint64_t region, std::uint64_t offset) {
        return band && band->region == region && band->begin <= offset && offset < end(*band);
    }

    const Band* find(std::uint64_t region, std::uint64_t offset) const {
        const auto after = std::upper_bound(
            bands_.begin(), bands_.end(), std::pair(region, offset),
            [](const auto& place, const Band& band) { return place < std::pair(band.region, band.begin); });
        const Band* band = after == bands_.begin() ? nullptr : &*std::prev(after);
        return holds(band, region, offset) ? band : nullptr;
    }

    // Where the last run was.
    struct Found {
        const Band* band = nullptr;
        std::uint64_t region = 0;
        std::uint64_t from = 0;  // of the last block in it, which is open
        std::uint64_t to = 0;
    };

    // A run that was joined may go through several blocks, and reach into the next band.
    bool is_open(const WireRun& run, std::uint32_t peer, Found& found) const {
        std::uint64_t offset = run.offset, left = run.nbytes;
        while (left > 0) {
            if (!holds(found.band, run.region, offset)) found.band = find(run.region, offset);
            if (!found.band) return false;
            const Band& band = *found.band;
            const std::uint64_t block = (offset - band.begin) / band.stride;
            found.region = run.region;
            found.from = band.begin + block * band.stride;
            found.to = found.from + band.extent;
            if (offset >= found.to || open_to_[band.first + block].load(std::memory_order_acquire) != peer) {
                found = {};
                return false;
            }
            const std::uint64_t part = std::min(left, found.to - offset);
            offset += part;
            left -= part;
        }
        return true;
    }

    const std::vector<Band> bands_;
    const std::uint64_t num_blocks_;
    const std::unique_ptr<std::atomic<std::uint32_t>[]> open_to_;
};

}  // namespace pdlink::tcp
