"""The workers of one leg in columns: a decision among thousands reads a few arrays, and not every worker.

A `WorkerState` writes its own row whenever something happens to it. `Workers` are those of a table that may get a
request. What a policy computes, it computes for whole columns, and then takes the best of the rows that fit.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from pdlink._index import Columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Column: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
    Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
    Rows: TypeAlias = np.ndarray[tuple[int], np.dtype[np.intp]]
    Names: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

Group: TypeAlias = tuple[str, str]

_DECAY = 0.97
_MOST_OF_MEAN = 4
_FIRST_MEAN_TOKENS = 4096
"""Where tokens are what clients allow: one request counts in a worker's pace as at most so many mean ones, and nobody
knows the mean of the first. Else a client that allows millions, and gets ten, makes its worker look quick."""
_NOISE = 1.3
"""Speeds this far from the mean are measured where workers are equal: their prompts differ."""


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker as placement sees it, kept up to date by what is sent to it and what it says of itself."""

    key: str
    """Names the worker and its incarnation."""
    label: str = ""
    """Names it for people."""
    load: float = 0.0
    """Tokens it has to do: those of unfinished requests of ours, and the requests it has from others. For prefill the
    tokens it must compute, for decode those of prompt and answer."""
    requests: int = 0
    """Ours, not finished."""
    tokens: int = 0
    """Of those."""
    foreign: int = 0
    """Requests of others, by its own account."""
    foreign_tokens: float | None = None
    """What it has to do for them, by its own account; None if it says only how many they are."""
    room_tokens: int | None = None
    """Tokens whose KV it can still take; None if it does not say."""
    pool_tokens: int | None = None
    """Tokens whose KV it can hold; None if it does not say."""
    tokens_per_s: float | None = None
    """Finished per second in which there was something to do; None if not measured."""
    publishes: bool = False
    """It says what KV it has, in events; some have come."""
    silence: str = ""
    """Why it does not although it should, for people."""
    group: tuple[str, str] = ("", "")
    """Its cell and the fingerprint of its KV: KV moves within a group only. Unknown parts fit everything."""
    taken: float = 0.0
    """KV that it has computed of late, in shares of its pool: see `policies.cost`."""
    slowness: float = 1.0
    """Time for a token, relative to the mean of its pool. 1 for differences that may be chance."""
    away: bool = False
    """It cannot be reached."""
    allowed: bool = False
    """Its tokens are what clients allow (decode), and not what it computes for sure (prefill)."""
    table: Table | None = None
    """Where `row` is kept up to date."""
    row: int = 0
    number: int = field(default_factory=itertools.count().__next__)
    """Names it where numbers are quicker than `key`; never given twice, so nothing of a former life is its own."""
    _mean_tokens: float = 0.0
    _most_counted: float = math.inf
    """As so many tokens a request counts at most, in means and paces."""
    _done_tokens: float = 0.0
    """Finished, each request counting less than the next; `_done_s` they took."""
    _done_s: float = 0.0
    _since_s: float = 0.0
    _counts_alone: bool = False
    """Nothing but our tokens changes its load, and it has told no room."""

    def __post_init__(self) -> None:
        if self.allowed:
            self._most_counted = _FIRST_MEAN_TOKENS

    def sent(self, tokens: int, now: float) -> None:
        """A request of ours leaves for it."""
        requests, mean = self.requests, self._mean_tokens
        if not requests:
            self._since_s = now
        self.requests = requests + 1
        counted = tokens if tokens < self._most_counted else self._most_counted
        self._mean_tokens = mean = mean + 0.1 * (counted - mean) if mean else float(counted)
        if self.allowed:
            self._most_counted = mean * _MOST_OF_MEAN or _FIRST_MEAN_TOKENS
        self.tokens += tokens
        if self._counts_alone:
            self.load = load = self.load + tokens
            if (table := self.table) is not None:
                table.load[self.row] = load
            return
        if self.room_tokens is not None:
            self.room_tokens -= tokens
        self._weigh()

    def finished(self, tokens: int, now: float, *, served: bool) -> None:
        """A request that was `sent` needs nothing of it any more. served: it did what it was asked."""
        self.requests = requests = self.requests - 1
        self.tokens -= tokens
        if served:
            counted = tokens if tokens < self._most_counted else self._most_counted
            self._done_tokens = done = self._done_tokens * _DECAY + counted
            self._done_s = took_s = self._done_s * _DECAY + now - self._since_s
            self.tokens_per_s = done / took_s if took_s > 0 else None
        self._since_s = now
        if self._counts_alone:  # at rest it is counted anew: sums of floats lose a little
            self.load = load = self.load - tokens if requests else self.tokens + (self.foreign_tokens or 0)
            if (table := self.table) is not None:
                table.load[self.row] = load
            return
        if self.room_tokens is not None:
            self.room_tokens += tokens
        self._weigh()

    def heard(self, requests: int, free_tokens: int | None, load_tokens: int | None = None) -> None:
        """By its own account it has this many requests, room for so many tokens, and so many to do."""
        self.foreign = max(0, requests - self.requests)
        self.foreign_tokens = None if load_tokens is None else max(0, load_tokens - self.tokens)
        self.room_tokens = free_tokens
        self._weigh()
        if self.table is not None:
            self.table.tell_room(self, self.row)

    @property
    def idle(self) -> bool:
        """It has no request, of nobody."""
        return self.requests + self.foreign == 0

    def grouped(self, group: tuple[str, str]) -> None:
        if group != self.group:
            self.group = group
            if self.table is not None:
                self.table.tell_group(self, self.row)

    def compared(self, slowness: float) -> None:
        if slowness != self.slowness:
            self.slowness = slowness
            if self.table is not None:
                self.table.tell(self, self.row)

    def took(self, taken: float) -> None:
        self.taken = taken
        if self.table is not None:
            self.table.taken[self.row] = taken

    def _weigh(self) -> None:
        foreign = self.foreign_tokens
        if foreign is None:
            foreign = self.foreign * (self._mean_tokens or 1.0)
        self.load = load = self.tokens + foreign
        self._counts_alone = not self.foreign and self.room_tokens is None
        if (table := self.table) is not None:
            table.load[self.row] = load
            if self.room_tokens is not None:
                table.tell_room(self, self.row)


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
        self._numbers = np.zeros(num, np.uint32)
        """`WorkerState.number`."""
        self.room: Column = np.zeros(num)
        """Tokens that fit in; infinite where nobody knows, and into an idle worker: what does not fit into that will
        never fit, and the worker says so."""
        self.has_room = True
        """For every request: no worker has told its room."""
        self.rows: dict[str, int] = {}
        """By the key of a worker."""
        self.columns = Columns(self.load, self.slowness, self.taken, self._numbers, self.rows)
        """Judges all rows in one call."""
        self._names: Names | None = None
        self._groups: dict[Group, int] = {}
        self._group: Rows = np.zeros(num, np.intp)
        """By row, the number of its group."""
        for row, state in enumerate(self.states):
            self.rows[state.key], self._numbers[row] = row, state.number
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
        self._numbers[row] = state.number
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
        worker.compared(ratio if ratio > _NOISE or ratio * _NOISE < 1 else 1.0)


def may_exchange(one: Group, other: Group) -> bool:
    """Whether KV moves between workers of these groups. Unknown parts fit everything."""
    return all(mine == theirs or not mine or not theirs for mine, theirs in zip(one, other, strict=True))


def _name(key: str) -> int:
    return number_of(key.partition("#")[0].encode())  # its URL alone: a restarted worker keeps its share


def number_of(data: bytes) -> int:
    """64 bits that stand for these bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
