#include "copy/peer_memory.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace pdlink {
namespace {

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // the same on every architecture; older kernel headers lack it
#endif

// Linux 5.14; older C libraries lack the name. Reading enters sixteen pages per fault (fault-around), writable ones
// as such since nobody tracks dirty pages of a memory file: 512 MiB in 67 ms, with MADV_POPULATE_WRITE in 190 ms.
constexpr int kMadvPopulateRead = 22;

// About 2 ms of page table work: how long it may hold up another peer.
constexpr std::size_t kPrepareNbytes = std::size_t{16} << 20;

Descriptor open_life(std::int64_t pid) {
    const long fd = ::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "pidfd_open of " + std::to_string(pid));
    return Descriptor(static_cast<int>(fd));
}

// The end of the bytes from the file's beginning that have memory, of which the first `known_nbytes` have it. The
// kernel walks over the pages behind those, so it is asked about few.
std::size_t filled(int fd, std::size_t known_nbytes, std::size_t nbytes) {
    if (known_nbytes == nbytes) return nbytes;
    const off_t hole = ::lseek(fd, static_cast<off_t>(known_nbytes), SEEK_HOLE);
    return hole < 0 ? known_nbytes : std::min(static_cast<std::size_t>(hole), nbytes);
}

}  // namespace

PeerMemory::Mapping PeerMemory::map_file(std::int64_t pid, const PeerFile& file) {
    Descriptor fd(open_peer_file(pid, file.fd, file.device, file.inode));
    require_sealed_memory(fd.get(), file.nbytes);
    struct stat status;
    if (::fstat(fd.get(), &status) != 0)
        throw std::system_error(errno, std::generic_category(), "fstat of peer file");
    const bool whole = static_cast<std::uint64_t>(status.st_blocks) * 512 >= file.nbytes;
    const std::size_t filled_nbytes = whole ? file.nbytes : filled(fd.get(), 0, file.nbytes);
    void* at = ::mmap(nullptr, file.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a peer's region");
    if (whole) fd = Descriptor();
    return {{static_cast<std::byte*>(at), file.nbytes}, std::move(fd), filled_nbytes, 0};
}

void PeerMemory::unmap() {
    for (const Mapping& mapping : mappings_) ::munmap(mapping.region.base, mapping.region.nbytes);
}

// Open the pidfd before checking the files: if the pid were reused by then, the check of the files would fail, so the
// pidfd belongs to the inviting process. Check the gate first, because it proves the invitation; take it last,
// because that works only once.
PeerMemory::PeerMemory(std::int64_t pid, const std::vector<PeerFile>& files, const GateName& gate)
    : pid_(pid), life_(open_life(pid)), gate_(open_gate(pid, gate)) {
    try {
        for (const PeerFile& file : files) mappings_.push_back(map_file(pid, file));
        gate_->take();
    } catch (...) {
        unmap();
        throw;
    }
}

PeerMemory::~PeerMemory() { unmap(); }

std::vector<Extent> PeerMemory::extents(bool& grew) {
    std::vector<Extent> found;
    found.reserve(mappings_.size());
    const std::lock_guard lock(mutex_);
    grew = false;
    for (Mapping& mapping : mappings_) {
        const std::size_t now = filled(mapping.file.get(), mapping.filled_nbytes, mapping.region.nbytes);
        grew |= now > mapping.filled_nbytes;
        mapping.filled_nbytes = now;
        found.push_back({reinterpret_cast<std::uintptr_t>(mapping.region.base), now});
    }
    return found;
}

bool PeerMemory::prepare_some() {
    std::byte* at = nullptr;
    std::size_t part = 0, left = 0;
    {
        const std::lock_guard lock(mutex_);
        for (Mapping& mapping : mappings_) {
            const std::size_t unprepared = mapping.filled_nbytes - mapping.prepared_nbytes;
            left += unprepared;
            if (part || !unprepared) continue;
            part = std::min(kPrepareNbytes, unprepared);
            at = mapping.region.base + mapping.prepared_nbytes;
            mapping.prepared_nbytes += part;
        }
    }
    // An older kernel answers EINVAL, and the first copy is slow instead.
    if (part) ::madvise(at, part, kMadvPopulateRead);
    return left > part;
}

}  // namespace pdlink
