// Makes launches from descriptions of copies: the host side of the kernels, the same for GPU and CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/reshape.h"

namespace pdlink::cuda {

// A kernel with its grid and its one argument.
struct Launch {
    std::string kernel;
    std::uint32_t grid_x = 0, grid_y = 1;  // blocks of kThreads threads
    std::vector<std::byte> argument;
};

constexpr std::uint32_t kAnyBlocks = 0x7fffffff;

// One side as callers describe it: the fields of `Side`, and what is known about addresses that only the GPU sees.
struct Rows {
    Side side;
    std::uint64_t alignment = 0;  // if not 0: of where blocks begin, which a table or the list says
};

struct Request {
    Rows src, dst;
    std::uint32_t num_layers = 1, num_parts = 1;
    std::uint64_t num_tokens = 0;
    std::uint32_t num_heads = 1;
    std::uint64_t head_nbytes = 0;         // contiguous on both sides
    std::uint32_t unit_tokens = 1;         // of a number of the lists
    std::uint32_t skip = 0;                // tokens of the first unit that are not moved
    bool is_wide = true;                   // the lists are int64, else int32
    std::span<const std::uint32_t> words;  // pairs, at most kInlineNbytes, instead of the lists of both sides
    std::uint64_t refused = 0;
    std::uint32_t max_strands = 0x7fffffff;  // per launch; more tokens make more launches
    std::uint32_t max_blocks = kAnyBlocks;   // of a grid, 1 or more

    std::uint64_t num_units() const { return (skip + num_tokens + unit_tokens - 1) / unit_tokens; }
    std::size_t words_of_unit() const { return is_wide ? 4 : 2; }
};

// Throws std::invalid_argument for invalid sizes, misaligned addresses, and more than 65,535 planes (the grid's
// limit). Does not check that addresses are mapped.
std::vector<Launch> plan_reshape(Request request);

// Do on this CPU what the GPU would do, block by block, thread by thread. Throws std::invalid_argument for a kernel
// that does not exist or an argument of another size.
void run_on_cpu(const Launch& launch);

// Names of all kernels.
std::vector<std::string> kernel_names();

}  // namespace pdlink::cuda
