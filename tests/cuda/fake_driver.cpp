// A TEST DOUBLE of libcuda.so.1: the calls that pdlink makes, with host memory for device memory and the kernels' CPU
// build for kernels. It shows in which order, in which context and with which arguments the driver is called, what
// happens when a call fails, and what is left over. It says nothing about GPUs: neither speed nor that a kernel is
// right there.
//
// Streams are threads, so that what is not ordered by an event is not ordered. Device memory is a memory file, so
// that another process can open it as it would by CUDA IPC. The fake_* functions at the end are the tests' side.
//
// Two accesses to the same bytes, one of them a write, must be in an order: "Operations within a stream are ordered",
// those of two streams by an event that one waits for (CUDA C++ Programming Guide 13.0, Asynchronous Concurrent
// Execution), or because the host has seen the first end before it asks for the second. Whichever of the two runs first,
// the double notes each pair without an order (`Order` below), and every test ends with none. It does not see what the
// host reads and writes itself, nor other processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/launches.h"

namespace {

enum Result {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNoDevice = 100,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kAlreadyMapped = 208,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
};

struct Allocation {
    std::uint64_t nbytes;
    int fd;
    bool ours;  // made by cuMemAlloc, not lent by a test
    bool is_virtual = false;  // as of cuMemMap or a pool: cuIpcGetMemHandle does not take it
};

struct Handle {  // in a CUipcMemHandle
    std::int64_t pid;
    std::int32_t fd;
    std::uint64_t address, nbytes, inode;
};
static_assert(sizeof(Handle) <= 64);

class Stream {
  public:
    Stream() : thread_([this] { run(); }) {}
    ~Stream() {
        {
            const std::lock_guard lock(mutex_);
            ending_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    void put(std::function<void()> work) {
        const std::lock_guard lock(mutex_);
        work_.push_back(std::move(work));
        changed_.notify_all();
    }
    void drain() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return work_.empty(); });
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return ending_ || !work_.empty(); });
            if (work_.empty()) return;
            const auto work = work_.front();
            lock.unlock();
            work();
            lock.lock();
            work_.pop_front();  // after it has run: empty means done
            changed_.notify_all();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    bool ending_ = false;
    std::thread thread_;
};

// What has to be over before something begins: by stream, how many of its operations.
using Clock = std::map<void*, std::uint64_t>;

void join(Clock& clock, const Clock& other) {
    for (const auto& [stream, count] : other) clock[stream] = std::max(clock[stream], count);
}

struct Span {
    std::uint64_t begin, end;
};

// Sorted, neighbours joined.
std::vector<Span> sorted(std::vector<Span> spans) {
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    std::vector<Span> joined;
    for (const Span& one : spans)
        if (!joined.empty() && one.begin <= joined.back().end)
            joined.back().end = std::max(joined.back().end, one.end);
        else
            joined.push_back(one);
    return joined;
}

bool meet(const std::vector<Span>& a, const std::vector<Span>& b) {
    for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i].end <= b[j].begin)
            ++i;
        else if (b[j].end <= a[i].begin)
            ++j;
        else
            return true;
    }
    return false;
}

struct Row {
    std::uint64_t src, dst, nbytes;
};

// What a kernel that moves tokens reads and writes, head by head.
std::vector<Row> rows_of(const std::string& kernel, const pdlink::cuda::Reshape& job, unsigned planes) {
    const std::uint64_t unit_nbytes = std::stoul(kernel.substr(std::strlen("pdlink_copy")));
    const std::uint64_t head_nbytes = unit_nbytes * job.units_per_head.divisor();
    const std::uint32_t heads = job.units_per_row / job.units_per_head.divisor();
    std::vector<Row> rows;
    for (unsigned plane = 0; plane < planes; ++plane)
        for (std::uint32_t token = 0; token < job.num_strands / job.strands_per_row.divisor(); ++token) {
            const std::int64_t src = job.src.slot(token), dst = job.dst.slot(token);
            if (src < 0 || src >= job.src.num_slots || dst < 0 || dst >= job.dst.num_slots) continue;
            const std::uint32_t layer = plane / job.num_parts.divisor(), part = plane % job.num_parts.divisor();
            for (std::uint32_t head = 0; head < heads; ++head)
                rows.push_back({job.src.row(plane, layer, part, src) + head * job.src.head_stride,
                                job.dst.row(plane, layer, part, dst) + head * job.dst.head_stride, head_nbytes});
        }
    return rows;
}

// Which operations are in an order, and what is wrong.
class Order {
  public:
    void run(const char* what, void* stream, const std::vector<Row>& rows) {
        Operation one{what, stream, ++counts_[stream], {}, {}};
        for (const Row& row : rows) {
            one.reads.push_back({row.src, row.src + row.nbytes});
            one.writes.push_back({row.dst, row.dst + row.nbytes});
        }
        one.reads = sorted(std::move(one.reads)), one.writes = sorted(std::move(one.writes));
        Clock& before = before_[stream];
        join(before, seen_);
        std::erase_if(running_, [this](const Operation& old) { return old.number <= seen_[old.stream]; });
        for (const Operation& old : running_)
            if (old.number > before[old.stream] && old.stream != stream && conflict(one, old))
                faults.push_back(one.what + " is in no order with " + old.what + " of the same bytes");
        before[stream] = one.number;
        running_.push_back(std::move(one));
    }
    Clock now(void* stream) {
        join(before_[stream], seen_);
        return before_[stream];
    }
    void wait(void* stream, const Clock& clock) { join(before_[stream], clock); }
    void see(const Clock& clock) { join(seen_, clock); }
    void see(void* stream) { see(now(stream)); }
    // Nothing may use these bytes any more.
    void end(const char* what, std::uint64_t address, std::uint64_t nbytes) {
        const std::vector<Span> gone{{address, address + nbytes}};
        for (const Operation& old : running_)
            if (old.number > seen_[old.stream] && (meet(old.reads, gone) || meet(old.writes, gone)))
                faults.push_back(std::string(what) + " of memory that " + old.what + " uses");
        forget(address, nbytes);
    }
    // Other memory may be at these addresses soon.
    void forget(std::uint64_t address, std::uint64_t nbytes) {
        const std::vector<Span> gone{{address, address + nbytes}};
        std::erase_if(running_, [&](const Operation& old) { return meet(old.reads, gone) || meet(old.writes, gone); });
    }
    void forget() { running_.clear(); }
    std::vector<std::string> faults;

  private:
    struct Operation {
        std::string what;
        void* stream;
        std::uint64_t number;  // in its stream, from 1
        std::vector<Span> reads, writes;
    };
    static bool conflict(const Operation& a, const Operation& b) {
        return meet(a.writes, b.writes) || meet(a.writes, b.reads) || meet(a.reads, b.writes);
    }
    std::map<void*, std::uint64_t> counts_;
    std::map<void*, Clock> before_;  // what is before the next operation of a stream
    Clock seen_;                     // to be over, by the host
    std::vector<Operation> running_;
};

struct Mark {  // one cuEventRecord
    Clock before;
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
    void reach() {
        const std::lock_guard lock(mutex);
        reached = true;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return reached; });
    }
    bool is_reached() {
        const std::lock_guard lock(mutex);
        return reached;
    }
};

struct Event {
    std::shared_ptr<Mark> mark;  // null: never recorded, which counts as done
};

struct World {
    std::mutex mutex;
    std::map<std::uint64_t, Allocation> allocations;  // by address
    std::map<std::uint64_t, std::uint64_t> mapped;    // opened by IPC: address to nbytes
    std::map<std::uint64_t, std::uint64_t> registered;  // host memory: address to nbytes
    Order order;
    std::map<void*, std::shared_ptr<Mark>> held;  // streams that a test holds
    std::map<void*, std::unique_ptr<Stream>> streams;
    std::set<Event*> events;
    int modules = 0, contexts = 0;
    std::vector<std::string> log;
    std::map<std::string, std::pair<int, int>> failures;  // call: result, calls that still succeed
    std::atomic<int> sticky = 0;                          // what every call in a context answers after a fault
    std::mutex gate;                                      // held by a test: kernels wait
};

World& world() {
    static World* one = new World;  // never destroyed: streams' threads may outlive main
    return *one;
}

thread_local std::vector<void*> contexts;
int primary;  // its address is the context

// The first line of every call: write it down, fail if a test wants that, and demand a context where CUDA does.
int enter(const char* call, bool needs_context) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    w.log.push_back(std::string(call) + (contexts.empty() ? " -" : " +"));
    const auto at = w.failures.find(call);
    if (at != w.failures.end() && at->second.second-- == 0) {
        const int result = at->second.first;
        w.failures.erase(at);
        return result;
    }
    if (needs_context && contexts.empty()) return kInvalidContext;
    return needs_context ? w.sticky.load() : kSuccess;
}

#define ENTER(needs_context) \
    if (const int failed = enter(__func__, needs_context)) return failed

Stream& stream_of(void* handle) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    std::unique_ptr<Stream>& stream = w.streams[handle];  // the default stream is made when first used
    if (!stream) stream = std::make_unique<Stream>();
    return *stream;
}

enum class Where { kKnown, kPageable, kInvalid };

// "Memory regions requested must be either entirely registered with CUDA, or in the case of host pageable transfers,
// not registered at all" (CUDA Driver API 13.0, API synchronization behavior). The caller holds the mutex.
Where where(std::uint64_t begin, std::uint64_t nbytes) {
    const World& w = world();
    const std::uint64_t end = begin + nbytes;
    bool touches = false;
    const auto inside = [&](std::uint64_t at, std::uint64_t size) {
        touches = touches || (begin < at + size && at < end);
        return begin >= at && end <= at + size;
    };
    for (const auto& [at, allocation] : w.allocations)
        if (inside(at, allocation.nbytes)) return Where::kKnown;
    for (const auto& [at, size] : w.mapped)
        if (inside(at, size)) return Where::kKnown;
    for (const auto& [at, size] : w.registered)
        if (inside(at, size)) return Where::kKnown;
    return touches ? Where::kInvalid : Where::kPageable;
}

// Copies are given to a stream: whether their memory is such as an asynchronous copy takes.
int begin_copies(const char* call, void* stream, const std::vector<Row>& rows) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    for (const Row& row : rows)
        for (const Where at : {where(row.src, row.nbytes), where(row.dst, row.nbytes)}) {
            if (at == Where::kInvalid) return kInvalidValue;
            // "may be staged through pinned memory", and the caller may wait: never what pdlink wants.
            if (at == Where::kPageable) w.order.faults.push_back(std::string(call) + " of pageable memory");
        }
    w.order.run(call, stream, rows);
    return kSuccess;
}

void* map_file(int fd, std::uint64_t nbytes) {
    void* at = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? nullptr : at;
}

const std::map<int, const char*> kNames = {
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    {kAlreadyMapped, "CUDA_ERROR_ALREADY_MAPPED"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
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
    std::vector<Stream*> all;
    std::vector<void*> handles;
    {
        const std::lock_guard lock(world().mutex);
        for (auto& [handle, stream] : world().streams) all.push_back(stream.get()), handles.push_back(handle);
    }
    for (Stream* stream : all) stream->drain();
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
    if (at == world().allocations.end() || at->second.is_virtual) return kInvalidValue;
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
int cuIpcOpenMemHandle_v2(std::uint64_t* address, IpcHandle handle, unsigned) {
    ENTER(true);
    Handle inside;
    std::memcpy(&inside, handle.reserved, sizeof inside);
    if (inside.pid == ::getpid()) return kInvalidContext;
    const std::string path = "/proc/" + std::to_string(inside.pid) + "/fd/" + std::to_string(inside.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return kInvalidValue;
    struct stat status;
    const bool same = ::fstat(fd, &status) == 0 && status.st_ino == inside.inode;
    void* at = same ? map_file(fd, inside.nbytes) : nullptr;
    ::close(fd);
    if (!at) return kInvalidValue;
    *address = reinterpret_cast<std::uint64_t>(at);
    const std::lock_guard lock(world().mutex);
    world().mapped[*address] = inside.nbytes;
    return kSuccess;
}
int cuIpcCloseMemHandle(std::uint64_t address) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    const auto at = world().mapped.find(address);
    if (at == world().mapped.end()) return kInvalidValue;
    if (!world().sticky) world().order.end(__func__, at->first, at->second);
    ::munmap(reinterpret_cast<void*>(address), at->second);
    world().mapped.erase(at);
    return kSuccess;
}
int cuMemGetAddressRange_v2(std::uint64_t* start, std::size_t* nbytes, std::uint64_t address) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    for (const auto& [at, allocation] : world().allocations)
        if (address >= at && address < at + allocation.nbytes)
            return *start = at, *nbytes = allocation.nbytes, kSuccess;
    for (const auto& [at, size] : world().mapped)
        if (address >= at && address < at + size) return *start = at, *nbytes = size, kSuccess;
    return kNotFound;
}
// CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: "suitable for cudaIpcGetMemHandle" (cuda.h 13.0). An address that
// CUDA does not know is CUDA_ERROR_INVALID_VALUE.
int cuPointerGetAttribute(void* data, int attribute, std::uint64_t address) {
    ENTER(true);
    if (attribute != 10) return kInvalidValue;
    const std::lock_guard lock(world().mutex);
    for (const auto& [at, allocation] : world().allocations)
        if (address >= at && address < at + allocation.nbytes)
            return *static_cast<int*>(data) = !allocation.is_virtual, kSuccess;
    return kInvalidValue;
}
int cuMemcpyAsync(std::uint64_t dst, std::uint64_t src, std::size_t nbytes, void* stream) {
    ENTER(true);
    if (const int failed = begin_copies(__func__, stream, {{src, dst, nbytes}})) return failed;
    stream_of(stream).put([=] {
        const std::lock_guard wait(world().gate);
        std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes);
    });
    return kSuccess;
}

// "Must not be legacy NULL stream"; "attrsIdxs must always be 0" for the first; the batch is in stream order, its copies
// are in none (cuda.h 13.0, cuMemcpyBatchAsync): here they run in the reverse of the order given.
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
    std::vector<Row> copies;
    for (std::size_t i = count; i-- > 0;) copies.push_back({srcs[i], dsts[i], sizes[i]});
    if (const int failed = begin_copies(__func__, stream, copies)) return failed;
    stream_of(stream).put([copies] {
        const std::lock_guard wait(world().gate);
        for (const Row& one : copies)
            std::memcpy(reinterpret_cast<void*>(one.dst), reinterpret_cast<const void*>(one.src), one.nbytes);
    });
    return kSuccess;
}

int cuStreamCreate(void** stream, unsigned) {
    ENTER(true);
    static std::atomic<std::uintptr_t> next = 1;
    *stream = reinterpret_cast<void*>(next++ << 4);
    stream_of(*stream);
    return kSuccess;
}
int cuStreamDestroy_v2(void* stream) {
    ENTER(true);
    std::unique_ptr<Stream> gone;
    {
        const std::lock_guard lock(world().mutex);
        const auto at = world().streams.find(stream);
        if (at == world().streams.end()) return kInvalidValue;
        gone = std::move(at->second);
        world().streams.erase(at);
    }
    // Work that is left still runs, and nobody waits for it.
    std::thread([left = gone.release()] { delete left; }).detach();
    return kSuccess;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    ENTER(true);
    if (const auto mark = static_cast<Event*>(event)->mark) {
        stream_of(stream).put([mark] { mark->wait(); });
        const std::lock_guard lock(world().mutex);
        world().order.wait(stream, mark->before);
    }
    return kSuccess;
}
int cuStreamSynchronize(void* stream) {
    ENTER(true);
    Clock before;
    {
        const std::lock_guard lock(world().mutex);
        before = world().order.now(stream);
    }
    stream_of(stream).drain();
    const std::lock_guard lock(world().mutex);
    world().order.see(before);
    return kSuccess;
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
    ENTER(true);
    stream_of(stream).put([=] {
        if (!world().sticky) function(argument);
    });
    return kSuccess;
}
int cuEventCreate(void** event, unsigned) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    *event = *world().events.insert(new Event).first;
    return kSuccess;
}
int cuEventRecord(void* event, void* stream) {
    ENTER(true);
    const auto mark = std::make_shared<Mark>();
    static_cast<Event*>(event)->mark = mark;
    {
        const std::lock_guard lock(world().mutex);
        mark->before = world().order.now(stream);
    }
    stream_of(stream).put([mark] { mark->reach(); });
    return kSuccess;
}
int cuEventQuery(void* event) {
    ENTER(true);
    const auto mark = static_cast<Event*>(event)->mark;
    if (!mark) return kSuccess;
    if (!mark->is_reached()) return kNotReady;
    const std::lock_guard lock(world().mutex);
    world().order.see(mark->before);
    return kSuccess;
}
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
    if (!x || !y || z != 1 || y > 65535 || threads != pdlink::cuda::kThreads) return kInvalidValue;
    const std::string& name = *static_cast<std::string*>(function);
    const std::size_t nbytes = name == "pdlink_runs" ? sizeof(pdlink::cuda::RunList) : sizeof(pdlink::cuda::Reshape);
    pdlink::cuda::Launch launch{name, x, y, {}};
    const auto* bytes = static_cast<const std::byte*>(arguments[0]);
    launch.argument.assign(bytes, bytes + nbytes);  // the driver copies it before it returns, too
    if (name == "pdlink_runs") {  // the list is in pinned memory, and there by now
        const auto& list = *reinterpret_cast<const pdlink::cuda::RunList*>(bytes);
        const std::size_t count = list.num_shares / list.segments.divisor();
        const Row* rows = reinterpret_cast<const Row*>(list.runs);
        const std::lock_guard lock(world().mutex);
        world().order.run("pdlink_runs", stream, {rows, rows + count});
    } else {  // so are the slots of tokens
        const auto rows = rows_of(name, *reinterpret_cast<const pdlink::cuda::Reshape*>(bytes), y);
        const std::lock_guard lock(world().mutex);
        for (const Row& row : rows)
            for (const std::uint64_t at : {row.src, row.src + row.nbytes - 1, row.dst, row.dst + row.nbytes - 1})
                if (where(at, 1) != Where::kKnown)  // a kernel may go from one registration into the next
                    world().order.faults.push_back(name + " reaches memory that the GPU does not know");
        world().order.run(name.c_str(), stream, rows);
    }
    stream_of(stream).put([launch = std::move(launch)] {
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
// From now on every call in a context answers this, as after a kernel's fault; 0 ends it.
void fake_break(int result) { world().sticky = result; }
// Kernels and copies wait from now on (another thread must not hold it), or go on.
void fake_hold() { world().gate.lock(); }
void fake_go_on() { world().gate.unlock(); }
// What is put into this stream from now on waits, or goes on.
void fake_hold_stream(void* stream) {
    const auto mark = std::make_shared<Mark>();
    stream_of(stream).put([mark] { mark->wait(); });
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
// What exists: allocations, IPC mappings, registrations, streams, events, modules, contexts, depth of this thread's
// stack of contexts. The default stream does not count.
void fake_count(int* counts) {
    const std::lock_guard lock(world().mutex);
    World& w = world();
    int ours = 0;
    for (const auto& [address, allocation] : w.allocations) ours += allocation.ours;
    const int values[8] = {ours,
                           static_cast<int>(w.mapped.size()),
                           static_cast<int>(w.registered.size()),
                           static_cast<int>(w.streams.size() - w.streams.count(nullptr)),
                           static_cast<int>(w.events.size()),
                           w.modules,
                           w.contexts,
                           static_cast<int>(contexts.size())};
    std::memcpy(counts, values, sizeof values);
}
// Make an allocation one of virtual memory.
void fake_make_virtual(std::uint64_t address) {
    const std::lock_guard lock(world().mutex);
    world().allocations.at(address).is_virtual = true;
}
// Call a test's memory file, mapped at `address`, device memory; and no longer (nbytes 0).
void fake_lend(std::uint64_t address, std::uint64_t nbytes, int fd) {
    const std::lock_guard lock(world().mutex);
    if (nbytes)
        world().allocations[address] = {nbytes, fd, false};
    else if (const auto at = world().allocations.find(address); at != world().allocations.end()) {
        world().order.forget(address, at->second.nbytes);
        world().allocations.erase(at);
    }
}

}  // extern "C"
