"""What each share of the queue has had, in virtual time (`queue.py`): of one process, or of all that serve one port.

Several processes keep one account of a share together, each in its own row of a table that all of them map. A share's
*finish* is the latest that any of them has written, so the others have to wait for each other: a process lets the
workers to one whose share has had less. Two that pay for one share within some microseconds lose one payment; nothing
else can go wrong, so there is no lock.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .load_table import LoadTable

Share = tuple[str, str]
"""An API key, and the model that it asks."""

SLACK = 4
"""A share goes first in its process until it is so many requests ahead of one that waits elsewhere: who is first
there needs up to `POLL_S` to see that there is room."""
POLL_S, MAX_POLL_S = 0.01, 0.2
"""Between two looks for room that others have left, while somebody waits."""
SILENT_S = 1.0
"""Who has said nothing for so long is not waited for: it is being started again, or it hangs."""
_LATEST_S = 0.005
"""What is known of the others may be so old where nothing is paid for."""
_UNIT = 1000
"""Words of the table are whole numbers: of a token, and of a weight."""
_CLOCK = 1
"""In place of a share's name: the virtual time, and when this was written, in ms."""
_MODEL_BITS = 20
_MAX_NAMES = 4096


class Accounts:
    """Of one process."""

    shared = False
    """Other processes have queues for the same workers: look now and then whether they have left some."""

    def __init__(self) -> None:
        self.finish: dict[Share, float] = {}
        """By share, the virtual time at which it has had its due; the next one for those who wait."""
        self.virtual = 0.0

    def clear(self) -> None:
        """Nobody waited: nobody has a claim."""
        self.finish.clear()
        self.virtual = 0.0

    def enter(self, share: Share, _weight: float) -> None:
        """Somebody of this share waits, for the first time since nobody did."""
        self.finish[share] = max(self.virtual, self.finish.get(share, 0.0))

    def leave(self, share: Share) -> None:
        """Nobody of this share waits any more."""

    def pay(self, share: Share, due: float, tokens: int, waiting: float) -> None:
        """It has had `tokens`: `due` in its own virtual time. waiting: the weights of all shares that waited."""
        start = self.finish[share]
        self.finish[share] = start + due
        # Time goes on although each request may come under a new key: else the others would starve.
        self.virtual = max(start, self.virtual + tokens / waiting)

    def tidy(self, waiting: Collection[Share]) -> None:
        """Forget shares that do not wait and have no more than a new one would have."""
        self.finish = {
            share: finish for share, finish in self.finish.items() if finish > self.virtual or share in waiting
        }

    def look(self, now: float) -> None:
        """At what the others have written. now: monotonic, the same clock in all processes."""

    def waits_elsewhere(self, _model: str, _now: float) -> bool:
        """Whether somebody in another process waits for this model."""
        return False

    def yields(self, _share: Share, _slack: float) -> bool:
        """Whether a share that waits elsewhere for the same model has had less, by more than `slack`."""
        return False


class _Theirs(NamedTuple):
    finish: float
    weight: float
    waits: bool


class SharedAccounts(Accounts):
    """Of one process among several."""

    shared = True

    def __init__(self, table: LoadTable) -> None:
        """table: of their accounts; of a share it holds its finish, and twice its weight with a one if it waits."""
        super().__init__()
        self._table = table
        self._theirs: dict[int, _Theirs] = {}
        """By `_name_of` a share."""
        self._looked_s = float("-inf")
        self._now = 0.0
        self._weights: dict[Share, float] = {}
        """Of the requests that wait here."""

    def clear(self) -> None:
        if any(each.waits for each in self._theirs.values()):
            return
        self.virtual = max([self.virtual, *self.finish.values(), *(each.finish for each in self._theirs.values())])
        for share in self.finish:
            self._table.forget(_name_of(share))
        self.finish.clear()

    def enter(self, share: Share, weight: float) -> None:
        self._weights[share] = weight
        theirs = self._theirs.get(_name_of(share))
        since = 0.0 if theirs is not None and theirs.waits else self.virtual  # it keeps its claim while it waits
        self.finish[share] = max(since, self._finish_of(share))
        self._write(share)

    def leave(self, share: Share) -> None:
        weight = self._weights.pop(share)
        self._write(share, weight, waits=False)

    def pay(self, share: Share, due: float, tokens: int, waiting: float) -> None:
        here = {_name_of(each) for each in self._weights}
        beside = [each for name, each in self._theirs.items() if each.waits and name not in here]
        # Not the start of this share, which may be ahead of others by the slack: those who come would wait for it.
        least = min([*(self.finish[each] for each in self._weights), *(each.finish for each in beside)])
        self.finish[share] += due
        self.virtual = max(least, self.virtual + tokens / (waiting + sum(each.weight for each in beside)))
        self._write(share)
        self._tell_time()

    def tidy(self, waiting: Collection[Share]) -> None:
        before = [*self.finish]
        super().tidy(waiting)
        for share in before:
            if share not in self.finish:
                self._table.forget(_name_of(share))

    def look(self, now: float) -> None:
        self._looked_s = self._now = now
        found: dict[int, _Theirs] = {}
        for row in self._table.rows():
            clock = next((each for each in row if each[0] == _CLOCK), None)
            if clock is None:
                continue
            self.virtual = max(self.virtual, clock[1] / _UNIT)
            silent = now - clock[2] / 1000 > SILENT_S
            for name, finish, said in row:
                if name == _CLOCK or not said:
                    continue
                had = found.get(name, _Theirs(0.0, 0.0, waits=False))
                waits = had.waits or (bool(said & 1) and not silent)
                found[name] = _Theirs(max(had.finish, finish / _UNIT), (said >> 1) / _UNIT, waits)
        self._theirs = found
        for share in self._weights:
            self.finish[share] = self._finish_of(share)
        if self._weights:
            self._tell_time()

    def waits_elsewhere(self, model: str, now: float) -> bool:
        if now - self._looked_s > _LATEST_S:
            self.look(now)
        return any(True for _ in self._waiting_for(model))

    def yields(self, share: Share, slack: float) -> bool:
        own, here = self.finish[share], {_name_of(each) for each in self._weights}  # those are in order already
        return any(each.finish + slack < own for name, each in self._waiting_for(share[1]) if name not in here)

    def _waiting_for(self, model: str) -> Iterable[tuple[int, _Theirs]]:
        asked = _hash(model) >> 64 - _MODEL_BITS
        return (
            (name, each) for name, each in self._theirs.items() if each.waits and name >> 63 - _MODEL_BITS == asked
        )

    def _finish_of(self, share: Share) -> float:
        theirs = self._theirs.get(_name_of(share))
        return max(self.finish.get(share, 0.0), theirs.finish if theirs is not None else 0.0)

    def _write(self, share: Share, weight: float | None = None, *, waits: bool = True) -> None:
        weight = self._weights[share] if weight is None else weight
        said = 2 * max(1, int(weight * _UNIT)) + waits
        self._table.put(_name_of(share), int(self.finish[share] * _UNIT), said)

    def _tell_time(self) -> None:
        self._table.put(_CLOCK, int(self.virtual * _UNIT), int(self._now * 1000))


@functools.lru_cache(_MAX_NAMES)
def _name_of(share: Share) -> int:
    """63 bits; the first of them are the model's."""
    tenant, model = share
    own = _hash(f"{tenant}\0{model}") & (1 << 63 - _MODEL_BITS) - 1
    return _hash(model) >> 64 - _MODEL_BITS << 63 - _MODEL_BITS | own


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest())
