// The GPU's side of the kernels: names that the driver finds in the module, nothing else.
#include "cuda/kernels.h"

namespace pdlink::cuda {

// Two instances of each: rows that are contiguous on both sides ("_flat"), and any others.
#define PDLINK_KERNELS(nbytes)                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads)                                    \
        pdlink_copy##nbytes##_flat(const __grid_constant__ Reshape reshape) {                 \
        move_strand<nbytes, true>(reshape, blockIdx.y, blockIdx.x * kThreads + threadIdx.x);  \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads)                                    \
        pdlink_copy##nbytes(const __grid_constant__ Reshape reshape) {                        \
        move_strand<nbytes, false>(reshape, blockIdx.y, blockIdx.x * kThreads + threadIdx.x); \
    }
PDLINK_UNITS(PDLINK_KERNELS)

extern "C" __global__ void __launch_bounds__(kThreads) pdlink_runs(const __grid_constant__ CopyRuns list) {
    copy_shares(list, blockIdx.x, gridDim.x, threadIdx.x);
}

}  // namespace pdlink::cuda
