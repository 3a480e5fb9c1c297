#include "copy/peer_memory.h"

#include <algorithm>
#include <cerrno>

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

Region map_file(std::int64_t pid, const PeerFile& file) {
    const Descriptor fd(open_peer_file(pid, file.fd, file.device, file.inode));
    require_sealed_memory(fd.get(), file.nbytes);
    struct stat status;
    if (::fstat(fd.get(), &status) != 0)
        throw std::system_error(errno, std::generic_category(), "fstat of peer file");
    // Touching a hole would allocate it from our own memory limit.
    if (static_cast<std::uint64_t>(status.st_blocks) * 512 < file.nbytes)
        throw std::invalid_argument("a region is a file with holes");
    void* at = ::mmap(nullptr, file.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a peer's region");
    return {static_cast<std::byte*>(at), file.nbytes};
}

void unmap(const std::vector<Region>& regions) {
    for (const Region& region : regions) ::munmap(region.base, region.nbytes);
}

}  // namespace

// Open the pidfd before checking the files: if the pid were reused by then, the check of the files would fail, so the
// pidfd belongs to the inviting process. Check the gate first, because it proves the invitation; take it last,
// because that works only once.
PeerMemory::PeerMemory(std::int64_t pid, const std::vector<PeerFile>& files, const GateName& gate)
    : pid_(pid), life_(open_life(pid)), gate_(open_gate(pid, gate)) {
    try {
        for (const PeerFile& file : files) regions_.push_back(map_file(pid, file));
        gate_->take();
    } catch (...) {
        unmap(regions_);
        throw;
    }
}

PeerMemory::~PeerMemory() { unmap(regions_); }

bool PeerMemory::prepare_some() {
    if (prepared_region_ == regions_.size()) return false;
    const Region& region = regions_[prepared_region_];
    const std::size_t part = std::min(kPrepareNbytes, region.nbytes - prepared_nbytes_);
    // An older kernel answers EINVAL, and the first copy is slow instead.
    ::madvise(region.base + prepared_nbytes_, part, kMadvPopulateRead);
    prepared_nbytes_ += part;
    if (prepared_nbytes_ == region.nbytes) {
        ++prepared_region_;
        prepared_nbytes_ = 0;
    }
    return prepared_region_ < regions_.size();
}

}  // namespace pdlink
