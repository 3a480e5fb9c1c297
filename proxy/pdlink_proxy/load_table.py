"""What each process of one proxy has sent to each worker, in memory that all of them map.

A process writes its own row and reads the others'. A row has a slot for each worker that the process has sent
something to: the worker's name, tokens and requests that have not ended (or for each share of the queue, its account:
`accounts.py`). A number that is read while it is written is
a little old; nothing else can go wrong, so there is no lock.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOTS = 16_384
_WORD_NBYTES = 8
_WORDS = 3
"""Of a slot: name, tokens, requests."""
_ROW_WORDS = 1 + _WORDS * SLOTS
"""The first is the number of slots in use."""


def make(path: Path, processes: int) -> None:
    """An empty table. It takes memory as it is used."""
    with path.open("wb") as file:
        os.truncate(file.fileno(), processes * _ROW_WORDS * _WORD_NBYTES)


class LoadTable:
    """Of one process."""

    def __init__(self, path: Path, number: int, processes: int) -> None:
        """number: of this process, from 0. What an earlier process of this number had left there is forgotten."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("q")
        self._base = number * _ROW_WORDS
        self._others = [each * _ROW_WORDS for each in range(processes) if each != number]
        self._slots: dict[int, int] = {}
        """By `name_of` a worker."""
        self._free: list[int] = []
        self._words[self._base] = 0

    def put(self, name: int, tokens: int, requests: int) -> None:
        """This process has so much at the worker of this name."""
        at = self._slots.get(name)
        if at is None:
            if not requests:
                return
            at = self._take()
            if at is None:
                return
            self._slots[name] = at
            self._words[at + 1] = self._words[at + 2] = 0
            self._words[at] = name
        self._words[at + 1] = tokens
        self._words[at + 2] = requests

    def forget(self, name: int) -> None:
        """The worker of this name is gone."""
        at = self._slots.pop(name, None)
        if at is not None:
            self._words[at] = self._words[at + 1] = self._words[at + 2] = 0
            self._free.append(at)

    def others(self) -> dict[int, tuple[int, int]]:
        """By `name_of` a worker, tokens and requests that the other processes have there. Costs some us for each
        slot in use."""
        found: dict[int, tuple[int, int]] = {}
        for row in self.rows():
            for name, tokens, requests in row:
                if requests > 0:
                    had = found.get(name, (0, 0))
                    found[name] = had[0] + tokens, had[1] + requests
        return found

    def rows(self) -> Iterator[list[tuple[int, int, int]]]:
        """Of each other process, its slots in use: a name and two numbers."""
        for base in self._others:
            end = base + 1 + _WORDS * min(self._words[base], SLOTS)
            words = self._words[base + 1 : end].tolist()
            yield list(zip(words[::3], words[1::3], words[2::3], strict=True))

    def close(self) -> None:
        self._words[self._base] = 0
        self._words.release()
        self._map.close()

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        used = self._words[self._base]
        if used >= SLOTS:
            return None  # the others will not see what this process sends there
        self._words[self._base] = used + 1
        return self._base + 1 + _WORDS * used


def name_of(side: str, key: str) -> int:
    """A worker on one side, in 63 bits."""
    return int.from_bytes(hashlib.blake2b(f"{side} {key}".encode(), digest_size=8).digest()) >> 1
