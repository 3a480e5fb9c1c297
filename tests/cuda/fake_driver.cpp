// A TEST DOUBLE of libcuda.so.1: the calls that pdlink makes, with host memory for device memory and the kernels' CPU
// build for kernels. It shows in which order, in which context and with which arguments the driver is called, what
// happens when a call fails, and what is left over. It says nothing about GPUs: neither speed nor that a kernel is
// right there.
//
// Streams are threads, so that what is not ordered by an event is not ordered. Device memory is a memory file, so
// that another process can open it as it would by CUDA IPC. The fake_* functions at the end are the tests' side. What
// there is lies in fake_world.h, which accesses are in an order in fake_order.h, virtual memory in fake_virtual.cpp.
//
// Rules in quotation marks are NVIDIA's words: cuda.h 13.0, the description of the call, if nothing else is named.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/launches.h"
#include "fake_world.h"

using namespace fake;

namespace {

// What the latest copy to an address of the GPU's own memory was of.
struct Copied {
    std::uint64_t src, nbytes;
};
std::map<std::uint64_t, Copied> copied_from;

// Where what a launch that is given now reads at `address` is now: memory of the host, or of a copy that may not have
// run.
std::uint64_t source_of(std::uint64_t address) {
    auto at = copied_from.upper_bound(address);
    if (at == copied_from.begin()) return address;
    --at;
    return address < at->first + at->second.nbytes ? at->second.src + (address - at->first) : address;
}

// What a kernel reads and writes, head by head.
std::vector<Run> runs_of(const std::string& kernel, pdlink::cuda::Reshape reshape) {
    const std::uint64_t unit_nbytes = std::stoul(kernel.substr(std::strlen("pdlink_copy")));
    const std::uint64_t head_nbytes = unit_nbytes * reshape.units_per_head.divisor();
    const std::uint32_t heads = reshape.units_per_row / reshape.units_per_head.divisor();
    for (pdlink::cuda::Side* side : {&reshape.src, &reshape.dst})
        if (side->list) side->list = source_of(side->list);
    std::vector<Run> runs;
    for (std::uint32_t plane = 0; plane < reshape.num_planes; ++plane)
        for (std::uint32_t token = 0; token < reshape.num_strands / reshape.strands_per_row.divisor(); ++token) {
            const auto [src, dst] = reshape.slots(token);
            if (src < 0 || src >= reshape.src.num_slots || dst < 0 || dst >= reshape.dst.num_slots) continue;
            const std::uint32_t layer = plane / reshape.num_parts.divisor(),
                                part = plane % reshape.num_parts.divisor();
            for (std::uint32_t head = 0; head < heads; ++head)
                runs.push_back({reshape.src.row(plane, layer, part, src) + head * reshape.src.head_stride,
                                reshape.dst.row(plane, layer, part, dst) + head * reshape.dst.head_stride,
                                head_nbytes});
        }
    return runs;
}

// Copies are given to a stream: whether their memory is such as an asynchronous copy takes.
int begin_copies(const char* call, void* stream, const std::vector<Run>& runs) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    for (const Run& run : runs)
        for (const Where at : {where(run.src, run.nbytes), where(run.dst, run.nbytes)}) {
            if (at == Where::kInvalid) return kInvalidValue;
            // "may be staged through pinned memory", and the caller may wait: never what pdlink wants.
            if (at == Where::kPageable) w.order.faults.push_back(std::string(call) + " of pageable memory");
        }
    w.order.run(call, stream, runs);
    return kSuccess;
}

// Other memory is at these addresses now, or may be soon. The caller holds the mutex.
void forget_copies(std::uint64_t address, std::uint64_t nbytes) {
    copied_from.erase(copied_from.lower_bound(address), copied_from.lower_bound(address + nbytes));
}

// Null: there is no such event (any more).
Event* event_of(void* handle) {
    const std::lock_guard lock(world().mutex);
    Event* event = static_cast<Event*>(handle);
    return world().events.contains(event) ? event : nullptr;
}

#define EVENT(name, handle)               \
    Event* const name = event_of(handle); \
    if (!name) return kInvalidHandle

const std::map<int, const char*> kNames = {
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    {kAlreadyMapped, "CUDA_ERROR_ALREADY_MAPPED"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED"},
};

}  // namespace

extern "C" {

int cuGetErrorName(int result, const char** name) {
    const auto at = kNames.find(result);
    *name = at == kNames.end() ? nullptr : at->second;
    return at == kNames.end() ? kInvalidValue : kSuccess;
}
int cuGetErrorString(int result, const char** text) {
    *text = kNames.contains(result) ? "told by the test double" : nullptr;
    return *text ? kSuccess : kInvalidValue;
}

int cuInit(unsigned) {
    ENTER(false);
    return kSuccess;
}
int cuDriverGetVersion(int* version) {
    *version = 13000;
    return kSuccess;
}
int cuDeviceGetCount(int* count) {
    *count = 1;
    return kSuccess;
}
int cuDeviceGet(int* device, int index) {
    *device = index;
    return kSuccess;
}
int cuDeviceGetName(char* name, int nbytes, int) {
    std::snprintf(name, nbytes, "test double");
    return kSuccess;
}
// MULTIPROCESSOR_COUNT, MAX_THREADS_PER_MULTIPROCESSOR and DMA_BUF_SUPPORTED, which is all that pdlink asks for
int cuDeviceGetAttribute(int* value, int attribute, int) {
    ENTER(false);
    switch (attribute) {
        case 16:
            return *value = 4, kSuccess;
        case 39:
            return *value = 2048, kSuccess;
        case 124:
            return *value = 1, kSuccess;
        default:
            return kInvalidValue;
    }
}
int cuDeviceGetUuid_v2(char* uuid, int) {
    std::memcpy(uuid, "pdlink-test-dbl!", 16);
    return kSuccess;
}
int cuDeviceGetPCIBusId(char* text, int nbytes, int) {
    std::snprintf(text, nbytes, "ffff:ff:1f.7");
    return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
    ENTER(false);
    const std::lock_guard lock(world().mutex);
    ++world().contexts;
    *context = &primary;
    return kSuccess;
}
int cuDevicePrimaryCtxRelease_v2(int) {
    ENTER(false);
    const std::lock_guard lock(world().mutex);
    --world().contexts;
    return kSuccess;
}
int cuCtxPushCurrent_v2(void* context) {
    if (context != &primary) return kInvalidContext;
    contexts.push_back(context);
    return kSuccess;
}
int cuCtxPopCurrent_v2(void** context) {
    if (contexts.empty()) return kInvalidContext;
    *context = contexts.back();
    contexts.pop_back();
    return kSuccess;
}
int cuCtxSynchronize() {
    ENTER(true);
    std::vector<std::shared_ptr<Stream>> all;
    std::vector<void*> handles;
    {
        const std::lock_guard lock(world().mutex);
        for (const auto& [handle, stream] : world().streams) all.push_back(stream), handles.push_back(handle);
    }
    for (const auto& stream : all) stream->drain();
    const std::lock_guard lock(world().mutex);
    for (void* handle : handles) world().order.see(handle);
    return kSuccess;
}

int cuMemAlloc_v2(std::uint64_t* address, std::size_t nbytes) {
    ENTER(true);
    const int fd = ::memfd_create("fake-device-memory", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kOutOfMemory;
    void* at = map_file(fd, nbytes);
    if (!at) return kOutOfMemory;
    std::memset(at, 0xa5, nbytes);  // undefined, as fresh device memory
    *address = reinterpret_cast<std::uint64_t>(at);
    const std::lock_guard lock(world().mutex);
    world().allocations[*address] = {nbytes, fd, true};
    return kSuccess;
}
int cuMemFree_v2(std::uint64_t address) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    const auto at = world().allocations.find(address);
    if (at == world().allocations.end()) return kInvalidValue;
    world().order.forget(address, at->second.nbytes);
    forget_copies(address, at->second.nbytes);
    ::munmap(reinterpret_cast<void*>(address), at->second.nbytes);
    ::close(at->second.fd);
    world().allocations.erase(at);
    return kSuccess;
}
int cuMemHostRegister_v2(void* address, std::size_t nbytes, unsigned) {
    ENTER(true);
    const auto begin = reinterpret_cast<std::uint64_t>(address);
    const std::lock_guard lock(world().mutex);
    for (const auto& [at, size] : world().registered)
        if (begin < at + size && at < begin + nbytes) return kAlreadyRegistered;
    world().registered[begin] = nbytes;
    forget_copies(begin, nbytes);
    return kSuccess;
}
int cuMemHostGetDevicePointer_v2(std::uint64_t* there, void* address, unsigned) {
    ENTER(true);
    *there = reinterpret_cast<std::uint64_t>(address);
    return kSuccess;
}
int cuMemHostUnregister(void* address) {
    if (world().sticky) {  // the context is dead, and what its owner frees now goes with it
        const std::lock_guard lock(world().mutex);
        world().registered.erase(reinterpret_cast<std::uint64_t>(address));
    }
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    const auto at = world().registered.find(reinterpret_cast<std::uint64_t>(address));
    if (at == world().registered.end()) return kNotRegistered;
    if (!world().sticky) world().order.end(__func__, at->first, at->second);
    world().registered.erase(at);
    return kSuccess;
}
int cuIpcGetMemHandle(char* handle, std::uint64_t address) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    const auto at = world().allocations.find(address);
    if (at == world().allocations.end() || at->second.is_pooled) return kInvalidValue;
    struct stat status;
    ::fstat(at->second.fd, &status);
    const Handle inside{::getpid(), at->second.fd, address, at->second.nbytes, status.st_ino};
    std::memset(handle, 0, 64);
    std::memcpy(handle, &inside, sizeof inside);
    return kSuccess;
}
struct IpcHandle {
    char reserved[64];
};
// "If the memory handle has already been opened by the current context, the reference count on the handle is
// incremented by 1 and the existing device pointer is returned." A process cannot open what it has exported itself.
int cuIpcOpenMemHandle_v2(std::uint64_t* address, IpcHandle handle, unsigned) {
    ENTER(true);
    Handle inside;
    std::memcpy(&inside, handle.reserved, sizeof inside);
    if (inside.pid == ::getpid()) return kInvalidContext;
    const std::string name(handle.reserved, sizeof handle.reserved);
    const std::lock_guard lock(world().mutex);
    for (auto& [at, opened] : world().opened)
        if (opened.handle == name) return ++opened.references, *address = at, kSuccess;
    const std::string path = "/proc/" + std::to_string(inside.pid) + "/fd/" + std::to_string(inside.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return kInvalidValue;
    struct stat status;
    const bool same = ::fstat(fd, &status) == 0 && status.st_ino == inside.inode;
    void* at = same ? map_file(fd, inside.nbytes) : nullptr;
    ::close(fd);
    if (!at) return kInvalidValue;
    *address = reinterpret_cast<std::uint64_t>(at);
    world().opened[*address] = {inside.nbytes, name, 1};
    return kSuccess;
}
// "When the reference count reaches 0, this API unmaps the memory."
int cuIpcCloseMemHandle(std::uint64_t address) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    const auto at = world().opened.find(address);
    if (at == world().opened.end()) return kInvalidValue;
    if (--at->second.references > 0) return kSuccess;
    if (!world().sticky) world().order.end(__func__, at->first, at->second.nbytes);
    ::munmap(reinterpret_cast<void*>(address), at->second.nbytes);
    world().opened.erase(at);
    return kSuccess;
}
int cuMemGetAddressRange_v2(std::uint64_t* start, std::size_t* nbytes, std::uint64_t address) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    for (const auto& [at, allocation] : world().allocations)
        if (address >= at && address < at + allocation.nbytes)
            return *start = at, *nbytes = allocation.nbytes, kSuccess;
    for (const auto& [at, opened] : world().opened)
        if (address >= at && address < at + opened.nbytes) return *start = at, *nbytes = opened.nbytes, kSuccess;
    for (const auto& [at, mapping] : world().mapped)
        if (address >= at && address < at + mapping.nbytes) return *start = at, *nbytes = mapping.nbytes, kSuccess;
    return kNotFound;
}
// IS_LEGACY_CUDA_IPC_CAPABLE: "suitable for cudaIpcGetMemHandle"; ALLOWED_HANDLE_TYPES: "Bitmask of allowed
// CUmemAllocationHandleType for this allocation"; MAPPING_SIZE and MAPPING_BASE_ADDR: of "the actual underlying
// mapping that the pointer belongs to". An address that CUDA does not know is CUDA_ERROR_INVALID_VALUE.
int cuPointerGetAttribute(void* data, int attribute, std::uint64_t address) {
    ENTER(true);
    enum { kIpcCapable = 10, kHandleTypes = 14, kMappingNbytes = 18, kMappingBase = 19 };
    const auto answer = [&](bool is_capable, std::uint64_t types, std::uint64_t base, std::uint64_t nbytes) -> int {
        switch (attribute) {
            case kIpcCapable:
                return *static_cast<int*>(data) = is_capable, kSuccess;
            case kHandleTypes:
                return *static_cast<std::uint64_t*>(data) = types, kSuccess;
            case kMappingNbytes:
                return *static_cast<std::uint64_t*>(data) = nbytes, kSuccess;
            case kMappingBase:
                return *static_cast<std::uint64_t*>(data) = base, kSuccess;
            default:
                return kInvalidValue;
        }
    };
    const std::lock_guard lock(world().mutex);
    for (const auto& [at, one] : world().allocations)
        if (address >= at && address < at + one.nbytes) return answer(!one.is_pooled, 0, at, one.nbytes);
    for (const auto& [at, one] : world().mapped)
        if (address >= at && address < at + one.nbytes)
            return answer(false, one.memory->handle_types, at, one.nbytes);
    return kInvalidValue;
}
int cuMemcpyAsync(std::uint64_t dst, std::uint64_t src, std::size_t nbytes, void* stream) {
    ENTER(true);
    STREAM(line, stream);
    if (const int failed = begin_copies(__func__, stream, {{src, dst, nbytes}})) return failed;
    {
        const std::lock_guard lock(world().mutex);
        const auto after = world().allocations.upper_bound(dst);  // host memory comes and goes unseen
        if (after != world().allocations.begin() && dst < std::prev(after)->first + std::prev(after)->second.nbytes)
            copied_from[dst] = {src, nbytes};
    }
    line->put([=] {
        const std::lock_guard wait(world().gate);
        std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes);
    });
    return kSuccess;
}

// "Must not be legacy NULL stream"; "attrsIdxs must always be 0" for the first; the batch is in stream order, its
// copies are in none (cuda.h 13.0, cuMemcpyBatchAsync): here they run in the reverse of the order given.
struct MemcpyAttributes {
    int src_access_order, src_hint[2], dst_hint[2];
    unsigned flags;
};
int cuMemcpyBatchAsync_v2(std::uint64_t* dsts, std::uint64_t* srcs, std::size_t* sizes, std::size_t count,
                          MemcpyAttributes* attributes, std::size_t* firsts, std::size_t num_attributes,
                          void* stream) {
    ENTER(true);
    if (!stream || !count || !num_attributes || num_attributes > count || firsts[0] != 0) return kInvalidValue;
    for (std::size_t i = 0; i < num_attributes; ++i)
        if (attributes[i].src_access_order < 1 || attributes[i].src_access_order > 3) return kInvalidValue;
    std::vector<Run> copies;
    for (std::size_t i = count; i-- > 0;) copies.push_back({srcs[i], dsts[i], sizes[i]});
    STREAM(line, stream);
    if (const int failed = begin_copies(__func__, stream, copies)) return failed;
    line->put([copies] {
        const std::lock_guard wait(world().gate);
        for (const Run& one : copies)
            std::memcpy(reinterpret_cast<void*>(one.dst), reinterpret_cast<const void*>(one.src), one.nbytes);
    });
    return kSuccess;
}

int cuStreamCreate(void** stream, unsigned) {
    ENTER(true);
    static std::atomic<std::uintptr_t> next = 1;
    *stream = reinterpret_cast<void*>(next++ << 4);
    const std::lock_guard lock(world().mutex);
    world().streams[*stream] = std::make_shared<Stream>();
    return kSuccess;
}
int cuStreamDestroy_v2(void* stream) {
    ENTER(true);
    std::shared_ptr<Stream> gone;
    {
        const std::lock_guard lock(world().mutex);
        const auto at = world().streams.find(stream);
        if (at == world().streams.end()) return kInvalidValue;
        gone = std::move(at->second);
        world().streams.erase(at);
    }
    // "the function will return immediately": work that is left still runs.
    std::thread([left = std::move(gone)] {}).detach();
    return kSuccess;
}
// "Makes all future work submitted to hStream wait for all work captured in hEvent", which "use[s] the most recently
// captured state at the time of the API call" (cuEventRecord).
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    ENTER(true);
    STREAM(line, stream);
    EVENT(one, event);
    if (const auto mark = one->mark) {
        line->put([mark] { mark->wait(); });
        const std::lock_guard lock(world().mutex);
        world().order.wait(stream, mark->before);
    }
    return kSuccess;
}
int cuStreamSynchronize(void* stream) {
    ENTER(true);
    STREAM(line, stream);
    Clock before;
    {
        const std::lock_guard lock(world().mutex);
        before = world().order.now(stream);
    }
    line->drain();
    const std::lock_guard lock(world().mutex);
    world().order.see(before);
    return kSuccess;
}
int cuStreamQuery(void* stream) {
    ENTER(true);
    STREAM(line, stream);
    return line->is_empty() ? kSuccess : kNotReady;
}
// "The function will be called after currently enqueued work and will block work added after it", and "will not be
// called in the event of an error in the CUDA context".
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
    ENTER(true);
    STREAM(line, stream);
    line->put([=] {
        in_host_function = true;
        if (!world().sticky) function(argument);
        in_host_function = false;
    });
    return kSuccess;
}
int cuEventCreate(void** event, unsigned) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    *event = *world().events.insert(new Event).first;
    return kSuccess;
}
// "Captures in hEvent the contents of hStream at the time of this call"; called again it "will overwrite the
// previously captured state".
int cuEventRecord(void* event, void* stream) {
    ENTER(true);
    STREAM(line, stream);
    EVENT(one, event);
    const auto mark = std::make_shared<Mark>();
    one->mark = mark;
    {
        const std::lock_guard lock(world().mutex);
        mark->before = world().order.now(stream);
    }
    line->put([mark] { mark->reach(); });
    return kSuccess;
}
// "Before the first call to cuEventRecord(), an event represents an empty set of work".
int cuEventQuery(void* event) {
    ENTER(true);
    EVENT(one, event);
    const auto mark = one->mark;
    if (!mark) return kSuccess;
    if (!mark->is_reached()) return kNotReady;
    const std::lock_guard lock(world().mutex);
    world().order.see(mark->before);
    return kSuccess;
}
// "An event may be destroyed before it is complete".
int cuEventDestroy_v2(void* event) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    if (!world().events.erase(static_cast<Event*>(event))) return kInvalidValue;
    delete static_cast<Event*>(event);
    return kSuccess;
}

int cuModuleLoadData(void** module, const void* image) {
    ENTER(true);
    const std::uint32_t fatbin = 0xba55ed50;  // what nvcc's begin with
    if (std::memcmp(image, "fake", 4) != 0 && std::memcmp(image, &fatbin, 4) != 0) return kInvalidImage;
    const std::lock_guard lock(world().mutex);
    *module = new int(++world().modules);
    return kSuccess;
}
int cuModuleUnload(void* module) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    delete static_cast<int*>(module);
    --world().modules;
    return kSuccess;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
    ENTER(true);
    static const std::vector<std::string> names = pdlink::cuda::kernel_names();
    for (const std::string& known : names)
        if (known == name) {
            *function = const_cast<std::string*>(&known);
            return kSuccess;
        }
    return kNotFound;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
    ENTER(true);
    STREAM(line, stream);
    if (!x || !y || z != 1 || y > 65535 || threads != pdlink::cuda::kThreads) return kInvalidValue;
    const std::string& name = *static_cast<std::string*>(function);
    const auto* bytes = static_cast<const std::byte*>(arguments[0]);
    pdlink::cuda::Launch launch{name, x, y, {bytes, bytes + sizeof(pdlink::cuda::Reshape)}};
    pdlink::cuda::Reshape reshape;
    std::memcpy(&reshape, bytes, sizeof reshape);  // the driver copies it before it returns, too
    {
        const std::lock_guard lock(world().mutex);
        const auto runs = runs_of(name, reshape);
        for (const Run& run : runs)
            for (const std::uint64_t at : {run.src, run.src + run.nbytes - 1, run.dst, run.dst + run.nbytes - 1})
                if (where(at, 1) != Where::kKnown)  // a kernel may go from one registration into the next
                    world().order.faults.push_back(name + " reaches memory that the GPU does not know");
        world().order.run(name.c_str(), stream, runs);
    }
    line->put([launch = std::move(launch)] {
        const std::lock_guard wait(world().gate);
        pdlink::cuda::run_on_cpu(launch);
    });
    return kSuccess;
}

// -- The tests' side -----------------------------------------------------------------------------------------------

// The call after `later` more of this name answers `result`, once.
void fake_fail(const char* call, int result, int later) {
    const std::lock_guard lock(world().mutex);
    world().failures[call] = {result, later};
}
// The next call of this name stands until `fake_let_go`, or for `kStall`.
void fake_stall(const char* call) {
    const std::lock_guard lock(world().mutex);
    world().stalled = call;
}
// Until it does, or has.
void fake_wait_stalled() {
    std::unique_lock lock(world().mutex);
    world().stall.wait(lock, [] { return world().stands || world().stalled.empty(); });
}
// Whether it still stood.
int fake_let_go() {
    const std::lock_guard lock(world().mutex);
    world().stalled.clear();
    world().stall.notify_all();
    return world().stands;
}
// From now on every call in a context answers this, as after a kernel's fault; 0 ends it.
void fake_break(int result) { world().sticky = result; }
// Kernels and copies wait from now on (another thread must not hold it), or go on; then those that waited have run
// when it returns, unless a stream is held: a test may be about to give back what they use.
void fake_hold() { world().gate.lock(); }
void fake_go_on() {
    World& w = world();
    w.gate.unlock();
    std::vector<std::shared_ptr<Stream>> all;
    {
        const std::lock_guard lock(w.mutex);
        if (!w.held.empty()) return;
        for (const auto& [handle, stream] : w.streams) all.push_back(stream);
    }
    for (const auto& stream : all) stream->drain();
}
// What is put into this stream from now on waits, or goes on.
void fake_hold_stream(void* stream) {
    const auto mark = std::make_shared<Mark>();
    stream_of(stream)->put([mark] { mark->wait(); });
    const std::lock_guard lock(world().mutex);
    world().held[stream] = mark;
}
void fake_go_on_stream(void* stream) {
    const std::lock_guard lock(world().mutex);
    world().held.at(stream)->reach();
    world().held.erase(stream);
}
// Accesses in no order, and other faults that a GPU would not report, since the last time; one a line.
std::size_t fake_take_faults(char* text, std::size_t nbytes) {
    const std::lock_guard lock(world().mutex);
    std::string all;
    for (const std::string& line : world().order.faults) all += line + "\n";
    world().order.faults.clear();
    world().order.forget();  // between tests
    std::snprintf(text, nbytes, "%s", all.c_str());
    return all.size();
}
// What was called since the last time, one a line, with " +" if the thread had a context and " -" if not.
std::size_t fake_take_log(char* text, std::size_t nbytes) {
    const std::lock_guard lock(world().mutex);
    std::string all;
    for (const std::string& line : world().log) all += line + "\n";
    world().log.clear();
    std::snprintf(text, nbytes, "%s", all.c_str());
    return all.size();
}
// What exists: allocations, mappings of others' or physical memory, registrations, streams, events, modules,
// contexts, depth of this thread's stack of contexts, reserved ranges, references to physical memory. The default
// stream does not count.
void fake_count(int* counts) {
    const std::lock_guard lock(world().mutex);
    World& w = world();
    int ours = 0;
    for (const auto& [address, allocation] : w.allocations) ours += allocation.ours;
    int handles = 0;
    for (const auto& [number, handle] : w.handles) handles += handle.references;
    const int values[10] = {ours,
                            static_cast<int>(w.opened.size() + w.mapped.size()),
                            static_cast<int>(w.registered.size()),
                            static_cast<int>(w.streams.size() - w.streams.count(nullptr)),
                            static_cast<int>(w.events.size()),
                            w.modules,
                            w.contexts,
                            static_cast<int>(contexts.size()),
                            static_cast<int>(w.reserved.size()),
                            handles};
    std::memcpy(counts, values, sizeof values);
}
// Make an allocation one that nothing exports, as of a pool.
void fake_make_pooled(std::uint64_t address) {
    const std::lock_guard lock(world().mutex);
    world().allocations.at(address).is_pooled = true;
}
// Call a test's memory file, mapped at `address`, device memory; and no longer (nbytes 0).
void fake_lend(std::uint64_t address, std::uint64_t nbytes, int fd) {
    const std::lock_guard lock(world().mutex);
    if (nbytes)
        world().allocations[address] = {nbytes, fd, false};
    else if (const auto at = world().allocations.find(address); at != world().allocations.end()) {
        world().order.forget(address, at->second.nbytes);
        forget_copies(address, at->second.nbytes);
        world().allocations.erase(at);
    }
}

}  // extern "C"
