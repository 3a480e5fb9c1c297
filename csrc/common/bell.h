// An eventfd that others make readable and its owner makes quiet: what wakes a thread, or Python.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <system_error>

#include "common/descriptor.h"

namespace pdlink {

class Bell {
  public:
    Bell() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (fd_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }

    int fd() const { return fd_.get(); }
    void ring() const { ::eventfd_write(fd_.get(), 1); }
    void hush() const {
        eventfd_t count;
        ::eventfd_read(fd_.get(), &count);
    }

  private:
    Descriptor fd_;
};

}  // namespace pdlink
