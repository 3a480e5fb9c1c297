// The GPU's side of the kernels: names that the driver finds in the module, nothing else.
#include "cuda/kernels.h"

namespace pdlink::cuda {

// Two instances of each: rows that are contiguous on both sides ("_flat"), and any others.
#define PDLINK_KERNEL(name, nbytes, is_flat)                                                                   \
    extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ Reshape reshape) {     \
        move_strands<nbytes, is_flat>(reshape, {blockIdx.x, gridDim.x}, {blockIdx.y, gridDim.y}, threadIdx.x); \
    }
#define PDLINK_KERNELS(nbytes)                              \
    PDLINK_KERNEL(pdlink_copy##nbytes##_flat, nbytes, true) \
    PDLINK_KERNEL(pdlink_copy##nbytes, nbytes, false)
PDLINK_UNITS(PDLINK_KERNELS)

}  // namespace pdlink::cuda
