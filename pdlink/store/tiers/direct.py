"""`DirectFile`: a file read and written past the page cache where its file system allows that, from any memory."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

PAGE_NBYTES = 4096
"""Unit of offsets, and of what is read and written: every device takes it."""
_BOUNCE_NBYTES = 1 << 20


class DirectFile:
    """Offsets are multiples of `PAGE_NBYTES`. Safe for several threads. Each call may raise OSError."""

    def __init__(self, path: Path) -> None:
        """Open it, made if it is not there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.direct = True
        """Whether the page cache is left out; tmpfs and some network file systems refuse."""
        self._bounce = threading.local()
        self._growth = threading.Lock()
        try:
            self.fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self.fd = os.open(path, flags, 0o600)
        if self.direct and not self._takes_direct_reads():
            os.close(self.fd)
            self.direct = False
            self.fd = os.open(path, flags, 0o600)

    def _takes_direct_reads(self) -> bool:
        """Some file systems refuse only then."""
        try:
            os.preadv(self.fd, [self._bounce_memory()[:PAGE_NBYTES]], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def write(self, offset: int, data: memoryview) -> bool:
        """All of `data`; what follows up to the end of its last page is undefined. True."""
        for at, nbytes in self._pieces(data):
            piece = data[at : at + nbytes]
            if self._takes(piece):
                self._write(offset + at, piece)
            else:
                bounce = self._bounce_memory()
                bounce[:nbytes] = piece
                self._write(offset + at, bounce[: -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES])
        return True

    def read(self, offset: int, into: memoryview) -> bool:
        """Fill `into`; whether the file had so much."""
        for at, nbytes in self._pieces(into):
            piece = into[at : at + nbytes]
            if self._takes(piece):
                if not self._read(offset + at, piece, nbytes):
                    return False
                continue
            bounce = self._bounce_memory()
            if not self._read(offset + at, bounce[: -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES], nbytes):
                return False
            piece[:] = bounce[:nbytes]
        return True

    def grow(self, nbytes: int) -> None:
        """Make the file so long, and take the room from the file system now. Raises OSError if there is none.

        One thread at a time: where the file system has no call for it, libc writes zeros into the new part, also over
        what is written there after another thread has made the file as long.
        """
        with self._growth:
            now = os.fstat(self.fd).st_size
            if nbytes > now:
                os.posix_fallocate(self.fd, now, nbytes - now)

    def close(self) -> None:
        os.close(self.fd)

    def _pieces(self, memory: memoryview) -> list[tuple[int, int]]:
        """Offset and bytes of what is moved at once: all at once, its last page apart if it is not whole, or as much
        as a bounce takes."""
        if not len(memory):
            return []
        if not self.direct:
            return [(0, len(memory))]
        if _on_page(memory):
            whole = len(memory) // PAGE_NBYTES * PAGE_NBYTES
            return [piece for piece in ((0, whole), (whole, len(memory) - whole)) if piece[1]]
        return [(at, min(_BOUNCE_NBYTES, len(memory) - at)) for at in range(0, len(memory), _BOUNCE_NBYTES)]

    def _takes(self, piece: memoryview) -> bool:
        """Whether the kernel moves it straight from or to this memory."""
        return not self.direct or (len(piece) % PAGE_NBYTES == 0 and _on_page(piece))

    def _write(self, offset: int, piece: memoryview) -> None:
        while piece:
            done = os.pwrite(self.fd, piece, offset)
            piece, offset = piece[done:], offset + done

    def _read(self, offset: int, into: memoryview, nbytes: int) -> bool:
        """Whether `nbytes` of `into` were filled; a file may end within its last page."""
        done = 0
        while done < nbytes:
            got = os.preadv(self.fd, [into[done:]], offset + done)
            if not got:
                return False
            done += got
        return True

    def _bounce_memory(self) -> memoryview:
        """Aligned memory of this thread."""
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = memoryview(mmap.mmap(-1, _BOUNCE_NBYTES))
        memory: memoryview = self._bounce.memory
        return memory


def _on_page(memory: memoryview) -> bool:
    """Whether it begins on a page; `ctypes.data` takes three times as long."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address % PAGE_NBYTES == 0
