// Virtual memory of the test double in fake_driver.cpp: what torch's expandable segments are made of, and what a peer
// does with them. Physical memory is a memory file, which another process gets as the descriptor that it is exported
// as.
//
// Rules in quotation marks are NVIDIA's words: cuda.h 13.0, the description of the call.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "fake_world.h"

using namespace fake;

namespace {

enum : std::uint64_t { kPosixFd = 1, kFabric = 8 };
// CU_MEM_ALLOC_GRANULARITY_MINIMUM: 2 MiB on GPUs of today, which the tests need not fill.
constexpr std::uint64_t kGranularity = 4096;
constexpr const char* kFileName = "fake-physical-memory";

struct FabricHandle {  // in a CUmemFabricHandle
    std::int64_t pid;
    std::int32_t fd;
    std::uint64_t nbytes, inode;
};
static_assert(sizeof(FabricHandle) <= 64);

// "Applications that intend to use CU_MEM_HANDLE_TYPE_FABRIC based memory sharing must ensure: [...] have at least
// one IMEX channel file accessible by the user".
bool has_imex_channel() { return std::getenv("PDLINK_FAKE_IMEX") != nullptr; }

bool is_ours(int fd) {
    char name[PATH_MAX];
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = ::readlink(link.c_str(), name, sizeof name);
    return length > 0 && std::string(name, length).find(kFileName) != std::string::npos;
}

// The caller holds the mutex.
std::uint64_t new_handle(int fd, std::uint64_t nbytes, std::uint64_t types) {
    static std::uint64_t next = 0x1000;
    world().handles[++next] = {std::make_shared<Physical>(fd, nbytes, types), 1};
    return next;
}

void* as_pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

struct Location {
    int type, id;
};
struct AllocationProp {
    int type, handle_types;
    Location location;
    void* windows;
    unsigned char flags[8];
};
struct AccessDesc {
    Location location;
    int flags;
};

// "The size of this allocation must be a multiple of the value given via cuMemGetAllocationGranularity".
int cuMemCreate(std::uint64_t* handle, std::size_t nbytes, const AllocationProp* prop, std::uint64_t flags) {
    ENTER(true);
    if (prop->type != 1 || prop->location.type != 1 || flags || !nbytes || nbytes % kGranularity)
        return kInvalidValue;
    if (prop->location.id != 0) return kInvalidDevice;
    if (prop->handle_types & kFabric && !has_imex_channel()) return kNotPermitted;
    const int fd = ::memfd_create(kFileName, MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kOutOfMemory;
    const std::lock_guard lock(world().mutex);
    *handle = new_handle(fd, nbytes, prop->handle_types);
    return kSuccess;
}

// "If handle is not a valid handle the behavior is undefined."
int cuMemRelease(std::uint64_t handle) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    const auto at = world().handles.find(handle);
    if (at == world().handles.end())
        return world().order.faults.push_back("cuMemRelease of no handle"), kInvalidValue;
    if (--at->second.references > 0) return kSuccess;
    if (!at->second.memory->handle_types) at->second.memory->close();  // imported: a descriptor less, as on a GPU
    world().handles.erase(at);
    return kSuccess;
}

// "The size and address parameters must be a multiple of the host page size". The address is a hint, which the double
// always follows: to memory of a test, which becomes virtual memory until the range is freed.
int cuMemAddressReserve(std::uint64_t* address, std::size_t nbytes, std::size_t, std::uint64_t hint,
                        std::uint64_t flags) {
    ENTER(true);
    if (!nbytes || nbytes % kGranularity || hint % kGranularity || flags) return kInvalidValue;
    void* at =
        ::mmap(as_pointer(hint), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | (hint ? MAP_FIXED : 0), -1, 0);
    if (at == MAP_FAILED) return kOutOfMemory;
    *address = reinterpret_cast<std::uint64_t>(at);
    const std::lock_guard lock(world().mutex);
    world().reserved[*address] = {nbytes, hint != 0};
    return kSuccess;
}

// "The size must match what was given to memAddressReserve and the ptr given must match what was returned".
int cuMemAddressFree(std::uint64_t address, std::size_t nbytes) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    const auto at = world().reserved.find(address);
    if (at == world().reserved.end() || at->second.nbytes != nbytes) return kInvalidValue;
    const auto first = world().mapped.lower_bound(address);
    if (first != world().mapped.end() && first->first < address + nbytes) return kInvalidValue;
    if (!at->second.is_lent) ::munmap(as_pointer(address), nbytes);
    world().reserved.erase(at);
    return kSuccess;
}

// "This range must be an address reservation"; "ptr, size, and offset must be a multiple of" the granularity; the
// offset "currently must be zero"; "can only create mappings on VA range reservations that are not currently mapped";
// "does not make the address accessible".
int cuMemMap(std::uint64_t address, std::size_t nbytes, std::size_t offset, std::uint64_t handle,
             std::uint64_t flags) {
    ENTER(true);
    World& w = world();
    const std::lock_guard lock(w.mutex);
    const auto physical = w.handles.find(handle);
    if (physical == w.handles.end() || offset || flags || address % kGranularity || !nbytes ||
        nbytes % kGranularity || nbytes > physical->second.memory->nbytes)
        return kInvalidValue;
    auto range = w.reserved.upper_bound(address);
    if (range == w.reserved.begin()) return kInvalidValue;
    --range;
    if (address + nbytes > range->first + range->second.nbytes) return kInvalidValue;
    for (const auto& [at, one] : w.mapped)
        if (address < at + one.nbytes && at < address + nbytes) return kInvalidValue;
    const int fd = physical->second.memory->fd;
    if (::mmap(as_pointer(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return kOutOfMemory;
    w.mapped[address] = {nbytes, handle, physical->second.memory, false};
    return kSuccess;
}

// "The range must be a fully mapped address range containing all allocations created by cuMemMap / cuMemCreate".
int cuMemSetAccess(std::uint64_t address, std::size_t nbytes, const AccessDesc* access, std::size_t count) {
    ENTER(true);
    World& w = world();
    const std::lock_guard lock(w.mutex);
    if (count != 1 || access->location.type != 1 || access->flags != 3) return kInvalidValue;
    if (access->location.id != 0) return kInvalidDevice;
    std::uint64_t reached = address;
    for (auto at = w.mapped.lower_bound(address); at != w.mapped.end() && at->first == reached; ++at)
        if ((reached = at->first + at->second.nbytes) >= address + nbytes) break;
    if (reached != address + nbytes) return kInvalidValue;
    for (auto at = w.mapped.lower_bound(address); at != w.mapped.end() && at->first < reached; ++at)
        at->second.is_accessible = true;
    ::mprotect(as_pointer(address), nbytes, PROT_READ | PROT_WRITE);
    return kSuccess;
}

// "The range must be the entire contiguous address range that was mapped to": whole mappings. "Any backing memory
// allocations will be freed if there are no existing mappings and there are no unreleased memory handles."
int cuMemUnmap(std::uint64_t address, std::size_t nbytes) {
    ENTER(true);
    World& w = world();
    const std::lock_guard lock(w.mutex);
    std::uint64_t reached = address;
    auto at = w.mapped.lower_bound(address);
    for (; at != w.mapped.end() && at->first == reached && reached < address + nbytes; ++at)
        reached += at->second.nbytes;
    if (reached != address + nbytes) return kInvalidValue;
    if (!w.sticky) w.order.end(__func__, address, nbytes);
    w.mapped.erase(w.mapped.lower_bound(address), at);
    ::mmap(as_pointer(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return kSuccess;
}

// "The handle is guaranteed to be the same handle value used to map the memory. If the address requested is not
// mapped, the function will fail. The returned handle must be released". Memory of cuMemAlloc has none.
int cuMemRetainAllocationHandle(std::uint64_t* handle, void* pointer) {
    ENTER(true);
    World& w = world();
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    const std::lock_guard lock(w.mutex);
    for (const auto& [at, one] : w.mapped) {
        if (address < at || address >= at + one.nbytes) continue;
        auto& kept = w.handles[one.handle];  // the owner may have released its own
        kept.memory = one.memory;
        ++kept.references;
        return *handle = one.handle, kSuccess;
    }
    return kInvalidValue;
}

// The allocation must have been created with the type (CUmemAllocationProp: "requested CUmemAllocationHandleType").
int cuMemExportToShareableHandle(void* exported, std::uint64_t handle, int type, std::uint64_t flags) {
    ENTER(true);
    const std::lock_guard lock(world().mutex);
    const auto at = world().handles.find(handle);
    if (at == world().handles.end() || flags || !(at->second.memory->handle_types & type)) return kInvalidValue;
    const Physical& memory = *at->second.memory;
    if (type == kPosixFd) return *static_cast<int*>(exported) = ::fcntl(memory.fd, F_DUPFD_CLOEXEC, 0), kSuccess;
    struct stat status;
    ::fstat(memory.fd, &status);
    const FabricHandle inside{::getpid(), memory.fd, memory.nbytes, status.st_ino};
    std::memset(exported, 0, 64);
    std::memcpy(exported, &inside, sizeof inside);
    return kSuccess;
}

// "If the importer process has not been granted access to the same IMEX channel as the exporter process, this API
// will error as CUDA_ERROR_NOT_PERMITTED." The descriptor stays the caller's.
int cuMemImportFromShareableHandle(std::uint64_t* handle, void* exported, int type) {
    ENTER(true);
    int fd = -1;
    if (type == kPosixFd) {
        fd = static_cast<int>(reinterpret_cast<std::uintptr_t>(exported));
        if (!is_ours(fd)) return kInvalidValue;
        fd = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    } else if (type == kFabric) {
        if (!has_imex_channel()) return kNotPermitted;
        FabricHandle inside;
        std::memcpy(&inside, exported, sizeof inside);
        const std::string path = "/proc/" + std::to_string(inside.pid) + "/fd/" + std::to_string(inside.fd);
        fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        struct stat status;
        if (fd >= 0 && (::fstat(fd, &status) != 0 || status.st_ino != inside.inode)) ::close(fd), fd = -1;
    }
    struct stat status;
    if (fd < 0 || ::fstat(fd, &status) != 0) return kInvalidValue;
    const std::lock_guard lock(world().mutex);
    *handle = new_handle(fd, static_cast<std::uint64_t>(status.st_size), 0);
    return kSuccess;
}

}  // extern "C"
