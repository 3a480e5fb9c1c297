"""The workers of one leg in columns: a decision among thousands reads a few arrays, and not every worker.

A `WorkerState` writes its own row whenever something happens to it. `Workers` are those of a table that may get a
request. What a policy computes, it computes for whole columns, and then takes the best of the rows that fit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .fleet import WorkerState

    Column: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
    Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
    Rows: TypeAlias = np.ndarray[tuple[int], np.dtype[np.intp]]
    Names: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

Group: TypeAlias = tuple[str, str]

FEW = 64
"""Workers that a loop looks through sooner than numpy."""


class Table:
    """A row for each worker. Its length does not change."""

    def __init__(self, states: Iterable[WorkerState]) -> None:
        """As the states are now; `follow` keeps a row up to date."""
        self.states = list(states)
        self.labels = [state.label for state in self.states]
        """For people."""
        num = len(self.states)
        self.load: Column = np.zeros(num)
        """Tokens to do."""
        self.slowness: Column = np.ones(num)
        self.taken: Column = np.zeros(num)
        """`WorkerState.taken`."""
        self.room: Column = np.zeros(num)
        """Tokens that fit in; infinite where nobody knows, and into an idle worker: what does not fit into that will
        never fit, and the worker says so."""
        self.has_room = True
        """For every request: no worker has told its room."""
        self.rows: dict[str, int] = {}
        """By the key of a worker."""
        self._names: Names | None = None
        self._groups: dict[Group, int] = {}
        self._group: Rows = np.zeros(num, np.intp)
        """By row, the number of its group."""
        for row, state in enumerate(self.states):
            self.rows[state.key] = row
            self.tell(state, row)
            self.tell_group(state, row)

    def follow(self) -> None:
        """From now on the states keep their rows up to date."""
        for row, state in enumerate(self.states):
            state.table, state.row = self, row

    def put(self, row: int, state: WorkerState) -> None:
        """The row is this state's from now on: its worker, at the same URL, begins another life."""
        old = self.states[row]
        old.table = None
        if self.rows.get(old.key) == row:
            del self.rows[old.key]
        self.states[row], self.labels[row], self.rows[state.key] = state, state.label, row
        state.table, state.row = self, row
        self.tell(state, row)
        self.tell_group(state, row)

    def tell(self, state: WorkerState, row: int) -> None:
        """What the state of this row has to do, or its pace, has changed."""
        self.load[row], self.slowness[row], self.taken[row] = state.load, state.slowness, state.taken
        self.tell_room(state, row)

    def tell_room(self, state: WorkerState, row: int) -> None:
        room = state.room_tokens
        if room is not None:
            self.has_room = False
        self.room[row] = math.inf if room is None or state.idle else room

    def tell_group(self, state: WorkerState, row: int) -> None:
        self._group[row] = self._groups.setdefault(state.group, len(self._groups))

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
        fits = [group in others or (vague and any(_fit(group, other) for other in others)) for group in self._groups]
        found: Mask = np.array(fits, np.bool_)[self._group]
        return found


class Workers(Sequence["WorkerState"]):
    """The workers of a table that `fit`, in its order; all, if `fit` is None."""

    __slots__ = ("_rows", "few", "fit", "num", "table")

    def __init__(self, table: Table, fit: Mask | None = None) -> None:
        self.table, self.fit = table, fit
        self.num = len(table.states) if fit is None else int(np.count_nonzero(fit))
        """The same as `len`, which costs a call."""
        self.few = fit is None and self.num <= FEW
        """All of a small table: lists of its columns are quicker than they are."""
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

    def least(self, column: Column, turn: int) -> int:
        """The row of the one with the smallest value. Equal ones take turns: else the first gets all requests of an
        idle pool."""
        if self.few:
            return least_of(column.tolist(), turn)
        if self.fit is not None:
            column = np.where(self.fit, column, math.inf)
        equal = np.flatnonzero(column == column.min())
        return int(equal[turn % len(equal)])


def least_of(values: list[float], turn: int) -> int:
    """The place of the smallest. Equal ones take turns."""
    least = min(values)
    at = values.index(least)
    for _ in range(turn % values.count(least)):
        at = values.index(least, at + 1)
    return at


def _fit(one: Group, other: Group) -> bool:
    """Unknown parts fit everything."""
    return all(mine == theirs or not mine or not theirs for mine, theirs in zip(one, other, strict=True))


def _name(key: str) -> int:
    return number_of(key.partition("#")[0].encode())  # its URL alone: a restarted worker keeps its share


def number_of(data: bytes) -> int:
    """64 bits that stand for these bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
