// The kernels as nvcc left them: machine code for sm_80 and sm_90, and PTX for whatever comes later.
#pragma once

#include <cstddef>
#include <span>

namespace pdlink::cuda {

// Empty in a build without nvcc.
std::span<const std::byte> fatbin();

}  // namespace pdlink::cuda
