// The gate: how the owner of memory shuts out a writer on the same host that stores into it directly.
//
// A process that has mapped our pages, or reaches them by cross-memory attach, cannot be stopped by closing a
// connection: it may be suspended in the middle of a copy and go on a minute later. So every invited peer gets one
// page of shared memory with two words. The writer raises `busy` and then looks at `closed`; the owner raises
// `closed` and then looks at `busy`. Both orders are sequentially consistent, so at least one of them sees the
// other: either the writer does not begin, or the owner waits until it has ended. A writer that is dead is quiet.
//
// One page per peer, never reused: a late writer can only ever see its own gate, and that stays closed.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <system_error>

namespace pdlink {

// What the page holds. Fixed layout: two processes of different builds may share it.
struct GateWords {
    std::atomic<std::uint32_t> closed;       // set once by the owner, never cleared
    std::atomic<std::uint32_t> busy;         // copies of the writer that have begun and not ended
    std::atomic<std::int64_t> writer_pid;    // 0 until the writer has mapped the page
    std::atomic<std::uint64_t> writer_born;  // start time of that process in clock ticks since boot
};
static_assert(sizeof(GateWords) == 24 && std::atomic<std::uint64_t>::is_always_lock_free);

constexpr std::size_t kGateNbytes = 4096;

// Start time of a process (field 22 of /proc/PID/stat), 0 if there is none or it is a zombie. With the pid it names
// a process for ever.
inline std::uint64_t process_born(std::int64_t pid) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
    std::FILE* file = std::fopen(path, "re");
    if (!file) return 0;
    char text[1024];
    const std::size_t got = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[got] = 0;
    const char* after_name = std::strrchr(text, ')');  // the name may hold spaces and parentheses
    if (!after_name || after_name[1] != ' ' || after_name[2] == 'Z' || after_name[2] == 'X') return 0;
    const char* field = after_name + 2;  // field 3
    for (int i = 3; i < 22 && field; ++i) {
        field = std::strchr(field, ' ');
        if (field) ++field;
    }
    return field ? std::strtoull(field, nullptr, 10) : 0;
}

// One mapped gate page; unmapped by the destructor.
class GatePage {
  public:
    explicit GatePage(int fd) {
        void* at = ::mmap(nullptr, kGateNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of gate page");
        words_ = static_cast<GateWords*>(at);
    }
    GatePage(const GatePage&) = delete;
    GatePage& operator=(const GatePage&) = delete;
    ~GatePage() { ::munmap(words_, kGateNbytes); }

    GateWords& words() const { return *words_; }

  private:
    GateWords* words_;
};

// The side whose memory is written. Holds the descriptor that the writer opens through /proc.
class GateOwner {
  public:
    GateOwner() : fd_(create()), page_(fd_) {}
    GateOwner(const GateOwner&) = delete;
    GateOwner& operator=(const GateOwner&) = delete;
    ~GateOwner() { ::close(fd_); }

    int fd() const { return fd_; }

    // From here on no new copy begins.
    void shut() { page_.words().closed.store(1, std::memory_order_seq_cst); }

    // True if no copy is under way and none can begin: only meaningful after shut().
    bool quiet() const {
        GateWords& words = page_.words();
        if (words.busy.load(std::memory_order_seq_cst) == 0) return true;
        const std::int64_t pid = words.writer_pid.load();
        return pid != 0 && process_born(pid) != words.writer_born.load();
    }

  private:
    static int create() {
        const int fd = ::memfd_create("pdlink-gate", MFD_CLOEXEC);
        if (fd < 0 || ::ftruncate(fd, kGateNbytes) != 0)
            throw std::system_error(errno, std::generic_category(), "memfd for gate page");
        return fd;
    }
    int fd_;
    GatePage page_;
};

// The side that writes.
class GateWriter {
  public:
    explicit GateWriter(int fd) : page_(fd) {
        page_.words().writer_born.store(process_born(::getpid()));
        page_.words().writer_pid.store(::getpid());
    }

    // Call before touching the owner's memory; false means it must not be touched any more.
    bool enter() {
        page_.words().busy.fetch_add(1, std::memory_order_seq_cst);
        if (page_.words().closed.load(std::memory_order_seq_cst) == 0) return true;
        leave();
        return false;
    }

    // Call when nothing of the copy can still be written.
    void leave() { page_.words().busy.fetch_sub(1, std::memory_order_seq_cst); }

    bool shut() const { return page_.words().closed.load(std::memory_order_seq_cst) != 0; }

  private:
    GatePage page_;
};

// Open another process's descriptor and make sure it is the file that was meant (a pid can be reused).
// Throws std::system_error; the caller closes the result.
inline int open_peer_file(std::int64_t pid, int peer_fd, std::uint64_t device, std::uint64_t inode) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(peer_fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
    struct stat status;
    if (::fstat(fd, &status) != 0 || status.st_dev != device || status.st_ino != inode) {
        ::close(fd);
        throw std::system_error(ESTALE, std::generic_category(), path + " is not the invited file any more");
    }
    return fd;
}

}  // namespace pdlink
