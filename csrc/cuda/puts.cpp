#include "cuda/puts.h"

#include <dlfcn.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <stdexcept>

#include "cuda/launches.h"

namespace pdlink::cuda {
namespace {

// A host function (CUhostFn). Runs on a thread of the driver, where no call into CUDA or Python is allowed.
void ring(void* fd) { ::eventfd_write(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)), 1); }

void* handle(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

template <class Function>
void look_up(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("this CUDA driver is too old: it has no ") + name);
}

}  // namespace

RowQueue::RowQueue(std::span<const Put> puts) {
    rows_.reserve(puts.size());
    for (const Put& put : puts) {
        rows_.push_back({put.src, put.dst, put.nbytes});
        nbytes_ += put.nbytes;
    }
}

RowQueue::Slice RowQueue::copy_next(std::span<Row> to, std::uint64_t slice_nbytes) const {
    Slice slice;
    std::uint64_t left = slice_nbytes;
    for (std::size_t i = at_; i < rows_.size() && slice.num_rows < to.size() && left > 0; ++i) {
        Row row = rows_[i];
        if (row.nbytes > left) row.nbytes = slice.cut_nbytes = left;
        left -= row.nbytes;
        slice.longest_nbytes = std::max(slice.longest_nbytes, row.nbytes);
        to[slice.num_rows++] = row;
    }
    return slice;
}

void RowQueue::take(const Slice& slice) {
    at_ += slice.num_rows;
    if (slice.cut_nbytes == 0) return;
    Row& cut = rows_[--at_];
    cut.src += slice.cut_nbytes;
    cut.dst += slice.cut_nbytes;
    cut.nbytes -= slice.cut_nbytes;
}

Launcher::Launcher(const std::string& library, std::uintptr_t context, std::uintptr_t kernel, std::uintptr_t work,
                   std::uintptr_t bell)
    : library_(::dlopen(library.c_str(), RTLD_NOW)),
      context_(handle(context)),
      kernel_(handle(kernel)),
      work_(handle(work)),
      bell_(handle(bell)) {
    if (!library_) throw std::runtime_error("no CUDA driver: " + library);
    try {
        look_up(library_, "cuCtxPushCurrent_v2", calls_.push);
        look_up(library_, "cuCtxPopCurrent_v2", calls_.pop);
        look_up(library_, "cuLaunchKernel", calls_.launch);
        look_up(library_, "cuEventRecord", calls_.record);
        look_up(library_, "cuStreamWaitEvent", calls_.wait);
        look_up(library_, "cuLaunchHostFunc", calls_.host);
    } catch (...) {
        ::dlclose(library_);
        throw;
    }
}

Launcher::~Launcher() { ::dlclose(library_); }

Failure Launcher::put(RowQueue& rows, std::uint64_t slice_nbytes, const SlotMemory& slot,
                      std::uintptr_t event) const {
    const RowQueue::Slice slice = rows.copy_next({slot.host, slot.num_rows}, slice_nbytes);
    Launch launch = plan_runs(slot.device, slice.num_rows, slice.longest_nbytes);
    void* arguments[] = {launch.argument.data()};
    if (const int failed = calls_.push(context_)) return {"cuCtxPushCurrent_v2", failed};
    Failure failure{"cuLaunchKernel", calls_.launch(kernel_, launch.grid_x, launch.grid_y, 1, kThreads, 1, 1, 0,
                                                    work_, arguments, nullptr)};
    if (failure.number == 0) {
        rows.take(slice);
        failure = {"cuEventRecord", calls_.record(handle(event), work_)};
    }
    void* popped;
    calls_.pop(&popped);
    return failure.number ? failure : Failure{};
}

Failure Launcher::ring_after(std::uintptr_t event, int fd) const {
    if (const int failed = calls_.push(context_)) return {"cuCtxPushCurrent_v2", failed};
    Failure failure{"cuStreamWaitEvent", calls_.wait(bell_, handle(event), 0)};
    if (failure.number == 0)
        failure = {"cuLaunchHostFunc", calls_.host(bell_, &ring, handle(static_cast<std::uintptr_t>(fd)))};
    void* popped;
    calls_.pop(&popped);
    return failure.number ? failure : Failure{};
}

}  // namespace pdlink::cuda
