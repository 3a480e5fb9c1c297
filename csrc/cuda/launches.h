// Makes launches from descriptions of copies: the host side of the kernels, the same for GPU and CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/reshape.h"
#include "cuda/runs.h"

namespace pdlink::cuda {

// A kernel with its grid and its one argument.
struct Launch {
    std::string kernel;
    std::uint32_t grid_x = 0, grid_y = 1;  // blocks of kThreads threads
    std::vector<std::byte> argument;
};

// One side as callers describe it: the fields of `Side`, and what is known about addresses that only the GPU sees.
struct Rows {
    Side side;
    std::uint64_t alignment = 0;  // with a table: every address in it is a multiple of this
};

struct Request {
    Rows src, dst;
    std::uint32_t num_layers = 1, num_parts = 1;
    std::uint64_t num_tokens = 0;
    std::uint32_t num_heads = 1;
    std::uint64_t head_nbytes = 0;  // contiguous on both sides
    std::uint64_t refused = 0;
    std::uint32_t max_strands = 0x7fffffff;  // per launch; more tokens make more launches
};

// Throws std::invalid_argument for invalid sizes, misaligned addresses, and more than 65,535 planes (the grid's
// limit). Does not check that addresses are mapped.
std::vector<Launch> plan_reshape(Request request);

constexpr std::uint32_t kAnyBlocks = 0x7fffffff;

// `runs`: address, in the launching process, of [num_runs][3] uint64; `longest_nbytes`: the longest of them.
// max_blocks: of the grid, 1 or more.
Launch plan_runs(std::uint64_t runs, std::uint64_t num_runs, std::uint64_t longest_nbytes,
                 std::uint32_t max_blocks = kAnyBlocks);

// Do on this CPU what the GPU would do, block by block, thread by thread. Throws std::invalid_argument for a kernel
// that does not exist or an argument of another size.
void run_on_cpu(const Launch& launch);

// Names of all kernels.
std::vector<std::string> kernel_names();

}  // namespace pdlink::cuda
