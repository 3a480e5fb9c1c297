// A checksum of bytes that is made while they are copied.
//
// KV is copied twice in the life of a record: from pages into it, and back. A checksum in a pass of its own reads all
// of it once more from memory (0.031 to 0.046 CPU s per GB); in the loop that copies, its arithmetic runs while the
// loop waits for memory.
//
// The bytes are lines of 64 from a start on. Two sums of 64 bits, over words of 64 bits, modulo 2^64:
//   plain:   each word, times an odd number of its lane (its place in the line), so that no change of one word is
//   missed product: low times high half of the word, xored with a key of lane and line, so that neither are words
//   that moved
// The keys go on by a constant from line to line (Weyl), the products are those of XXH3 and NH. Sums of parts add up
// to the sum of the whole, in any order: copies may run in parallel, chunks come in pieces, and heads from several
// ranks. Not cryptographic. Anyone who can write to a tier can forge records anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pdlink {

constexpr std::size_t kSumLineNbytes = 64;

struct Sums {
    std::uint64_t product = 0;
    std::uint64_t plain = 0;
};

// Words by their lane, before they are folded.
struct Lanes {
    alignas(64) std::uint64_t product[8] = {};
    alignas(64) std::uint64_t plain[8] = {};
    Sums folded() const;
};

// One instruction set.
struct SumKind {
    const char* name;
    // Copy whole lines, of which the first has number `line`, and add them. The caller fences.
    void (*copy)(std::byte* dst, const std::byte* src, std::size_t nbytes, std::uint64_t line, Lanes& lanes);
    // Add them only.
    void (*add)(const std::byte* src, std::size_t nbytes, std::uint64_t line, Lanes& lanes);
};

// What this CPU can run, best first; the last is portable and always there. All give the same sums.
std::span<const SumKind> sum_kinds();

// Of any number of bytes; the last line is filled up with zeros.
Sums sum_bytes(const SumKind& kind, const std::byte* src, std::size_t nbytes);

}  // namespace pdlink
