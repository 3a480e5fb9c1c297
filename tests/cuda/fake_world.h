// What there is on the test double in fake_driver.cpp, and how every call of it begins.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_order.h"

namespace fake {

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
    kInvalidDevice = 101,
    kInvalidHandle = 400,
    kIllegalAddress = 700,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
    kNotPermitted = 800,
};

struct Allocation {
    std::uint64_t nbytes;
    int fd;
    bool ours;               // made by cuMemAlloc, not lent by a test
    bool is_pooled = false;  // as of cuMemAllocAsync: cuIpcGetMemHandle does not take it, and nothing else exports it
};

// Of cuMemCreate, or imported (then nobody exports it again): it is there until the last handle is released and the
// last mapping gone.
struct Physical {
    int fd;
    std::uint64_t nbytes;
    std::uint64_t handle_types;  // CUmemAllocationHandleType, which it may be exported as
    Physical(int fd, std::uint64_t nbytes, std::uint64_t types) : fd(fd), nbytes(nbytes), handle_types(types) {}
    Physical(const Physical&) = delete;
    ~Physical() { close(); }
    void close() {
        if (fd >= 0) ::close(fd);
        fd = -1;
    }
};

struct PhysicalHandle {
    std::shared_ptr<Physical> memory;
    int references;
};

struct Mapping {  // by cuMemMap
    std::uint64_t nbytes, handle;
    std::shared_ptr<Physical> memory;
    bool is_accessible;
};

struct Reservation {  // by cuMemAddressReserve
    std::uint64_t nbytes;
    bool is_lent;  // of a test's memory
};

struct Opened {  // by cuIpcOpenMemHandle
    std::uint64_t nbytes;
    std::string handle;
    int references;
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
    bool is_empty() {
        const std::lock_guard lock(mutex_);
        return work_.empty();
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
    std::map<std::uint64_t, Opened> opened;           // by address
    std::map<std::uint64_t, PhysicalHandle> handles;
    std::map<std::uint64_t, Reservation> reserved;      // by address
    std::map<std::uint64_t, Mapping> mapped;            // by address
    std::map<std::uint64_t, std::uint64_t> registered;  // host memory: address to nbytes
    Order order;
    std::map<void*, std::shared_ptr<Mark>> held;  // streams that a test holds
    std::map<void*, std::shared_ptr<Stream>> streams;
    std::set<Event*> events;
    int modules = 0, contexts = 0;
    std::vector<std::string> log;
    std::map<std::string, std::pair<int, int>> failures;  // call: result, calls that still succeed
    std::string stalled;                                  // the call that a test lets stand
    bool stands = false;                                  // and it does
    std::condition_variable stall;
    std::atomic<int> sticky = 0;  // what every call in a context answers after a fault
    std::mutex gate;              // held by a test: kernels wait
};

inline World& world() {
    static World* one = new World;  // never destroyed: streams' threads may outlive main
    return *one;
}

inline thread_local std::vector<void*> contexts;
inline thread_local bool in_host_function = false;
inline int primary;  // its address is the context

// How long a call stands that no test lets go on: what waits for it with a lock of Python's must not stand for ever.
inline constexpr std::chrono::seconds kStall(20);

// The first line of every call: write it down, fail if a test wants that, and demand a context where CUDA does.
inline int enter(const char* call, bool needs_context) {
    World& w = world();
    std::unique_lock lock(w.mutex);
    if (w.stalled == call) {
        w.stands = true;
        w.stall.notify_all();
        w.stall.wait_for(lock, kStall, [&] { return w.stalled.empty(); });
        w.stands = false;
        w.stalled.clear();
    }
    w.log.push_back(std::string(call) + (contexts.empty() ? " -" : " +"));
    const auto at = w.failures.find(call);
    if (at != w.failures.end() && at->second.second-- == 0) {
        const int result = at->second.first;
        w.failures.erase(at);
        return result;
    }
    // cuLaunchHostFunc: "The host function must not make any CUDA API calls."
    if (in_host_function) {
        w.order.faults.push_back(std::string(call) + " by a host function");
        return kNotPermitted;
    }
    if (needs_context && contexts.empty()) return kInvalidContext;
    return needs_context ? w.sticky.load() : kSuccess;
}

#define ENTER(needs_context) \
    if (const int failed = enter(__func__, needs_context)) return failed

// Null: there is no such stream (any more).
inline Stream* stream_of(void* handle) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    if (!handle && !w.streams.contains(handle)) w.streams[handle] = std::make_shared<Stream>();
    const auto at = w.streams.find(handle);
    return at == w.streams.end() ? nullptr : at->second.get();
}

#define STREAM(name, handle)                \
    Stream* const name = stream_of(handle); \
    if (!name) return kInvalidHandle

// cuMemSetAccess: what has no access cannot be reached; mappings side by side can be, as one.
inline bool is_mapped(std::uint64_t begin, std::uint64_t end) {
    const World& w = world();
    while (begin < end) {
        auto at = w.mapped.upper_bound(begin);
        if (at == w.mapped.begin()) return false;
        --at;
        if (!at->second.is_accessible || begin >= at->first + at->second.nbytes) return false;
        begin = at->first + at->second.nbytes;
    }
    return true;
}

enum class Where { kKnown, kPageable, kInvalid };

// "Memory regions requested must be either entirely registered with CUDA, or in the case of host pageable transfers,
// not registered at all" (CUDA Driver API 13.0, API synchronization behavior). The caller holds the mutex.
inline Where where(std::uint64_t begin, std::uint64_t nbytes) {
    const World& w = world();
    const std::uint64_t end = begin + nbytes;
    bool touches = false;
    const auto inside = [&](std::uint64_t at, std::uint64_t size) {
        touches = touches || (begin < at + size && at < end);
        return begin >= at && end <= at + size;
    };
    for (const auto& [at, allocation] : w.allocations)
        if (inside(at, allocation.nbytes)) return Where::kKnown;
    for (const auto& [at, one] : w.opened)
        if (inside(at, one.nbytes)) return Where::kKnown;
    if (is_mapped(begin, end)) return Where::kKnown;
    for (const auto& [at, one] : w.reserved) inside(at, one.nbytes);
    for (const auto& [at, size] : w.registered)
        if (inside(at, size)) return Where::kKnown;
    return touches ? Where::kInvalid : Where::kPageable;
}

inline void* map_file(int fd, std::uint64_t nbytes) {
    void* at = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? nullptr : at;
}

}  // namespace fake
