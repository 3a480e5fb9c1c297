// The wire format of the tcp transport.
//
// The writer connects and sends Hello once; then it sends frames: a header, a table of runs, and the bytes of the
// runs one after the other. The owner answers each frame with an Answer, in order, when its last byte is in its
// pages. Everything is little-endian. A frame is small enough to be checked as a whole before a byte of it is placed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "copy/peer_memory.h"
#include "tcp/wire_runs.h"

namespace pdlink::tcp {

static_assert(std::endian::native == std::endian::little, "the wire form is the memory form");

constexpr std::uint32_t kHelloMagic = 0x48744450;   // "PDtH"
constexpr std::uint32_t kFrameMagic = 0x46744450;   // "PDtF"
constexpr std::uint32_t kAnswerMagic = 0x41744450;  // "PDtA"
constexpr std::uint16_t kVersion = 1;

// With header and table in one entry, a frame is one call of sendmsg; with the next header behind it, one of recvmsg
// (IOV_MAX is 1024).
constexpr std::uint32_t kMaxRuns = 1023;
// Other peers wait for one frame at most. At 5 GB/s it takes 0.2 ms, and its header is 1.6 % of it for 1 KiB runs.
constexpr std::uint64_t kMaxFrameNbytes = std::uint64_t{1} << 20;
// Runs may be packed on their way if they are shorter than a limit no larger than this.
constexpr std::uint64_t kMaxPackBelow = std::uint64_t{128} << 10;
constexpr std::uint16_t kMaxStreams = 16;
constexpr std::size_t kTokenNbytes = 16;

struct Hello {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t stream;   // 0, 1, … : each is taken once per invitation
    std::uint64_t session;  // of the invitation; in every frame again
    std::uint8_t token[kTokenNbytes];
};
static_assert(sizeof(Hello) == 32);

struct FrameHeader {
    std::uint32_t magic;
    std::uint32_t num_runs;
    std::uint64_t session;
    std::uint64_t sequence;  // 0, 1, … on this connection
    std::uint64_t ticket;
    std::uint64_t nbytes;  // of all runs
};
static_assert(sizeof(FrameHeader) == 40);

enum class Verdict : std::uint32_t { kPlaced = 0, kMalformed = 1, kStale = 2, kOutside = 3 };

struct Answer {
    std::uint32_t magic;
    Verdict verdict;
    std::uint64_t sequence;
    std::uint64_t ticket;
};
static_assert(sizeof(Answer) == 24);

// Whether a header is valid; sets `why` if not.
inline Verdict check_header(const FrameHeader& header, std::uint64_t session, std::uint64_t sequence,
                            std::string& why) {
    if (header.magic != kFrameMagic || header.num_runs > kMaxRuns || header.nbytes > kMaxFrameNbytes) {
        why = "no frame header";
        return Verdict::kMalformed;
    }
    if (header.session != session || header.sequence != sequence) {
        why = "frame " + std::to_string(header.sequence) + " of another session, or out of order";
        return Verdict::kStale;
    }
    return Verdict::kPlaced;
}

// Whether a frame is valid and every byte of it inside our regions. tcp/guard.h checks permission.
inline Verdict check_runs(const FrameHeader& header, std::span<const WireRun> runs, std::span<const Region> regions,
                          std::string& why) {
    std::uint64_t nbytes = 0;
    if (!all_inside(runs, regions, nbytes, why)) return Verdict::kOutside;
    if (nbytes == header.nbytes) return Verdict::kPlaced;
    why = "the runs have " + std::to_string(nbytes) + " bytes, the header says " + std::to_string(header.nbytes);
    return Verdict::kMalformed;
}

}  // namespace pdlink::tcp
