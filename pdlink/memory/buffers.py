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

if TYPE_CHECKING:
    from types import TracebackType

PAGE_NBYTES = mmap.PAGESIZE

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
"""Linux's numbers; Python 3.11 has no name for the second."""

_libc = ctypes.CDLL(None, use_errno=True)


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

    def make_event(self) -> Event | None:
        """An event for what is launched on this memory, whose bytes are written when it is reached.

        None for host memory: there a store is visible when it returns.
        """

    def close(self) -> None:
        """Free it, unless it is borrowed. Safe to call twice."""


class Event(Protocol):
    """What is needed of `torch.cuda.Event`."""

    def record(self) -> None:
        """Stand for what this thread has launched on its current stream by now."""

    def synchronize(self) -> None:
        """Wait for that without the GIL. Raises RuntimeError if it has failed."""


class HostBuffer(AnyBuffer, Protocol):
    """Memory of the host, which this process can read."""

    @property
    def array(self) -> Bytes:
        """The whole buffer as uint8 [nbytes]."""

    @property
    def fd(self) -> int:
        """Of the shared memory that it is, for processes on this host to map; -1 if it is none."""


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Buffer:
    """A shared, page-aligned block of host memory.

    Whoever creates it closes it, after the transports it is registered with. The views handed out keep the mapping
    alive; `close()` drops our own reference and the descriptor.
    """

    kind: ClassVar[Literal["host"]] = "host"
    borrowed: ClassVar[bool] = False

    def __init__(self, nbytes: int, *, name: str = "pdlink-kv", committed_nbytes: int | None = None) -> None:
        """Allocate `nbytes` (rounded up to whole pages), zeroed and touched, so that later stores do not fault.

        committed_nbytes: allocate and touch so many now, and leave the others to `commit`; address and size are those
        of the whole from the start.
        Raises OSError if the system has not that much memory free. That is looked at first: the kernel does not
        refuse a memory file that is too large, it fills it until something has to be killed.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        self.nbytes = _whole_pages(nbytes)
        self.committed_nbytes = 0
        """From the start of the buffer: what has memory."""
        first_nbytes = self.nbytes if committed_nbytes is None else min(self.nbytes, _whole_pages(committed_nbytes))
        _require_available(first_nbytes, 0)
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._mapping = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED)
            self.array: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)
            """The whole buffer as uint8 [nbytes]; writable."""
            self.ptr: int = self.array.ctypes.data
            """Address in this process."""
            self._closed = False
            self._fill(first_nbytes)
        except BaseException:
            os.close(self.fd)
            raise

    def commit(self, nbytes: int, *, reserve_nbytes: int = 0) -> None:
        """Give memory to the first `nbytes`, as far as they have none, without the GIL. One caller at a time.

        Raises OSError, and commits nothing, if less than `reserve_nbytes` of the system's memory would stay free.
        """
        upto_nbytes = min(self.nbytes, _whole_pages(nbytes))
        if upto_nbytes > self.committed_nbytes:
            _require_available(upto_nbytes - self.committed_nbytes, reserve_nbytes)
            self._fill(upto_nbytes)

    def _fill(self, upto_nbytes: int) -> None:
        """Touch every page up to there, in huge ones where /sys/kernel/mm/transparent_hugepage allows them.

        Copies of scattered 32 KiB runs were a sixth faster with them (one core of an EPYC, Zen 5, anonymous memory).
        They come with the first touch of a mapping that asks for them, so not with fallocate. A kernel that does not
        know a request (before 5.14) answers EINVAL; then fallocate gives the memory, without the first touch.
        """
        begin, length = self.committed_nbytes, upto_nbytes - self.committed_nbytes
        for request in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE) if length else ():
            # mmap.madvise would hold the GIL meanwhile.
            if _libc.madvise(ctypes.c_void_p(self.ptr + begin), ctypes.c_size_t(length), request):
                code = ctypes.get_errno()
                if code != errno.EINVAL:
                    raise OSError(code, os.strerror(code))
        if length:
            os.posix_fallocate(self.fd, begin, length)
        self.committed_nbytes = upto_nbytes

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


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _require_available(nbytes: int, reserve_nbytes: int) -> None:
    available = available_nbytes() - reserve_nbytes
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
