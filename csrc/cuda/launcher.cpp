#include "cuda/launcher.h"

#include <dlfcn.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <stdexcept>

#include "cuda/launches.h"

namespace pdlink::cuda {
namespace {

// A host function (CUhostFn). Runs on a thread of the driver, where no call into CUDA or Python is allowed.
void ring(void* fd) { ::eventfd_write(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)), 1); }

constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY

void* handle(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

template <class Function>
void look_up(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("this CUDA driver is too old: it has no ") + name);
}

}  // namespace

KernelLauncher::KernelLauncher(const std::string& library, std::uintptr_t context, std::vector<Kernel> kernels,
                               std::uint32_t max_blocks)
    : library_(::dlopen(library.c_str(), RTLD_NOW)),
      context_(handle(context)),
      kernels_(std::move(kernels)),
      max_blocks_(max_blocks) {
    if (!library_) throw std::runtime_error("no CUDA driver: " + library);
    try {
        look_up(library_, "cuCtxPushCurrent_v2", calls_.push);
        look_up(library_, "cuCtxPopCurrent_v2", calls_.pop);
        look_up(library_, "cuLaunchKernel", calls_.launch);
        look_up(library_, "cuMemcpyAsync", calls_.copy);
        look_up(library_, "cuEventRecord", calls_.record);
        look_up(library_, "cuEventQuery", calls_.query);
        look_up(library_, "cuStreamWaitEvent", calls_.wait);
        look_up(library_, "cuLaunchHostFunc", calls_.host);
        look_up(library_, "cuGetErrorName", calls_.name);
        look_up(library_, "cuGetErrorString", calls_.text);
    } catch (...) {
        ::dlclose(library_);
        throw;
    }
}

KernelLauncher::~KernelLauncher() { ::dlclose(library_); }

Failure KernelLauncher::wait(Handle stream, std::span<const std::uintptr_t> after) const {
    for (const std::uintptr_t one : after)
        if (const int failed = calls_.wait(stream, handle(one), 0)) return {"cuStreamWaitEvent", failed};
    return {};
}

Failure KernelLauncher::give(const Launch& launch, Handle stream) const {
    const auto kernel = std::ranges::find(kernels_, launch.kernel, &Kernel::first);
    if (kernel == kernels_.end()) throw std::invalid_argument("there is no kernel " + launch.kernel);
    // The driver copies the argument, and writes nothing to it.
    void* arguments[] = {const_cast<std::byte*>(launch.argument.data())};
    const int failed = calls_.launch(handle(kernel->second), launch.grid_x, launch.grid_y, 1, kThreads, 1, 1, 0,
                                     stream, arguments, nullptr);
    return failed ? Failure{"cuLaunchKernel", failed} : Failure{};
}

Failure KernelLauncher::launch(Moves& moves, const SlotMemory& slot, std::uintptr_t event, std::uintptr_t work,
                               bool& begun, std::span<const std::uintptr_t> after) const {
    begun = false;
    const MovePart& part = moves.next();
    const std::uint64_t list = slot.copy ? slot.copy : slot.device;
    bool is_inline = true;
    std::vector<Launch> launches;
    for (Request request : part.requests) {
        request.max_blocks = max_blocks_;
        const std::uint64_t num_words = request.num_units() * request.words_of_unit();
        if (num_words * 4 <= kInlineNbytes) {
            request.words = {reinterpret_cast<const std::uint32_t*>(part.list.data() + request.src.side.list),
                             num_words};
            request.src.side.list = request.dst.side.list = 0;
        } else {
            is_inline = false;
            request.src.side.list += list;
            request.dst.side.list += list;
        }
        for (Launch& one : plan_reshape(request)) launches.push_back(std::move(one));
    }
    if (!is_inline && part.list.size() > slot.nbytes)
        throw std::invalid_argument("a list of " + std::to_string(part.list.size()) + " bytes for a slot of " +
                                    std::to_string(slot.nbytes));
    const Handle stream = handle(work);
    if (const int failed = calls_.push(context_)) return {"cuCtxPushCurrent_v2", failed};
    Failure failure = wait(stream, after);
    if (failure.number == 0 && !is_inline) {
        std::ranges::copy(part.list, slot.host);
        if (slot.copy)
            if (const int failed =
                    calls_.copy(slot.copy, reinterpret_cast<std::uintptr_t>(slot.host), part.list.size(), stream))
                failure = {"cuMemcpyAsync", failed};
    }
    for (auto one = launches.begin(); failure.number == 0 && one != launches.end(); ++one) {
        failure = give(*one, stream);
        begun = begun || failure.number == 0;
    }
    if (failure.number == 0) {
        moves.take();
        if (const int failed = calls_.record(handle(event), stream)) failure = {"cuEventRecord", failed};
    }
    void* popped;
    calls_.pop(&popped);
    return failure;
}

Failure KernelLauncher::ring_after(std::uintptr_t event, int fd, std::uintptr_t bell) const {
    if (const int failed = calls_.push(context_)) return {"cuCtxPushCurrent_v2", failed};
    Failure failure{"cuStreamWaitEvent", calls_.wait(handle(bell), handle(event), 0)};
    if (failure.number == 0)
        failure = {"cuLaunchHostFunc", calls_.host(handle(bell), &ring, handle(static_cast<std::uintptr_t>(fd)))};
    void* popped;
    calls_.pop(&popped);
    return failure.number ? failure : Failure{};
}

Failure KernelLauncher::query(std::uintptr_t event, bool& reached) const {
    if (const int failed = calls_.push(context_)) return {"cuCtxPushCurrent_v2", failed};
    const int number = calls_.query(handle(event));
    void* popped;
    calls_.pop(&popped);
    reached = number == 0;
    return number == 0 || number == kNotReady ? Failure{} : Failure{"cuEventQuery", number};
}

std::string KernelLauncher::words(const Failure& failure) const {
    const auto asked = [&](int (*question)(int, const char**)) -> std::string {
        const char* answer = nullptr;
        return question(failure.number, &answer) == 0 && answer ? answer : "unknown error";
    };
    return std::string(failure.call) + " failed with " + asked(calls_.name) + " (" + std::to_string(failure.number) +
           "): " + asked(calls_.text);
}

}  // namespace pdlink::cuda
