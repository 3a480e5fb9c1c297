"""`Striped`: a disk tier over several directories, each on a device of its own, and each record in one of them.

A record goes to the directory that its key says, and to the next one if that takes nothing: full, read-only, failing.
So it is looked for in all; each knows what it has without a look at its device.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from pdlink.errors import ConfigError

from .disk import Disk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pdlink.store.interface import RecordChange

log = logging.getLogger(__name__)
_T = TypeVar("_T")


def open_disks(roots: Sequence[Path], namespace: str, capacity_nbytes: int, record_nbytes: int = 0) -> Disk | Striped:
    """One `Disk`, or several with equal parts of the capacity.

    Of several, one that cannot be used is left out and told. Raises ConfigError if none can be used, or one is used.
    """
    disks: list[Disk] = []
    problems: list[ConfigError] = []
    for root in roots:
        try:
            disks.append(Disk(root, namespace, capacity_nbytes // len(roots), record_nbytes=record_nbytes))
        except ConfigError as error:
            if error.__cause__ is None or len(problems) + 1 == len(roots):
                for disk in disks:
                    disk.close()
                raise
            log.warning("%s", error)
            problems.append(error)
    return disks[0] if len(roots) == 1 else Striped(disks, list(map(str, problems)))


class Striped:
    """As `Tier`, `TellingTier`, `ListingTier` and `SettlingTier` say."""

    name = Disk.name

    def __init__(self, disks: Sequence[Disk], left_out: Sequence[str] = ()) -> None:
        """left_out: why directories are not among them."""
        self._disks, self._left_out = disks, left_out
        self._failed: dict[Disk, str] = {}
        """What the last write to a disk said that failed."""
        self.medium = ", ".join(sorted(disk.medium for disk in disks))

    @property
    def nbytes(self) -> int:
        return sum(disk.nbytes for disk in self._disks)

    @property
    def capacity_nbytes(self) -> int:
        return sum(disk.capacity_nbytes for disk in self._disks)

    @property
    def problem(self) -> str:
        said = (disk.problem or self._failed.get(disk, "") for disk in self._disks)
        return "; ".join(filter(None, [*self._left_out, *said]))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [any(found) for found in zip(*(disk.contains(keys) for disk in self._disks), strict=True)]

    def get(self, key: bytes, into: memoryview) -> int | None:
        return self._first(key, lambda disk: disk.get(key, into))

    def put(self, key: bytes, record: memoryview) -> bool:
        def written(disk: Disk) -> bool | None:
            try:
                taken = disk.put(key, record)
            except OSError as error:
                self._failed[disk] = f"{disk.medium} takes no records: {error.strerror}"
                raise
            self._failed.pop(disk, None)
            return taken or None

        return any(self.contains([key])) or bool(self._first(key, written))

    def remove(self, key: bytes) -> None:
        self._all(lambda disk: disk.remove(key))

    def clear(self) -> None:
        self._all(Disk.clear)

    def keys_ending(self, ending: bytes) -> list[bytes]:
        return [key for disk in self._disks for key in disk.keys_ending(ending)]

    def settle(self) -> None:
        self._all(Disk.settle)

    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        for disk in self._disks:
            disk.listen(changed)

    def close(self) -> None:
        for disk in self._disks:
            disk.close()

    def _first(self, key: bytes, call: Callable[[Disk], _T | None]) -> _T | None:
        """What the first disk says that has something to say, from the key's own one on.

        Raises the OSError of one of them if none has.
        """
        own, failed = int.from_bytes(key[:8], "little") % len(self._disks), None
        for disk in (*self._disks[own:], *self._disks[:own]):
            try:
                said = call(disk)
            except OSError as error:
                failed = error
            else:
                if said is not None:
                    return said
        if failed is not None:
            raise failed
        return None

    def _all(self, call: Callable[[Disk], None]) -> None:
        """Also behind one that fails, whose OSError is raised afterwards."""
        failed = None
        for disk in self._disks:
            try:
                call(disk)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
