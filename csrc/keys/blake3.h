// BLAKE3, version 1 of its paper, with 32 bytes of output: keyed and key derivation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace pdlink::blake3 {

constexpr std::size_t kDigestNbytes = 32;
using Digest = std::array<std::uint32_t, 8>;  // the words as they lie in memory

// One instruction set.
struct Kind {
    const char* name;
    void (*compress)(Digest& value, const std::uint8_t* block, std::uint32_t nbytes, std::uint64_t counter,
                     std::uint32_t flags);
};

// What this CPU can run, best first; the last is portable and always there.
std::span<const Kind> kinds();

// keyed_hash(key, data).
Digest keyed(const Kind& kind, const Digest& key, const void* data, std::size_t nbytes);

// derive_key(context, material).
Digest derive(std::string_view context, std::string_view material);

}  // namespace pdlink::blake3
