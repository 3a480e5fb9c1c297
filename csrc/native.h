// What the native engines of all transports have in common: their clock, and how their threads start.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <chrono>

namespace pdlink {

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
