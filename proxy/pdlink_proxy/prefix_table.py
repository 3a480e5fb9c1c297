"""Where the processes of one proxy have sent which prompts, in memory that all of them map.

An entry is the key of a prompt's beginning, the worker that got it last, and how much more that worker may get before
it has forgotten it. Two keys of one place overwrite each other, and what is read while it is written may be of two
entries: all of it is a guess, so there is no lock. It costs the same however many processes there are.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from pathlib import Path

    Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

SLOTS = 2**20
"""Of 512 tokens each."""
WORKERS = 2**14
_NBYTES = 8 * (3 * SLOTS + WORKERS)
_HASH_NBYTES = 8


def make(path: Path) -> None:
    """An empty table: at most 25 MB, as they are used."""
    with path.open("wb") as file:
        os.truncate(file.fileno(), _NBYTES)


class PrefixTable:
    """Of one leg."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            words: Words = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint64)
        self._keys, self._workers, self._until, self._sent = np.split(words, [SLOTS, 2 * SLOTS, 3 * SLOTS])
        """By slot: the key; the number of its worker; how many keys that worker may have been sent. By number of a
        worker, how many it was sent."""
        self._numbers: dict[str, int] = {}
        """By key of a worker."""
        self._named: dict[int, str] = {}

    def note(self, keys: Sequence[Hashable], worker: str, most: int) -> None:
        """The worker is sent a prompt with these keys, and keeps `most`."""
        if not keys:
            return
        number = self._number(worker)
        hashes = _hashes(keys)
        at = _slots(hashes)
        sent = self._sent[number % WORKERS] + np.uint64(len(keys))
        self._sent[number % WORKERS] = sent
        self._workers[at] = number
        self._until[at] = sent + np.uint64(most)
        self._keys[at] = hashes

    def found(self, keys: Sequence[Hashable], workers: Mapping[str, int]) -> list[tuple[int, int]]:
        """By which of `workers` how many of the keys may be held, the fewest first. workers: by key, a row."""
        if not keys:
            return []
        hashes = _hashes(keys)
        at = _slots(hashes)
        number = self._workers[at]
        well = (self._keys[at] == hashes) & (self._until[at] >= self._sent[number % np.uint64(WORKERS)])
        deepest: dict[int, int] = {}
        for index in np.flatnonzero(well).tolist():
            deepest[int(number[index])] = index + 1  # who was sent that has all before it
        return sorted(
            ((row, num) for name, num in deepest.items() if (row := self._row(name, workers)) is not None),
            key=lambda each: each[1],
        )

    def _row(self, number: int, workers: Mapping[str, int]) -> int | None:
        if number not in self._named:  # of another process, which has heard of a worker first
            for key in workers.keys() - self._numbers.keys():
                self._number(key)
        return workers.get(self._named.get(number, ""))

    def _number(self, worker: str) -> int:
        number = self._numbers.get(worker)
        if number is None:
            number = int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=_HASH_NBYTES).digest(), "little")
            self._numbers[worker], self._named[number] = number, worker
        return number

    def forget(self, worker: str) -> None:
        """It is gone: nobody asks for it any more."""
        self._named.pop(self._numbers.pop(worker, 0), None)


def _slots(hashes: Words) -> Words:
    return hashes >> np.uint64(1) & np.uint64(SLOTS - 1)


def _hashes(keys: Sequence[Hashable]) -> Words:
    """Of each 64 bits, never 0."""
    if isinstance(keys[0], bytes):  # they are hashes
        data = b"".join([key[:_HASH_NBYTES] for key in keys])  # type: ignore[index]
    else:
        data = b"".join([hashlib.blake2b(repr(key).encode(), digest_size=_HASH_NBYTES).digest() for key in keys])
    return np.frombuffer(data, np.uint64) | np.uint64(1)
