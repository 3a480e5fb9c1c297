// What the progress thread has to tell, waiting until Python asks for it. The descriptor is readable while it is not
// empty, so that nobody has to poll in a loop and the thread never needs the interpreter.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace pdlink::ucx {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: what Python's time.monotonic() reads

inline double seconds(Clock::time_point at) { return std::chrono::duration<double>(at.time_since_epoch()).count(); }

enum class Status { OK, TIMEOUT, PEER_FAILED, CANCELLED };

struct Event {
    enum class Kind { BATCH_DONE, PEER_FAILED, PEER_CLOSED };
    Kind kind;
    std::string peer;
    std::uint64_t ticket = 0;  // this and the next four: BATCH_DONE
    Status status = Status::OK;
    std::uint64_t nbytes = 0;
    double submitted_s = 0;
    double done_s = 0;
    std::string detail{};  // BATCH_DONE, PEER_FAILED: why
};

// An eventfd that others make readable and its owner makes quiet.
class Bell {
  public:
    Bell() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    Bell(const Bell&) = delete;
    Bell& operator=(const Bell&) = delete;
    ~Bell() { ::close(fd_); }

    int fd() const { return fd_; }
    void ring() const { ::eventfd_write(fd_, 1); }
    void hush() const {
        eventfd_t count;
        ::eventfd_read(fd_, &count);
    }

  private:
    int fd_;
};

class EventQueue {
  public:
    void push(Event event) {
        const std::lock_guard lock(mutex_);
        waiting_.push_back(std::move(event));
        if (waiting_.size() == 1) bell_.ring();
    }

    std::vector<Event> take() {
        const std::lock_guard lock(mutex_);
        if (!waiting_.empty()) bell_.hush();
        return std::exchange(waiting_, {});
    }

    int fd() const { return bell_.fd(); }

    // Notes about packed runs that made no sense; each has failed its peer.
    void count_refused_note() { notes_refused_.fetch_add(1, std::memory_order_relaxed); }
    std::uint64_t notes_refused() const { return notes_refused_.load(std::memory_order_relaxed); }

  private:
    std::mutex mutex_;
    std::vector<Event> waiting_;
    std::atomic<std::uint64_t> notes_refused_ = 0;
    Bell bell_;
};

}  // namespace pdlink::ucx
