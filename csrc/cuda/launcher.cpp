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

RunQueue::RunQueue(std::span<const Run> runs) {
    runs_.reserve(runs.size());
    for (const Run& run : runs) {
        runs_.push_back({run.src, run.dst, run.nbytes});
        nbytes_ += run.nbytes;
    }
}

RunRange RunQueue::copy_next(std::span<KernelRun> to, std::uint64_t launch_nbytes) const {
    RunRange range;
    std::uint64_t left = launch_nbytes;
    for (std::size_t i = at_; i < runs_.size() && range.num_runs < to.size() && left > 0; ++i) {
        KernelRun run = runs_[i];
        if (run.nbytes > left) run.nbytes = range.cut_nbytes = left;
        left -= run.nbytes;
        range.longest_nbytes = std::max(range.longest_nbytes, run.nbytes);
        to[range.num_runs++] = run;
    }
    return range;
}

void RunQueue::take(const RunRange& range) {
    at_ += range.num_runs;
    if (range.cut_nbytes == 0) return;
    KernelRun& cut = runs_[--at_];
    cut.src += range.cut_nbytes;
    cut.dst += range.cut_nbytes;
    cut.nbytes -= range.cut_nbytes;
}

KernelLauncher::KernelLauncher(const std::string& library, std::uintptr_t context, std::uintptr_t kernel,
                               std::uint32_t max_blocks)
    : library_(::dlopen(library.c_str(), RTLD_NOW)),
      context_(handle(context)),
      kernel_(handle(kernel)),
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

Failure KernelLauncher::launch_runs(RunQueue& runs, std::uint64_t launch_nbytes, const SlotMemory& slot,
                                    std::uintptr_t event, std::uintptr_t work,
                                    std::span<const std::uintptr_t> after) const {
    const Handle stream = handle(work);
    const RunRange range = runs.copy_next({slot.host, slot.num_runs}, launch_nbytes);
    const bool copied = slot.copy && range.num_runs >= kCopiedRuns;
    Launch launch = plan_runs(copied ? slot.copy : slot.device, range.num_runs, range.longest_nbytes, max_blocks_);
    void* arguments[] = {launch.argument.data()};
    if (const int failed = calls_.push(context_)) return {"cuCtxPushCurrent_v2", failed};
    Failure failure;
    for (const std::uintptr_t one : after)
        if (failure.number == 0) failure = {"cuStreamWaitEvent", calls_.wait(stream, handle(one), 0)};
    if (failure.number == 0 && copied)
        failure = {"cuMemcpyAsync", calls_.copy(slot.copy, reinterpret_cast<std::uintptr_t>(slot.host),
                                                range.num_runs * sizeof(KernelRun), stream)};
    if (failure.number == 0)
        failure = {"cuLaunchKernel", calls_.launch(kernel_, launch.grid_x, launch.grid_y, 1, kThreads, 1, 1, 0,
                                                   stream, arguments, nullptr)};
    if (failure.number == 0) {
        runs.take(range);
        failure = {"cuEventRecord", calls_.record(handle(event), stream)};
    }
    void* popped;
    calls_.pop(&popped);
    return failure.number ? failure : Failure{};
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
