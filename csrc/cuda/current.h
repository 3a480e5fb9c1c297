// A CUDA context for a native thread, without CUDA's headers or libraries at build time.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pdlink::cuda {

// Make a context current in the calling thread, for good. The driver is loaded, since there is a context.
// Throws std::runtime_error.
inline void make_current(std::uintptr_t context) {
    void* driver = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) throw std::runtime_error("no CUDA driver in this process");
    const auto set = reinterpret_cast<int (*)(void*)>(::dlsym(driver, "cuCtxSetCurrent"));
    const int result = set ? set(reinterpret_cast<void*>(context)) : -1;
    ::dlclose(driver);
    if (result != 0) throw std::runtime_error("cuCtxSetCurrent failed with error " + std::to_string(result));
}

}  // namespace pdlink::cuda
