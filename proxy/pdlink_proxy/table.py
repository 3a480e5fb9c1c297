"""The workers of one leg in rows: a decision among thousands is one native call, or arithmetic of a few arrays.

`Workers` are those of a table that may get a request. What a policy computes, it computes for all rows, and then
takes the best of those that fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from pdlink._index import Columns, WorkerLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Column: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
    Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
    Rows: TypeAlias = np.ndarray[tuple[int], np.dtype[np.intp]]
    Names: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

Group: TypeAlias = tuple[str, str]

_NOISE = 1.3
"""Speeds this far from the mean are measured where workers are equal: their prompts differ."""


class WorkerState(WorkerLoad):
    """One worker as placement sees it, kept up to date by what is sent to it and what it says of itself."""

    __slots__ = ("away", "group", "key", "label", "row", "silence")

    def __init__(
        self,
        key: str,
        label: str = "",
        *,
        allowed: bool = False,
        group: Group = ("", ""),
        pool_tokens: int | None = None,
        publishes: bool = False,
    ) -> None:
        """key: names the worker and its incarnation; label: names it for people. Others: as of `WorkerLoad`."""
        super().__init__(allowed)
        self.key, self.label, self.pool_tokens, self.publishes = key, label, pool_tokens, publishes
        self.silence = ""
        """Why it publishes no KV events although it should, for people."""
        self.group = group
        """Its cell and the fingerprint of its KV: KV moves within a group only. Unknown parts fit everything."""
        self.away = False
        """It cannot be reached."""
        self.row = -1
        """In the table of its side; -1 if it is in none, as when its worker is gone."""


class Table:
    """A row for each worker. Its length does not change."""

    def __init__(self, states: Iterable[WorkerState]) -> None:
        self.states = list(states)
        self.labels = [state.label for state in self.states]
        """For people."""
        self.rows = {state.key: row for row, state in enumerate(self.states)}
        """By the key of a worker."""
        self.columns = Columns(self.states, self.rows)
        """Judges all rows in one call."""
        self._names: Names | None = None
        self._groups: dict[Group, int] = {}
        self._group: Rows = np.zeros(len(self.states), np.intp)
        """By row, the number of its group."""
        for row in range(len(self.states)):
            self.tell_group(row)

    def put(self, row: int, state: WorkerState) -> None:
        """The row is this state's from now on: its worker, at the same URL, begins another life."""
        old = self.states[row]
        if self.rows.get(old.key) == row:
            del self.rows[old.key]
        self.states[row], self.labels[row], self.rows[state.key] = state, state.label, row
        self.columns.put(row, state)
        old.row, state.row = -1, row
        self.tell_group(row)

    def tell_group(self, row: int) -> None:
        """The group of this row's state has changed."""
        self._group[row] = self._groups.setdefault(self.states[row].group, len(self._groups))

    @property
    def names(self) -> Names:
        """A number for each worker, the same in all its lives and in every router."""
        if self._names is None:
            self._names = np.array([_name(state.key) for state in self.states], np.uint64)
        return self._names

    def groups_of(self, fit: Mask | None) -> set[Group]:
        """Those of all rows, or of these."""
        present = np.bincount(self._group if fit is None else self._group[fit], minlength=len(self._groups))
        return {group for group, number in self._groups.items() if present[number]}

    def exchanging(self, others: set[Group]) -> Mask:
        """Which workers may exchange KV with a worker of one of these groups."""
        vague = any("" in group for groups in (self._groups, others) for group in groups)
        fits = [
            group in others or (vague and any(may_exchange(group, other) for other in others))
            for group in self._groups
        ]
        found: Mask = np.array(fits, np.bool_)[self._group]
        return found


class Workers(Sequence[WorkerState]):
    """The workers of a table that `fit`, in its order; all, if `fit` is None."""

    __slots__ = ("_rows", "fit", "num", "table")

    def __init__(self, table: Table, fit: Mask | None = None) -> None:
        self.table, self.fit = table, fit
        self.num = len(table.states) if fit is None else int(np.count_nonzero(fit))
        """The same as `len`, which costs a call."""
        self._rows: Rows | None = None

    @classmethod
    def of(cls, workers: Sequence[WorkerState]) -> Workers:
        """These; of a list, as they are now."""
        return workers if isinstance(workers, cls) else cls(Table(workers))

    def __len__(self) -> int:
        return self.num

    @overload
    def __getitem__(self, index: int) -> WorkerState: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkerState]: ...

    def __getitem__(self, index: int | slice) -> WorkerState | Sequence[WorkerState]:
        if self.fit is None:
            return self.table.states[index]
        if isinstance(index, slice):
            return [self.table.states[row] for row in self.rows[index]]
        return self.table.states[int(self.rows[index])]

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self.table.states) if self.fit is None else map(self.table.states.__getitem__, self.rows)

    @property
    def rows(self) -> Rows:
        """In the table."""
        if self._rows is None:
            self._rows = np.arange(self.num) if self.fit is None else np.flatnonzero(self.fit)
        return self._rows

    def only(self, mask: Mask) -> Workers:
        """Those of them that this column marks, too."""
        if self.fit is None and np.logical_and.reduce(mask):  # `all` itself is written in Python
            return self
        return Workers(self.table, mask if self.fit is None else mask & self.fit)

    def without(self, keys: Iterable[str]) -> Workers:
        """Workers that have none of these keys."""
        rows = [row for key in keys if (row := self.table.rows.get(key)) is not None]
        if not rows:
            return self
        mask = np.ones(len(self.table.states), np.bool_)
        mask[rows] = False
        return self.only(mask)

    def among(self, column: Column) -> Column:
        """Of a column, their own part."""
        return column if self.fit is None else column[self.fit]


def mean_speed(workers: Iterable[WorkerState]) -> float:
    """Tokens per second of those of which it is measured; 0 if there are none."""
    speeds = [worker.tokens_per_s for worker in workers if worker.tokens_per_s is not None]
    return sum(speeds) / len(speeds) if speeds else 0.0


def compare(workers: Sequence[WorkerState]) -> None:
    """Set `slowness` of the workers of one pool."""
    mean = mean_speed(workers)
    for worker in workers:
        ratio = mean / worker.tokens_per_s if worker.tokens_per_s else 1.0
        worker.slowness = ratio if ratio > _NOISE or ratio * _NOISE < 1 else 1.0


def may_exchange(one: Group, other: Group) -> bool:
    """Whether KV moves between workers of these groups. Unknown parts fit everything."""
    return all(mine == theirs or not mine or not theirs for mine, theirs in zip(one, other, strict=True))


def _name(key: str) -> int:
    return number_of(key.partition("#")[0].encode())  # its URL alone: a restarted worker keeps its share


def number_of(data: bytes) -> int:
    """64 bits that stand for these bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
