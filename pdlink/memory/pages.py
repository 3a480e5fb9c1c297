"""Pages of mapped memory: give them memory before the first store, in huge pages where there are some.

All calls leave the GIL, which `mmap.madvise` would hold.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlink.memory.buffers import Bytes

PAGE_NBYTES = mmap.PAGESIZE

HUGE_PAGE_NBYTES = 2 << 20
"""Of x86, and of Arm with pages of 4 KiB."""

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
"""Linux's numbers; Python 3.11 has no name for the last two."""

_libc = ctypes.CDLL(None, use_errno=True)


def whole_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def want_huge(memory: Bytes) -> None:
    """Have the first touch of this mapping take huge pages, where /sys/kernel/mm/transparent_hugepage allows them.

    Copies of scattered 32 KiB runs were a sixth faster with them (one core of an EPYC, Zen 5, anonymous memory).
    """
    _advise(memory.ctypes.data, len(memory), _MADV_HUGEPAGE)


def populate(memory: Bytes) -> bool:
    """Give memory to these bytes and touch every page. Threads may do several ranges at a time.

    False where the kernel does not know the request (before 5.14), and nothing was touched. Raises OSError if there
    is no memory. Whether the system has enough is for the caller to look at.
    """
    code = _advise(memory.ctypes.data, len(memory), _MADV_POPULATE_WRITE)
    if code not in (0, errno.EINVAL):
        raise OSError(code, os.strerror(code))
    return not code


def gather(memory: Bytes) -> bool | None:
    """Put these bytes into huge pages, also where the system gives none at the first touch.

    Bytes that have no memory get it, unless there is no huge page for them.
    Whether all of them are in such pages; None if this kernel will never do it. What others read or write there
    meanwhile waits for a moment, and pages that a device has pinned stay as they are.
    Gain, reads of 2 and 8 MiB past the page cache: 1.5 GB/s instead of 1.05, at 0.035 and 0.02 CPU seconds per GB
    instead of 0.09 and 0.06 (the kernel looks up every page, and a disk takes so many pages per request). Cost, once:
    0.13 CPU seconds per GB of bytes without memory, where `populate` takes 0.4; 1.3 to 3.5 of bytes that have it, or
    on a virtual machine that has given its free huge pages back to its host (two cores, Linux 6.18).
    """
    address = memory.ctypes.data
    first, last = -(-address // HUGE_PAGE_NBYTES), (address + len(memory)) // HUGE_PAGE_NBYTES
    if last <= first:
        return True
    for number in range(first, last):  # the kernel makes a huge page of what has one page at least
        _advise(number * HUGE_PAGE_NBYTES, PAGE_NBYTES, _MADV_POPULATE_WRITE)
    code = _advise(first * HUGE_PAGE_NBYTES, (last - first) * HUGE_PAGE_NBYTES, _MADV_COLLAPSE)
    return None if code == errno.EINVAL else not code


def touch(memory: Bytes) -> None:
    """Enter these bytes of a shared mapping, which have memory, into our page table now, in one call.

    Else every page costs a fault when it is read or written first: 256 MiB took 278 ms to fill, and 36 ms afterwards
    (two cores); this takes 100 ms. A kernel before 5.14 leaves it to the faults.
    """
    _advise(memory.ctypes.data, len(memory), _MADV_POPULATE_WRITE)


def _advise(address: int, nbytes: int, request: int) -> int:
    """0, or the number of the error."""
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), request)
    return ctypes.get_errno() if failed else 0
