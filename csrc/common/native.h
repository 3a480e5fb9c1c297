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

// While one is there, this thread reads and writes KV pages. Messages between processes order that, which
// ThreadSanitizer cannot follow: it would take every read of a page after a transfer for a race, each word by itself,
// and the 4 MiB of a test took it hours. In other builds this is nothing.
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

// While one is there, threads that are started inherit a full mask: signals belong to the threads of the program.
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
