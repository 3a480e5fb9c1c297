"""Memory that KV pages live in: what every kind of it says about itself, and the shared host memory of our own.

A `Buffer` is an anonymous memory file (`memfd_create`), so that a peer process on this host can map it, UCX can
register it, and torch and numpy can view it. It has no name in any file system: when the last process that holds it
ends, however it ends, the memory is gone. There is nothing to clean up after a kill. It is sealed against shrinking:
a file that got shorter would kill every process that maps it (SIGBUS), so peers only map sealed ones.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np

from pdlink.memory.numa import prefer_node

if TYPE_CHECKING:
    from types import TracebackType

PAGE_NBYTES = mmap.PAGESIZE

HUGE_PAGE_NBYTES = 2 << 20
"""Of x86, and of Arm with pages of 4 KiB."""

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
"""Linux's numbers; Python 3.11 has no name for the last two."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


class AnyBuffer(Protocol):
    """Memory that a transport can register: of the host or of a GPU, our own or borrowed."""

    @property
    def kind(self) -> Literal["host", "cuda"]:
        """Where it is, which decides who can copy it."""

    @property
    def ptr(self) -> int:
        """Address of its first byte, in this process; an address of the device if it is a GPU's."""

    @property
    def nbytes(self) -> int: ...

    @property
    def borrowed(self) -> bool:
        """Whether somebody else allocated it, and frees it. It must outlive every transport it is registered with."""

    def make_event(self) -> StreamEvent | None:
        """An event for what is launched on this memory, whose bytes are written when it is reached.

        None for host memory: there a store is visible when it returns.
        """

    def close(self) -> None:
        """Free it, unless it is borrowed. Safe to call twice."""


class StreamEvent(Protocol):
    """What is needed of `torch.cuda.Event`."""

    def record(self) -> None:
        """Stand for what this thread has launched on its current stream by now."""

    def synchronize(self) -> None:
        """Wait for that without the GIL. Raises RuntimeError if it has failed."""


class HostBuffer(AnyBuffer, Protocol):
    @property
    def array(self) -> Bytes:
        """The whole buffer as uint8 [nbytes]."""

    @property
    def fd(self) -> int:
        """Of the shared memory that it is, for processes on this host to map; -1 if it is none."""


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Buffer:
    """A shared, page-aligned block of host memory.

    Its creator closes it, after the transports it is registered with. The views handed out keep the mapping
    alive; `close()` drops our own reference and the descriptor.
    """

    kind: ClassVar[Literal["host"]] = "host"
    borrowed: ClassVar[bool] = False

    def __init__(
        self,
        nbytes: int,
        *,
        name: str = "pdlink-kv",
        committed_nbytes: int | None = None,
        numa_node: int | None = None,
    ) -> None:
        """Allocate `nbytes` (rounded up to whole pages), zeroed and touched, so that later stores do not fault.

        committed_nbytes: allocate and touch so many now, and leave the others to `populate`; address and size are
        those of the whole from the start. numa_node: where memory is preferred; None leaves it to the kernel.
        Raises OSError if the system has not that much memory free. That is looked at first: the kernel does not
        refuse a memory file that is too large, it fills it until something has to be killed.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        self.nbytes = _whole_pages(nbytes)
        self._numa_node = numa_node
        first_nbytes = self.nbytes if committed_nbytes is None else min(self.nbytes, _whole_pages(committed_nbytes))
        _require_available(first_nbytes)
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.array: Bytes = _map_aligned(self.fd, self.nbytes)
            """The whole buffer as uint8 [nbytes]; writable."""
            self.ptr: int = self.array.ctypes.data
            self._closed = False
            # At once: the mapping is locked meanwhile, which reads into it wait for.
            _libc.madvise(ctypes.c_void_p(self.ptr), ctypes.c_size_t(self.nbytes), _MADV_HUGEPAGE)
            self.populate(0, first_nbytes)
        except BaseException:
            os.close(self.fd)
            raise

    def populate(self, begin: int, end: int) -> None:
        """Give memory to these bytes and touch every page, without the GIL. Threads may do several ranges at a time.

        In huge pages where /sys/kernel/mm/transparent_hugepage allows them: copies of scattered 32 KiB runs were a
        sixth faster with them (one core of an EPYC, Zen 5, anonymous memory). They come with the first touch of a
        mapping that asks for them, so not with fallocate, which gives the memory without the first touch where the
        kernel does not know these requests (before 5.14: EINVAL).
        Raises OSError if there is no memory. Whether the system has enough is for the caller to look at.
        """
        if end <= begin:
            return
        place, nbytes = ctypes.c_void_p(self.ptr + begin), ctypes.c_size_t(end - begin)
        with prefer_node(self._numa_node):
            if _libc.madvise(place, nbytes, _MADV_POPULATE_WRITE):  # mmap.madvise would hold the GIL meanwhile
                code = ctypes.get_errno()
                if code != errno.EINVAL:
                    raise OSError(code, os.strerror(code))
                os.posix_fallocate(self.fd, begin, end - begin)

    def gather(self, begin: int, end: int) -> bool | None:
        """Put bytes that have memory into huge pages, also where the system gives none at the first touch.

        Whether all of them are in such pages; None if this kernel will never do it. What others read or write there
        meanwhile waits for a moment, and pages that a device has pinned stay as they are. Without the GIL.
        Gain, reads and writes of 32 MiB past the page cache: 0.005 CPU seconds per GB instead of 0.045 (the kernel
        looks up every page), at 2.8 and 5.5 GB/s instead of 0.95 and 2.2 (requests are longer). Cost: 1.3 to 3.5 CPU
        seconds per GB, once (a virtual machine, Linux 6.18).
        """
        first, last = -(-begin // HUGE_PAGE_NBYTES), end // HUGE_PAGE_NBYTES
        if last <= first:
            return True
        at, length = self.ptr + first * HUGE_PAGE_NBYTES, (last - first) * HUGE_PAGE_NBYTES
        if not _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), _MADV_COLLAPSE):
            return True
        return None if ctypes.get_errno() == errno.EINVAL else False

    def make_event(self) -> None:
        """None: a store is visible when it returns."""

    def close(self) -> None:
        """Drop the descriptor; the mapping goes when the last view of it goes. Safe to call twice."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Buffer({self.nbytes} bytes, {'closed' if self._closed else 'open'})"


def map_shared(fd: int, nbytes: int) -> Bytes:
    """The buffer of another process on this host, whose descriptor it has sent, as uint8 [nbytes]; writable.

    The mapping lives as long as its views, also after the owner has ended. Raises OSError for a file that is no
    buffer of that size: one that could shrink would kill this process.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < nbytes:
        raise OSError(errno.EINVAL, f"the file is no sealed buffer of {nbytes} bytes")
    return np.frombuffer(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED), dtype=np.uint8)


def touch(array: Bytes, begin: int, end: int) -> None:
    """Enter these bytes of a shared buffer, which have memory, into our page table now, in one call without the GIL.

    Else every page costs a fault when it is read or written first: 256 MiB took 278 ms to fill, and 36 ms afterwards
    (two cores); this takes 100 ms. A kernel before 5.14 leaves it to the faults.
    """
    _libc.madvise(ctypes.c_void_p(array.ctypes.data + begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE)


def _map_aligned(fd: int, nbytes: int) -> Bytes:
    """The file, at an address where huge pages can be.

    It takes the place of a part of a larger mapping, whose object then unmaps both.
    """
    if nbytes < HUGE_PAGE_NBYTES:
        return np.frombuffer(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED), dtype=np.uint8)
    room = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    whole: Bytes = np.frombuffer(room, dtype=np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE_NBYTES
    array = whole[begin : begin + nbytes]
    where, flags = ctypes.c_void_p(array.ctypes.data), mmap.MAP_SHARED | _MAP_FIXED
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    placed = _libc.mmap(where, ctypes.c_size_t(nbytes), protection, flags, fd, ctypes.c_long(0))
    if placed != where.value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return array


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _require_available(nbytes: int) -> None:
    available = available_nbytes()
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"a buffer of {nbytes} bytes does not fit into {available} available ones")


def available_nbytes(root: Path = Path("/")) -> int:
    """What can be allocated without swapping: the kernel's estimate, or less where a container has a limit.

    root: where /proc and /sys are. Raises OSError if the kernel says nothing.
    """
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *_cgroup_nbytes(root)])
    raise OSError(errno.ENODATA, "no MemAvailable in /proc/meminfo")


def _cgroup_nbytes(root: Path) -> list[int]:
    """What is left in each control group (version 2) that this process is in, from its own to the top.

    Pages of files that were not used lately count as free: the kernel takes them back before it kills.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    top, found = root / "sys/fs/cgroup", []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    for group in () if own is None else (top / own, *(top / own).parents):
        try:
            limit, used = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
            idle = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
            if limit.strip() != "max":
                found.append(max(0, int(limit) - used + (int(idle.group(1)) if idle else 0)))
        except (OSError, ValueError):  # the top one has no such files
            continue
        if group == top:
            break
    return found
