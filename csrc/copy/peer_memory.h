// The memory of a peer process that invited us: its regions mapped here, its gate, and its pidfd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/descriptor.h"
#include "common/gate.h"

namespace pdlink {

// A file of another process: its descriptor number there, and its expected fstat.
struct PeerFile {
    int fd;
    std::uint64_t device;
    std::uint64_t inode;
    std::uint64_t nbytes;
};

struct Region {
    std::byte* base;
    std::size_t nbytes;
};

class PeerMemory {
  public:
    // Throws std::system_error if the process or a file is gone or may not be opened, std::invalid_argument if a
    // file is not what the invitation says.
    PeerMemory(std::int64_t pid, const std::vector<PeerFile>& files, const GateName& gate);
    PeerMemory(const PeerMemory&) = delete;
    PeerMemory& operator=(const PeerMemory&) = delete;
    ~PeerMemory();

    std::int64_t pid() const { return pid_; }
    // Readable when the process has ended. Writing to a dead process's memory succeeds silently, so only this shows
    // its end.
    int life_fd() const { return life_.get(); }
    const std::vector<Region>& regions() const { return regions_; }
    GateWriter& gate() { return *gate_; }

    // Enter the next pages into our page table, so that the first copy does not fault on every page (1.9 GB/s
    // instead of 6 on a Xeon). Call until it returns false.
    bool prepare_some();

  private:
    std::int64_t pid_;
    Descriptor life_;
    std::vector<Region> regions_;
    std::unique_ptr<GateWriter> gate_;
    std::size_t prepared_region_ = 0;
    std::size_t prepared_nbytes_ = 0;  // of that region
};

}  // namespace pdlink
