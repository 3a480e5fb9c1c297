#include "ucx/staging.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace pdlink::ucx {

SlotMemory::SlotMemory(Context& context) : context_(context) {
    void* at = ::mmap(nullptr, kNumSlots * kSlotNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of staging slots");
    base_ = static_cast<std::byte*>(at);
    try {
        memh_ = context.map(base(), kNumSlots * kSlotNbytes, rkey_);
    } catch (...) {
        ::munmap(base_, kNumSlots * kSlotNbytes);
        throw;
    }
}

SlotMemory::~SlotMemory() {
    context_.ucx().ucp_mem_unmap(context_.handle(), memh_);
    ::munmap(base_, kNumSlots * kSlotNbytes);
}

}  // namespace pdlink::ucx
