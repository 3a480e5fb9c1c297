// The memory of a peer process that invited us: its regions mapped here, its gate, and its pidfd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/descriptor.h"
#include "common/gate.h"
#include "common/runs.h"

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
    GateWriter& gate() { return *gate_; }

    // What may be written to: the bytes of each region that have memory now. A hole is none of them: touching it
    // would take memory from our own limit, or end us where there is none. One system call for each region with
    // holes. `grew`: whether there is more than at the last call.
    std::vector<Extent> extents(bool& grew);

    // Enter the next pages into our page table, so that the first copy does not fault on every page (1.9 GB/s
    // instead of 6 on a Xeon). Call until it returns false, and again when the extents have grown.
    bool prepare_some();

  private:
    // A file, mapped here as a whole. Its owner gives it memory from its beginning on, perhaps in steps.
    struct Mapping {
        Region region;
        Descriptor file;              // none once all of it has memory
        std::size_t filled_nbytes;    // what has memory, as it was last looked at
        std::size_t prepared_nbytes;  // what is in our page table
    };

    static Mapping map_file(std::int64_t pid, const PeerFile& file);
    void unmap();

    std::int64_t pid_;
    Descriptor life_;
    std::mutex mutex_;  // guards the numbers in mappings_
    std::vector<Mapping> mappings_;
    std::unique_ptr<GateWriter> gate_;
};

}  // namespace pdlink
