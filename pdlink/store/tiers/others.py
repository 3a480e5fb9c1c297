"""`Others`: records of other namespaces in the directory of a disk tier, which give way to its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class Others:
    def __init__(self, directories: Iterable[Path]) -> None:
        """directories: of other namespaces, in the order in which they go."""
        self._directories = list(directories)

    def shrink(self, most_nbytes: int) -> None:
        """Remove some until all hold so much at most. One that a process has open stays, and is not tried again."""
        while self._directories and sum(map(_held_nbytes, self._directories)) > most_nbytes:
            _remove_unused(self._directories.pop(0))


def _held_nbytes(directory: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    return 0


def _remove_unused(directory: Path) -> None:
    """The files of a tier that no process has open."""
    with contextlib.suppress(OSError):  # a process has it, or it went meanwhile
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in ("records", "preimages"):  # the second is of a store process that tells what it has
                (directory / name).unlink(missing_ok=True)
            (directory / "journal").unlink()
            directory.rmdir()
        finally:
            os.close(lock)
