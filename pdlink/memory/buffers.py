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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from pdlink.memory.available import available_nbytes
from pdlink.memory.numa import prefer_node
from pdlink.memory.pages import HUGE_PAGE_NBYTES, gather, populate, want_huge, whole_pages

if TYPE_CHECKING:
    from types import TracebackType

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

    @property
    def handle(self) -> int:
        """The driver's."""

    @property
    def stream(self) -> int:
        """The driver's handle of the stream that it was last recorded in; 0 is the default one."""

    def record(self) -> None:
        """Stand for what this thread has launched on its current stream by now."""

    def reached(self) -> bool:
        """Whether that has run. Raises RuntimeError if it has failed."""

    def synchronize(self) -> None:
        """Wait for that without the GIL. Raises RuntimeError if it has failed."""


class StreamBells(Protocol):
    """`pdlink.cuda.bells.Bells`."""

    def fileno(self) -> int: ...
    def ring_after(self, event: Any) -> None: ...  # as its maker makes them
    def hush(self) -> None: ...
    def close(self) -> None: ...


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
        huge: bool = False,
        numa_node: int | None = None,
    ) -> None:
        """Allocate `nbytes` (rounded up to whole pages), zeroed and touched, so that later stores do not fault.

        committed_nbytes: allocate and touch so many now, and leave the others to `populate`; address and size are
        those of the whole from the start. huge: as of `populate`. numa_node: where memory is preferred; None leaves
        it to the kernel.
        Raises OSError if the system has not that much memory free. That is looked at first: the kernel does not
        refuse a memory file that is too large, it fills it until something has to be killed.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        self.nbytes = whole_pages(nbytes)
        self._numa_node = numa_node
        first_nbytes = self.nbytes if committed_nbytes is None else min(self.nbytes, whole_pages(committed_nbytes))
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
            want_huge(self.array)
            self.populate(0, first_nbytes, huge=huge)
        except BaseException:
            os.close(self.fd)
            raise

    def populate(self, begin: int, end: int, *, huge: bool = False) -> None:
        """Give memory to these bytes and touch every page, as `pages.populate`, also where the kernel cannot touch
        them. huge: in huge pages, as `pages.gather`, which takes its time. Raises OSError if there is no memory."""
        if end <= begin:
            return
        with prefer_node(self._numa_node):
            if huge:
                gather(self.array[begin:end])
            if not populate(self.array[begin:end]):
                os.posix_fallocate(self.fd, begin, end - begin)

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


def _require_available(nbytes: int) -> None:
    available = available_nbytes()
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"a buffer of {nbytes} bytes does not fit into {available} available ones")
