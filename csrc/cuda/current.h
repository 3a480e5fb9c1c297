// A CUDA context for a native thread, without CUDA's headers or libraries at build time.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pdlink::cuda {

// Call a function of the driver, which is loaded, since there is a context. Throws std::runtime_error.
template <class... Arguments>
void call_driver(const char* name, Arguments... arguments) {
    void* driver = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) throw std::runtime_error("no CUDA driver in this process");
    const auto function = reinterpret_cast<int (*)(Arguments...)>(::dlsym(driver, name));
    const int result = function ? function(arguments...) : -1;
    ::dlclose(driver);
    if (result != 0) throw std::runtime_error(std::string(name) + " failed with error " + std::to_string(result));
}

// Make a context current in the calling thread, for good. Throws std::runtime_error.
inline void make_current(std::uintptr_t context) { call_driver("cuCtxSetCurrent", reinterpret_cast<void*>(context)); }

// The same where nobody can be told. Of a context that has failed every call that follows fails, too, and says so.
inline void try_make_current(std::uintptr_t context) noexcept {
    try {
        make_current(context);
    } catch (const std::exception&) {
    }
}

// While it exists, a context is current in the calling thread; 0 changes nothing. Throws std::runtime_error.
class Current {
  public:
    explicit Current(std::uintptr_t context) : context_(context) {
        if (!context_) return;
        call_driver("cuCtxGetCurrent", &before_);
        make_current(context_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
        if (context_) try_make_current(reinterpret_cast<std::uintptr_t>(before_));
    }

  private:
    const std::uintptr_t context_;
    void* before_ = nullptr;
};

}  // namespace pdlink::cuda
