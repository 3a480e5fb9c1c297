"""`Striped`: a disk tier over one directory or several, each on a device of its own, and each record in one of them.

A record goes to the directory that its key says, and to the next one if that takes nothing: full, read-only, failing.
So it is looked for in all; each knows what it has without a look at its device. A directory that does not answer when
the tier begins, or one of several that cannot be used then, is left out until it can (`Late`).
"""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pdlink.errors import ConfigError
from pdlink.store.late import Late

from .disk import Disk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from pdlink.store.interface import RecordChange

_T = TypeVar("_T")


class Striped:
    """As `Tier`, `RunTier`, `TellingTier`, `ListingTier`, `KeepingTier` and `SettlingTier` say."""

    name = Disk.name
    is_server = Disk.is_server
    verifies = Disk.verifies

    def __init__(self, roots: Sequence[Path], namespace: str, capacity_nbytes: int, record_nbytes: int = 0) -> None:
        """As `Disk`; each directory has an equal part of the capacity.

        Raises ConfigError if none of them can be used, or a process uses one.
        """
        self.capacity_nbytes = capacity_nbytes
        self.medium = ", ".join(sorted(f"disk {(root / namespace).absolute()}" for root in roots))
        share_nbytes = capacity_nbytes // len(roots)
        self._parts = [
            Late(f"{root}", partial(Disk, root, namespace, share_nbytes, record_nbytes=record_nbytes))
            for root in roots
        ]
        self._failed: dict[Disk, str] = {}
        """What the last write to a disk said that failed."""
        problems = 0
        for part in self._parts:
            try:
                part.wait()
            except ConfigError as error:
                problems += 1
                if error.__cause__ is None or problems == len(roots):
                    self.close()
                    raise
                part.tell()

    @property
    def _disks(self) -> list[Disk]:
        """The open ones."""
        return [part.opened for part in self._parts if part.opened is not None]

    @property
    def nbytes(self) -> int:
        return sum(disk.nbytes for disk in self._disks)

    @property
    def problem(self) -> str:
        missing = [part.problem for part in self._parts]
        said = [disk.problem or self._failed.get(disk, "") for disk in self._disks]
        return "; ".join(filter(None, missing + said))

    @property
    def answers(self) -> bool:
        """Whether one of them is open."""
        return bool(self._disks)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = [disk.contains(keys) for disk in self._disks]
        return [any(one) for one in zip([False] * len(keys), *found, strict=True)]

    def get(self, key: bytes, into: memoryview) -> int | None:
        return self.get_run([(key, into)])[0]

    def get_run(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        return self._first(wanted, lambda disk, some: disk.get_run(some))

    def put(self, key: bytes, record: memoryview) -> bool:
        return self.put_run([(key, record)])[0]

    def put_run(self, records: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        failed: list[OSError] = []

        def written(disk: Disk, some: Sequence[tuple[bytes, memoryview]]) -> list[bool | None]:
            try:
                taken = disk.put_run(some)
            except OSError as error:
                self._failed[disk] = f"{disk.medium} takes no records: {error.strerror}"
                failed.append(error)
                taken = disk.contains([key for key, _ in some])  # before it failed
            else:
                self._failed.pop(disk, None)
            return [one or None for one in taken]

        known = self.contains([key for key, _ in records])
        fresh = [each for each, is_here in zip(records, known, strict=True) if not is_here]
        taken = self._first(fresh, written)
        if failed and None in taken:
            raise failed[-1]
        each_taken = iter(taken)
        return [is_here or bool(next(each_taken)) for is_here in known]

    def remove(self, key: bytes) -> None:
        self._all(lambda disk: disk.remove(key))

    def clear(self) -> None:
        self._all(Disk.clear)

    def keys_ending(self, ending: bytes) -> list[bytes]:
        found: list[bytes] = []
        self._all(lambda disk: found.extend(disk.keys_ending(ending)))
        return found

    def settle(self) -> None:
        self._all(Disk.settle)

    def keep(self, keys: Collection[bytes]) -> None:
        for part in self._parts:
            part.then(lambda disk: disk.keep(keys))

    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        for part in self._parts:
            part.then(lambda disk: disk.listen(changed))

    def leave(self) -> None:
        for part in self._parts:
            part.then(Disk.leave)

    def close(self) -> None:
        for part in self._parts:
            part.close()
            part.then(Disk.close)

    def _first(
        self,
        asked: Sequence[tuple[bytes, memoryview]],
        call: Callable[[Disk, Sequence[tuple[bytes, memoryview]]], Sequence[_T | None]],
    ) -> list[_T | None]:
        """For each what the first disk says that has something to say, from the key's own one on.

        Raises the OSError of a disk, if no disk has something to say of a record.
        """
        said: list[_T | None] = [None] * len(asked)
        failed = None
        for turn in range(len(self._parts)):
            of_part: dict[int, list[int]] = {}
            for number, (key, _) in enumerate(asked):
                if said[number] is None:
                    part = (int.from_bytes(key[:8], "little") + turn) % len(self._parts)
                    of_part.setdefault(part, []).append(number)
            for part, numbers in of_part.items():
                disk = self._parts[part].opened
                if disk is None:
                    continue
                try:
                    answers = call(disk, [asked[number] for number in numbers])
                except OSError as error:
                    failed = error
                else:
                    for number, answer in zip(numbers, answers, strict=True):
                        said[number] = answer
        if failed is not None and None in said:
            raise failed
        return said

    def _all(self, call: Callable[[Disk], None]) -> None:
        """Also behind one that fails or is not open, for which an OSError is raised afterwards."""
        failed = None
        for part in self._parts:
            try:
                if part.opened is None:
                    raise OSError(errno.EAGAIN, part.problem)
                call(part.opened)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
