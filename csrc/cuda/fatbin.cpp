#include "cuda/fatbin.h"

#ifdef PDLINK_FATBIN

asm(".pushsection .rodata\n"
    ".balign 16\n"
    ".local pdlink_fatbin_begin\n"
    "pdlink_fatbin_begin:\n"
    ".incbin \"" PDLINK_FATBIN
    "\"\n"
    ".local pdlink_fatbin_end\n"
    "pdlink_fatbin_end:\n"
    ".byte 0\n"
    ".popsection\n");

extern "C" const std::byte pdlink_fatbin_begin[];
extern "C" const std::byte pdlink_fatbin_end[];

std::span<const std::byte> pdlink::cuda::fatbin() { return {pdlink_fatbin_begin, pdlink_fatbin_end}; }

#else

std::span<const std::byte> pdlink::cuda::fatbin() { return {}; }

#endif
