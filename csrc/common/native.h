// What the native engines of all transports have in common: their clock, how their threads start, and what a
// sanitizer is told.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <chrono>

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace pdlink {

// Exists while this thread reads and writes KV pages. Messages between processes order these accesses, but
// ThreadSanitizer does not see that: it would report every word read after a transfer as a race, which took hours for
// the 4 MiB of a test. No effect in other builds.
class TouchesPages {
  public:
    TouchesPages() {
#if defined(__SANITIZE_THREAD__)
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
    }
    TouchesPages(const TouchesPages&) = delete;
    TouchesPages& operator=(const TouchesPages&) = delete;
    ~TouchesPages() {
#if defined(__SANITIZE_THREAD__)
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
    }
};

// Seconds of CLOCK_MONOTONIC, which is what Python's time.monotonic() reads.
inline double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// While it exists, new threads start with all signals blocked: signals belong to the program's threads.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;
    ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

}  // namespace pdlink
