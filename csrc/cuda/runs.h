// The kernel behind a one-sided put: a list of byte runs between any addresses, in one launch.
//
// A run is cut into segments of equal length and every segment is a share of the work: one warp's, whose lanes touch
// consecutive words. A grid of fewer warps than shares takes them in turns, so that it can leave room for others. The
// widest word that both addresses of a run allow is used for it, and single bytes for what is left over.
#pragma once

#include <cstdint>

#include "cuda/access.h"
#include "cuda/divide.h"
#include "cuda/reshape.h"

namespace pdlink::cuda {

constexpr std::uint32_t kLanes = 32;

struct CopyRuns {
    std::uint64_t runs = 0;            // address of [num_runs][3] uint64: source address, destination address, nbytes
    std::uint32_t num_shares = 0;      // runs x segments, below 2^31
    Divider segments;                  // per run
    std::uint64_t segment_nbytes = 0;  // a multiple of 16
};

template <int kNbytes>
PDLINK_HD void copy_words(std::uint64_t src, std::uint64_t dst, std::uint64_t nbytes, std::uint32_t lane) {
    const std::uint64_t whole = nbytes / kNbytes * kNbytes;
    std::uint64_t at = std::uint64_t{lane} * kNbytes;
    constexpr std::uint64_t kStep = std::uint64_t{kLanes} * kNbytes;
    for (; at + 3 * kStep < whole; at += 4 * kStep) {
        Word<kNbytes> words[4];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int i = 0; i < 4; ++i) words[i] = load(src + at + i * kStep, Word<kNbytes>{});
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int i = 0; i < 4; ++i) store(dst + at + i * kStep, words[i]);
    }
    for (; at < whole; at += kStep) store(dst + at, load(src + at, Word<kNbytes>{}));
    for (at = whole + lane; at < nbytes; at += kLanes) store(dst + at, load(src + at, Word<1>{}));
}

// One lane of one warp.
PDLINK_HD void copy_share(const CopyRuns& list, std::uint32_t share, std::uint32_t lane) {
    const std::uint32_t run = list.segments.divide(share);
    const std::uint64_t start = (share - run * list.segments.divisor()) * list.segment_nbytes;
    const std::uint64_t entry = list.runs + std::uint64_t{run} * 24;
    // All three before any is looked at: the list may lie in host memory, a microsecond away.
    const std::uint64_t src = static_cast<std::uint64_t>(load_int64(entry)) + start;
    const std::uint64_t dst = static_cast<std::uint64_t>(load_int64(entry + 8)) + start;
    const std::uint64_t left = static_cast<std::uint64_t>(load_int64(entry + 16)) - start;
    if (static_cast<std::int64_t>(left) <= 0) return;
    const std::uint64_t nbytes = left < list.segment_nbytes ? left : list.segment_nbytes;
    const std::uint64_t both = src | dst;
    if (both % 16 == 0)
        copy_words<16>(src, dst, nbytes, lane);
    else if (both % 4 == 0)
        copy_words<4>(src, dst, nbytes, lane);
    else
        copy_words<1>(src, dst, nbytes, lane);
}

// One thread of a grid of `blocks`.
PDLINK_HD void copy_shares(const CopyRuns& list, std::uint32_t block, std::uint32_t blocks, std::uint32_t thread) {
    constexpr std::uint32_t kWarps = kThreads / kLanes;
    for (std::uint32_t share = block * kWarps + thread / kLanes; share < list.num_shares; share += blocks * kWarps)
        copy_share(list, share, thread % kLanes);
}

}  // namespace pdlink::cuda
