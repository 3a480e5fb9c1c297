// The gate: fences a writer on the same host that stores directly into the owner's memory.
//
// A process that has mapped our pages, or reaches them by cross-memory attach, cannot be stopped by closing a
// connection: it may be suspended in the middle of a copy and go on a minute later. So every invited peer gets one
// page of shared memory with two words. The writer raises `busy` and then looks at `closed`; the owner raises
// `closed` and then looks at `busy`. Both orders are sequentially consistent, so at least one of them sees the
// other: either the writer does not begin, or the owner waits until it has ended. A dead writer counts as quiet.
//
// One page per peer, never reused: a late writer only ever sees its own gate, which stays closed.
//
// An invitation names a process and its files, but anybody could have made it. So the page holds a random number that
// the invitation repeats. If the numbers match, the named process made the invitation, on this host, for this gate.
// So nobody can make us write to the memory of a process that did not invite us.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

#include "common/descriptor.h"

namespace pdlink {

using GateNonce = std::array<std::uint8_t, 16>;

// What the page holds. Fixed layout: two processes of different builds may share it.
struct GateWords {
    std::atomic<std::uint32_t> closed;       // set once by the owner, never cleared
    std::atomic<std::uint32_t> busy;         // copies of the writer that have begun and not ended
    std::atomic<std::int64_t> writer_pid;    // 0 until the writer has mapped the page
    std::atomic<std::uint64_t> writer_born;  // start time of that process in clock ticks since boot
    GateNonce nonce;                         // set by the owner before it sends the invitation
};
static_assert(sizeof(GateWords) == 40 && std::atomic<std::uint64_t>::is_always_lock_free);

constexpr std::size_t kGateNbytes = 4096;

constexpr std::uint64_t kBornUnknown = std::numeric_limits<std::uint64_t>::max();

// Start time of a process (field 22 of /proc/PID/stat): with the pid it names a process for ever. 0 if the process
// has ended (also as a zombie without threads); kBornUnknown if /proc cannot be read now (no descriptor left, /proc
// hidden): that must not count as "ended".
inline std::uint64_t process_born(std::int64_t pid) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
    std::FILE* file = std::fopen(path, "re");
    if (!file) {
        const bool none = errno == ENOENT && ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
        return none ? 0 : kBornUnknown;
    }
    char text[1024];
    const std::size_t got = std::fread(text, 1, sizeof text - 1, file);
    const bool none = got == 0 && errno == ESRCH;  // it ended between open and read
    std::fclose(file);
    text[got] = 0;
    const char* after_name = std::strrchr(text, ')');  // the name may hold spaces and parentheses
    if (!after_name || after_name[1] != ' ') return none ? 0 : kBornUnknown;
    std::uint64_t threads = 0, born = 0;
    const char* field = after_name + 2;  // field 3
    for (int i = 3; field; ++i) {
        if (i == 20) threads = std::strtoull(field, nullptr, 10);
        if (i == 22) {
            born = std::strtoull(field, nullptr, 10);
            break;
        }
        field = std::strchr(field, ' ');
        if (field) ++field;
    }
    if (!field) return kBornUnknown;
    const char state = after_name[2];
    return (state == 'Z' || state == 'X') && threads <= 1 ? 0 : born;
}

// Throws unless `fd` is an anonymous memory file of `nbytes`, sealed against shrinking. Check a peer's file before
// mapping it: touching a page beyond the end of a file is SIGBUS, and an invitation must not make us write to other
// kinds of files or devices.
inline void require_sealed_memory(int fd, std::uint64_t nbytes, int wanted_seals = F_SEAL_SHRINK) {
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & wanted_seals) != wanted_seals)
        throw std::invalid_argument("the file is not an anonymous memory file sealed against " +
                                    std::string(wanted_seals & F_SEAL_GROW ? "any other size" : "shrinking"));
    struct stat status;
    if (::fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "fstat of peer file");
    if (status.st_size < 0 || static_cast<std::uint64_t>(status.st_size) != nbytes)
        throw std::invalid_argument("the file has " + std::to_string(status.st_size) + " bytes, not " +
                                    std::to_string(nbytes));
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

constexpr int kGateSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// A gate in an invitation: a file of the inviting process, and the nonce in its page.
struct GateName {
    int fd;
    std::uint64_t device;
    std::uint64_t inode;
    GateNonce nonce;
};

// The side whose memory is written. Holds the descriptor that the writer opens through /proc.
class GateOwner {
  public:
    GateOwner() : file_(create()), page_(file_.get()) {
        GateNonce& nonce = page_.words().nonce;
        struct stat status;
        if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size()) ||
            ::fstat(file_.get(), &status) != 0)
            throw std::system_error(errno, std::generic_category(), "gate page");
        name_ = {file_.get(), status.st_dev, status.st_ino, nonce};
    }

    const GateName& name() const { return name_; }

    // From here on no new copy begins.
    void shut() { page_.words().closed.store(1, std::memory_order_seq_cst); }

    // True if no copy is in progress and none can begin; valid only after shut().
    bool quiet() const {
        GateWords& words = page_.words();
        if (words.busy.load(std::memory_order_seq_cst) == 0) return true;
        const std::int64_t pid = words.writer_pid.load();
        if (pid == 0) return false;
        const std::uint64_t born = process_born(pid);
        return born != kBornUnknown && born != words.writer_born.load();
    }

  private:
    static Descriptor create() {
        Descriptor file(::memfd_create("pdlink-gate", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        if (file.get() < 0 || ::ftruncate(file.get(), kGateNbytes) != 0 ||
            ::fcntl(file.get(), F_ADD_SEALS, kGateSeals) != 0)
            throw std::system_error(errno, std::generic_category(), "memfd for gate page");
        return file;
    }
    Descriptor file_;
    GatePage page_;
    GateName name_;
};

// The side that writes.
class GateWriter {
  public:
    // Throws std::invalid_argument if `fd` is not the gate that was meant, std::system_error if it cannot be mapped.
    GateWriter(int fd, const GateNonce& nonce) : page_(checked(fd)) {
        if (page_.words().nonce != nonce)
            throw std::invalid_argument("the gate is not the one that this invitation was made with");
    }

    // Become the only writer; call first. Throws std::system_error if there is one already.
    void take() {
        const std::uint64_t born = process_born(::getpid());
        if (born == 0 || born == kBornUnknown)
            throw std::system_error(EIO, std::generic_category(), "own start time in /proc/self/stat");
        std::int64_t nobody = 0;
        if (!page_.words().writer_pid.compare_exchange_strong(nobody, ::getpid()))
            throw std::system_error(EBUSY, std::generic_category(), "the gate has a writer already");
        page_.words().writer_born.store(born);
    }

    // Call before touching the owner's memory; false means it must not be touched any more.
    bool enter() {
        page_.words().busy.fetch_add(1, std::memory_order_seq_cst);
        if (page_.words().closed.load(std::memory_order_seq_cst) == 0) return true;
        leave();
        return false;
    }

    // Call when all bytes of the copy are written.
    void leave() { page_.words().busy.fetch_sub(1, std::memory_order_seq_cst); }

    bool shut() const { return page_.words().closed.load(std::memory_order_seq_cst) != 0; }

  private:
    static int checked(int fd) {
        require_sealed_memory(fd, kGateNbytes, kGateSeals);
        return fd;
    }
    GatePage page_;
};

// Open another process's descriptor, and check that it is the invited file: a pid can be reused. The first open is
// O_PATH, which has no effect on a wrong file (a pipe, a device). Throws std::system_error.
inline Descriptor open_peer_file(std::int64_t pid, int peer_fd, std::uint64_t device, std::uint64_t inode) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(peer_fd);
    const Descriptor there(::open(path.c_str(), O_PATH | O_CLOEXEC));
    if (there.get() < 0) throw std::system_error(errno, std::generic_category(), path);
    struct stat status;
    if (::fstat(there.get(), &status) != 0 || status.st_dev != device || status.st_ino != inode ||
        !S_ISREG(status.st_mode))
        throw std::system_error(ESTALE, std::generic_category(), path + " is not the invited file any more");
    Descriptor file(::open(("/proc/self/fd/" + std::to_string(there.get())).c_str(), O_RDWR | O_CLOEXEC));
    if (file.get() < 0) throw std::system_error(errno, std::generic_category(), path);
    return file;
}

// The gate of an invitation, checked and not taken yet. Throws as the two above.
inline std::unique_ptr<GateWriter> open_gate(std::int64_t pid, const GateName& name) {
    const Descriptor file = open_peer_file(pid, name.fd, name.device, name.inode);
    return std::make_unique<GateWriter>(file.get(), name.nonce);
}

}  // namespace pdlink
