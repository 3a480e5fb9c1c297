"""`Entries`: which records a disk tier has: the journal's as they were read, and what came since.

A restart must not make Python objects of each entry. Entries stay as they are in the journal (64 bytes), found by a
sorted array of 8 bytes for each: a mix of its key, and its row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .journal import ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .journal import EntryArray

    _Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]
    _Words: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
    """[keys, 4]"""

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Odd numbers, for keys that differ in one place only, as those of tests; others are hashes already."""
_AT_ONCE = 1 << 14
"""Rows that stay in a core's cache while their keys are mixed."""


class Entries:
    """By key what `journal.unpack` takes. Not thread-safe."""

    def __init__(self, rows: EntryArray | None = None) -> None:
        """rows: in the journal's order; of several of a key the last one counts. Costs 0.1 s for a million."""
        self._rows = np.empty(0, ENTRY) if rows is None else rows
        self._keys: _Words = self._rows.view("<u8").reshape(-1, 8)[:, :4]
        num = len(self._rows)
        bits = np.uint64(max(1, num.bit_length()))
        self._row_mask = (np.uint64(1) << bits) - np.uint64(1)
        self._sorted = np.empty(num, np.uint64)
        for begin in range(0, num, _AT_ONCE):
            self._sorted[begin : begin + _AT_ONCE] = self._mixed(self._keys[begin : begin + _AT_ONCE])
        self._sorted |= np.arange(num, dtype=np.uint64)
        self._sorted.sort()
        self._gone = np.zeros(num, bool)
        self._num_loaded = num
        """That are not gone."""
        self._new: dict[bytes, bytes] = {}
        self.superseded: dict[bytes, list[bytes]] = {}
        """What earlier rows of a key say."""
        self._supersede()

    def _supersede(self) -> None:
        mixed = self._sorted & ~self._row_mask
        alike = np.flatnonzero(mixed[1:] == mixed[:-1])
        last: dict[bytes, int] = {}
        for row in np.unique(self._sorted[np.concatenate([alike, alike + 1])] & self._row_mask).tolist():
            key = self._key(row)
            if key in last:
                self.superseded.setdefault(key, []).append(self._rest(last[key]))
                self._remove(last[key])
            last[key] = row

    def __len__(self) -> int:
        return self._num_loaded + len(self._new)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._rows["key"][~self._gone].tolist()
        yield from self._new

    def __contains__(self, key: bytes) -> bool:
        return key in self._new or self._row(key) >= 0

    def __setitem__(self, key: bytes, rest: bytes) -> None:
        """For a key that is not here."""
        self._new[key] = rest

    def get(self, key: bytes) -> bytes | None:
        found = self._new.get(key)
        if found is not None:
            return found
        row = self._row(key)
        return self._rest(row) if row >= 0 else None

    def pop(self, key: bytes) -> bytes:
        """Raises KeyError."""
        found = self._new.pop(key, None)
        if found is not None:
            return found
        row = self._row(key)
        if row < 0:
            raise KeyError(key)
        self._remove(row)
        return self._rest(row)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key."""
        found = [key in self._new for key in keys]
        if not self._num_loaded:
            return found
        asked = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)
        mixed = self._mixed(asked)
        at = np.minimum(np.searchsorted(self._sorted, mixed), len(self._sorted) - 1)
        rows = self._sorted[at] & self._row_mask
        here = (self._keys[rows] == asked).all(axis=1) & ~self._gone[rows]
        mixed_alike = self._sorted[at] & ~self._row_mask == mixed
        for index in np.flatnonzero(mixed_alike & ~here).tolist():  # it is another key, or gone
            here[index] = self._row(keys[index]) >= 0
        return [new or old for new, old in zip(found, here.tolist(), strict=True)]

    def _row(self, key: bytes) -> int:
        """-1 if there is none."""
        if not self._num_loaded:
            return -1
        mixed = self._mixed(np.frombuffer(key, "<u8").reshape(1, 4))
        first, last = np.searchsorted(self._sorted, [mixed[0], mixed[0] | self._row_mask])
        for row in (self._sorted[first:last] & self._row_mask).tolist():
            if not self._gone[row] and self._key(row) == key:
                return int(row)
        return -1

    def _mixed(self, keys: _Words) -> _Numbers:
        """A number for each key, with room for a row in its low bits."""
        mixed = np.zeros(len(keys), np.uint64)
        for column, factor in enumerate(_FACTORS):
            mixed += keys[:, column] * np.uint64(factor)
        return mixed & ~self._row_mask

    def _remove(self, row: int) -> None:
        self._gone[row] = True
        self._num_loaded -= 1

    def _key(self, row: int) -> bytes:
        return bytes(self._rows["key"][row])

    def _rest(self, row: int) -> bytes:
        return bytes(self._rows["rest"][row])
