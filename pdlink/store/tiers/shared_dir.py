"""`SharedDir`: a directory that several nodes mount (NFS, Weka, HF3FS), one immutable file for each record.

Only what every such file system promises is used: a file appears under its name by rename. Every read is verified.
There are no locks, no maps and no fsync: after a power failure an empty or short file is a miss. Who may write to the
directory is trusted: the checksum finds damage, not forgery.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from pdlink.errors import ConfigError
from pdlink.store.late import Late

from .base import DAMAGED
from .envelope import NBYTES as ENVELOPE_NBYTES
from .envelope import envelope, key_of, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LEFTOVER_S = 3600.0
"""Age at which a temporary file belongs to a writer that was killed."""
_RENEW_S = 3600.0
"""A hit makes a file young again, at most this often; eviction goes by age."""
_SLACK = 0.1
"""Of the capacity: what one eviction frees, and what is written here before others' files are counted again."""
_TAKES_NONE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class SharedDir:
    """Records at ROOT/NAMESPACE/xx/yyyy.., named by the key in hexadecimal; temporary files in ROOT/NAMESPACE/tmp."""

    name = "shared_dir"
    is_server = False
    verifies = True
    answers = True

    def __init__(self, root: Path, namespace: str, capacity_nbytes: int = 0) -> None:
        """Removes what killed writers left, before this returns if the directory answers (`Late`).

        capacity_nbytes: of all files of the namespace, 0 for no bound; the oldest go first. Another node that writes
        at the same time may exceed it by a tenth until its files are counted here.
        Raises ConfigError if `root`, which is not made here lest it hide a missing mount, cannot be used.
        """
        self._root = root / namespace
        self._temporary = self._root / "tmp"
        self.medium = f"shared_dir {self._root.absolute()}"
        self.capacity_nbytes = capacity_nbytes
        self._closed = False
        self._lock = threading.Lock()
        self._held_nbytes = 0
        """Of all files, as last counted, and of those written or begun here since."""
        self._writing_nbytes = self._uncounted_nbytes = 0
        """Reserved by puts under way; written or begun since the last count."""
        self._unique, self._numbers = os.urandom(8).hex(), itertools.count()
        self._unwritten = ""
        self._late = Late(f"{root}", partial(self._begin, root))
        try:
            self._late.wait()
        except ConfigError:
            self._late.close()
            raise

    def _begin(self, root: Path) -> bool:
        """True."""
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._temporary.mkdir(mode=0o700, exist_ok=True)
            self._remove_leftovers()
            if self.capacity_nbytes:
                with self._lock:
                    self._count_and_evict(0)
        except OSError as error:
            raise ConfigError(
                f"tiers.remote_url: got {str(root)!r}, which cannot be used ({error.strerror}); expected an existing "
                "directory that this process may write to; mount or create it"
            ) from error
        return True

    @property
    def problem(self) -> str:
        """As `Tier` says."""
        return self._late.problem or self._unwritten

    @property
    def nbytes(self) -> int:
        """Nothing is counted without a capacity."""
        return self._held_nbytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [not self._closed and self._path(key).exists() for key in keys]

    def get(self, key: bytes, into: memoryview) -> int | None:
        path = self._path(key)
        try:
            file = -1 if self._closed else os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        if file < 0:
            return None
        try:
            status = os.fstat(file)
            nbytes = status.st_size - ENVELOPE_NBYTES
            stored, record = bytearray(ENVELOPE_NBYTES), into[: max(0, nbytes)]
            whole = stat.S_ISREG(status.st_mode) and _read(file, memoryview(stored))
            said = opened(stored, key) if whole else None
            if said is None or said[0] != nbytes:
                self._unlink_damaged(path)
                return DAMAGED
            if nbytes > len(into):
                return None
            if not _read(file, record) or xxhash.xxh3_128_digest(record) != said[1]:
                self._unlink_damaged(path)
                return DAMAGED
            if self.capacity_nbytes and time.time() - status.st_mtime > _RENEW_S:
                os.utime(file)
        finally:
            os.close(file)
        return nbytes

    def put(self, key: bytes, record: memoryview) -> bool:
        """As `Tier.put`. A full or read-only file system is False and no error: it keeps nobody from reading."""
        path, nbytes = self._path(key), ENVELOPE_NBYTES + len(record)
        if self._closed:
            return False
        if path.exists():
            return True
        if not self._reserve(nbytes):
            return False
        written, temporary = False, self._temporary / f"{self._unique}-{os.getpid()}-{next(self._numbers)}"
        try:
            _write(temporary, memoryview(envelope(key, record)), record)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.rename(path)
            written, self._unwritten = True, ""
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if error.errno not in _TAKES_NONE:
                raise
            self._unwritten = f"{self._root} takes no more: {error.strerror}"
        finally:
            with self._lock:
                self._writing_nbytes -= nbytes
                self._held_nbytes -= 0 if written and self.capacity_nbytes else nbytes
        return written

    def remove(self, key: bytes) -> None:
        if not self._closed:
            self._unlink(self._path(key))
            self._check_mount()

    def clear(self) -> None:
        if not self._closed:
            for _, _, path in self._objects():
                self._unlink(path)
            self._check_mount()

    def keys_ending(self, ending: bytes) -> list[bytes]:
        """As `ListingTier.keys_ending`."""
        if self._closed:
            return []
        names = (path.parent.name + path.name for _, _, path in self._objects() if path.name.endswith(ending.hex()))
        found = [key for key in map(key_of, names) if key is not None]
        self._check_mount()
        return found

    def close(self) -> None:
        self._closed = True
        self._late.close()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / name[2:]

    def _unlink_damaged(self, path: Path) -> None:
        with contextlib.suppress(PermissionError):  # it stays a miss
            self._unlink(path)

    def _unlink(self, path: Path) -> None:
        """Remove a file that may be gone, or be something else that a stranger put there."""
        with self._lock, contextlib.suppress(FileNotFoundError, IsADirectoryError):
            nbytes = path.lstat().st_size if self.capacity_nbytes else 0
            path.unlink()
            self._held_nbytes -= nbytes

    def _check_mount(self) -> None:
        """Raises FileNotFoundError where the directory is away: what is not found there is not gone."""
        self._temporary.stat()

    def _reserve(self, nbytes: int) -> bool:
        """Whether so much may be written, after others went for it."""
        with self._lock:
            if limit := self.capacity_nbytes:
                if nbytes > limit:
                    return False
                if self._held_nbytes + nbytes > limit or self._uncounted_nbytes + nbytes > _SLACK * limit:
                    self._count_and_evict(nbytes)
                if self._held_nbytes + nbytes > limit:
                    return False
            self._held_nbytes += nbytes
            self._writing_nbytes += nbytes
            self._uncounted_nbytes += nbytes
            return True

    def _count_and_evict(self, nbytes: int) -> None:
        """Count all files; if these bytes do not fit beside them, remove the oldest until a tenth is free too."""
        objects = sorted(self._objects())
        held = sum(size for _, size, _ in objects) + self._writing_nbytes
        if held + nbytes > self.capacity_nbytes:
            for _, size, path in objects:
                if held + nbytes <= (1 - _SLACK) * self.capacity_nbytes:
                    break
                path.unlink(missing_ok=True)
                held -= size
        self._held_nbytes, self._uncounted_nbytes = held, 0

    def _objects(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last change, bytes and path of every record's file, of all writers."""
        for directory in self._root.glob("[0-9a-f][0-9a-f]"):
            with contextlib.suppress(NotADirectoryError), os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):
                            yield status.st_mtime, status.st_size, Path(entry.path)

    def _remove_leftovers(self) -> None:
        """Ages are by the clock that dates the files, which is the file server's."""
        probe = self._temporary / f"{self._unique}-clock"
        probe.touch()
        now_s = probe.stat().st_mtime
        probe.unlink()
        for path in self._temporary.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if now_s - path.stat().st_mtime > _LEFTOVER_S:
                    path.unlink()


def _read(file: int, into: memoryview) -> bool:
    """Whether the file had so much."""
    while into:
        got = os.readv(file, [into])
        if not got:
            return False
        into = into[got:]
    return True


def _write(path: Path, *pieces: memoryview) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for piece in pieces:
            left = piece
            while left:
                left = left[os.write(file, left) :]
    finally:
        os.close(file)
