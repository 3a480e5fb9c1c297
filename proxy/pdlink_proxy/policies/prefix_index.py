"""Where the KV of prompts may lie: by what workers say, or else by where prompts were sent, an approximation."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ..fleet import PlacementRequest
    from ..table import Column, Rows, Table, Workers, WorkerState

MAX_KEYS = 500_000
"""Of all workers: 83 MB if no two workers share one (measured)."""
MAX_WORKER_KEYS = 8192
"""Of one: 2 million tokens."""
MAX_UNHEARD_KEYS = 256
"""Of one that publishes what it has: what was sent to it, and has not been computed yet."""
_FEW = 4


class PrefixIndex:
    """The keys sent to each worker, the least recent forgotten first.

    Keys are noted suffix first, so the beginning of a prompt is always newer than what follows it: a worker that has
    a key has all before it. So the workers that have a key are some of the ones with the key before it, and as
    many of them are the same ones: along a prompt only the keys count after which there are fewer.
    """

    def __init__(self, max_keys: int = MAX_KEYS, max_worker_keys: int = MAX_WORKER_KEYS) -> None:
        self._max_keys, self._max_worker_keys = max_keys, max_worker_keys
        self._of: dict[str, OrderedDict[Hashable, None]] = {}
        """By worker."""
        self._holders: dict[Hashable, str | _Holders] = {}
        """By key, the worker that has it, or several."""
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def cached_tokens(self, request: PlacementRequest, workers: Workers) -> Column:
        """Tokens of the prompt that each worker of the table may hold."""
        table = workers.table
        found: Column = np.zeros(len(table.states))
        for holders, tokens in self._sent(request):
            if isinstance(holders, _Holders):
                rows = holders.rows(table)
                found[rows] = np.maximum(found[rows], tokens)
            elif (row := table.rows.get(holders)) is not None:
                found[row] = max(found[row], tokens)
        for key, tokens in request.held.items():
            row = table.rows.get(key)
            if row is not None and tokens > found[row]:
                found[row] = tokens
        return found

    def cached_of_few(self, request: PlacementRequest, workers: Workers) -> list[int]:
        """The same as a list."""
        found, rows = [0] * workers.num, workers.table.rows
        for holders, tokens in self._sent(request):
            for key in holders.keys if isinstance(holders, _Holders) else (holders,):
                if (row := rows.get(key)) is not None and tokens > found[row]:
                    found[row] = tokens
        for key, tokens in request.held.items():
            if (row := rows.get(key)) is not None and tokens > found[row]:
                found[row] = tokens
        return found

    def _sent(self, request: PlacementRequest) -> list[tuple[str | _Holders, int]]:
        """Who was sent how many tokens of the prompt, the fewest first: a worker may be named more than once."""
        keys, per_key, num_tokens, of = request.keys, request.key_tokens, request.num_tokens, self._holders
        found: list[tuple[str | _Holders, int]] = []
        at, end = 0, len(keys)
        while at < end and (holders := of.get(keys[at])) is not None:
            num = len(holders.keys) if isinstance(holders, _Holders) else 1
            last, beyond = at, end
            while beyond - last > 1:
                middle = (last + beyond) // 2
                there = of.get(keys[middle])
                if there is not None and (len(there.keys) if isinstance(there, _Holders) else 1) == num:
                    last = middle
                else:
                    beyond = middle
            at = last + 1
            found.append((holders, min(at * per_key, num_tokens)))
        return found

    def note(self, request: PlacementRequest, worker: WorkerState) -> int:
        """The worker is sent the prompt. Returns the tokens of it that it may have held before. Nothing is noted of
        one that was never looked up."""
        name, said = worker.key, request.held.get(worker.key, 0) if request.held else 0
        if not (keys := request.chain):
            return said
        held = self._of.setdefault(name, OrderedDict())
        before, renew, new = len(held), held.move_to_end, 0
        for key in reversed(keys):
            if key in held:
                renew(key)
            else:
                held[key] = None
                self._add(key, name)
                new += 1
        cached = min((len(keys) - new) * request.key_tokens, request.num_tokens)
        most = MAX_UNHEARD_KEYS if worker.publishes else self._max_worker_keys
        if worker.pool_tokens is not None:  # it has forgotten what does not fit
            most = min(most, worker.pool_tokens // request.key_tokens)
        while len(held) > most:
            self._drop(held.popitem(last=False)[0], name)
        self._num_keys += len(held) - before
        while self._num_keys > self._max_keys:
            self._shrink()
        return max(cached, said)

    def _shrink(self) -> None:
        """Halve the share of the worker that has most."""
        name = max(self._of, key=lambda each: len(self._of[each]))
        held = self._of[name]
        num = (len(held) + 1) // 2
        for _ in range(num):
            self._drop(held.popitem(last=False)[0], name)
        self._num_keys -= num

    def forget(self, key: str) -> None:
        held = self._of.pop(key, ())
        for each in held:
            self._drop(each, key)
        self._num_keys -= len(held)

    def _add(self, key: Hashable, worker: str) -> None:
        there = self._holders.get(key)
        if there is None:
            self._holders[key] = worker
        elif isinstance(there, _Holders):
            there.add(worker)
        else:
            self._holders[key] = _Holders((there, worker))

    def _drop(self, key: Hashable, worker: str) -> None:
        there = self._holders[key]
        if not isinstance(there, _Holders):
            del self._holders[key]
            return
        there.discard(worker)
        if len(there.keys) == 1:
            (self._holders[key],) = there.keys


class _Holders:
    """Several workers, by their keys."""

    __slots__ = ("_num", "_rows", "_table", "keys")

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys: tuple[str, ...] | set[str] = keys
        """A tuple of few takes a quarter of a set's memory, and most beginnings are held by two workers."""
        self._table: Table | None = None
        self._rows: Rows | None = None
        """The first `_num` are those in that table: a beginning that all prompts have is held by all workers, is
        looked up each time, and gets another holder with most requests."""
        self._num = 0

    def add(self, key: str) -> None:
        """One that does not hold it yet."""
        if isinstance(self.keys, set):
            self.keys.add(key)
        elif len(self.keys) < _FEW:
            self.keys += (key,)
        else:
            self.keys = {*self.keys, key}
        rows, num = self._rows, self._num
        if rows is None:
            return
        row = self._table.rows.get(key) if self._table is not None else None
        if row is None:
            self._rows = None
            return
        if num == len(rows):
            self._rows = rows = np.concatenate((rows, np.zeros(num, np.intp)))
        rows[num] = row
        self._num = num + 1

    def discard(self, key: str) -> None:
        if isinstance(self.keys, set):
            self.keys.discard(key)
        else:
            self.keys = tuple(each for each in self.keys if each != key)
        self._rows = None

    def rows(self, table: Table) -> Rows:
        if self._rows is None or self._table is not table:
            there = [row for key in self.keys if (row := table.rows.get(key)) is not None]
            self._table, self._rows, self._num = table, np.array(there or [0], np.intp), len(there)
        return self._rows[: self._num]
