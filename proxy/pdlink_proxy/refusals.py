"""Pairs of workers that cannot exchange KV: placing a request on them would compute its prompt twice.

A worker's health lists the peers it refused, or that refused it, with the factor that differs. Such a pair is
avoided. When the dialing worker reports that its next try is due, the pair gets one request, to find out whether the
cause is fixed. The answer is right either way.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .steps import Leg
from .upstream import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdlink.api.health import WorkerRefusal

    from .worker import Worker

log = logging.getLogger("pdlink.proxy")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Pause between two tries of a pair if no worker reports one; doubled by each try."""


@dataclass(slots=True)
class RefusedPair:
    """A prefill and a decode worker that do not fit together."""

    prefill: Worker
    decode: Worker
    factor: str
    local: str
    """From decode's view, if decode reported the pair; otherwise from prefill's."""
    remote: str
    until_s: float
    """time.monotonic of the next try."""
    pause_s: float = FIRST_PAUSE_S
    """After the next try, unless a worker reports one."""
    lives: tuple[str, str] | None = None
    """The lives of the two workers, if a request and not their health found the pair."""

    def describe(self) -> dict[str, Any]:
        """For GET /health."""
        return {
            "prefill": self.prefill.name,
            "decode": self.decode.name,
            "factor": self.factor,
            "local": self.local,
            "remote": self.remote,
        }

    def __str__(self) -> str:
        return f"{self.prefill.name} and {self.decode.name} do not fit together: {self.factor} differs"


class Refusals:
    """All refused pairs of one proxy."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], RefusedPair] = {}
        """By the ids of both workers. Each request asks whether there are some."""
        self._of: dict[Worker, dict[tuple[str, str], None]] = {}
        """Keys of a worker's pairs."""
        self._said: dict[Worker, tuple[object, ...]] = {}
        """What pairs follow from, of each worker's last health."""
        self._refusing: dict[Worker, None] = {}
        """Workers that refuse somebody."""

    def __iter__(self) -> Iterator[RefusedPair]:
        return iter(self.pairs.values())

    def __len__(self) -> int:
        return len(self.pairs)

    def heard(self, worker: Worker, others: Sequence[Worker]) -> None:
        """Take in the refusals in a worker's new health. others: the workers of the other side.

        All of them are looked at only when the worker refuses others than before.
        """
        looked_at: dict[Worker, None] = {}
        for key in self._of.get(worker, ()):
            pair = self.pairs[key]
            looked_at[pair.decode if pair.prefill is worker else pair.prefill] = None
        said = _said(worker)
        if self._said.get(worker) != said:
            self._said[worker] = said
            self._refusing.pop(worker, None)
            if worker.health is not None and worker.health.refused:
                self._refusing[worker] = None
                looked_at |= dict.fromkeys(others)
            else:
                looked_at |= {other: None for other in self._refusing if other.side is not worker.side}
        for other in looked_at:
            self._compare(worker, other)

    def _compare(self, worker: Worker, other: Worker) -> None:
        prefill, decode = (worker, other) if worker.side is Leg.PREFILL else (other, worker)
        known = self.pairs.get(_key(prefill, decode))
        found = _found(prefill, decode)
        if found is not None:
            now = time.monotonic()
            factor, local, remote = map(printable, (found.factor, found.local, found.remote))
            pair = RefusedPair(
                prefill, decode, factor=factor, local=local, remote=remote, until_s=now + FIRST_PAUSE_S
            )
            if found.retry_s > 0:
                pair.until_s = now + min(found.retry_s, LONGEST_PAUSE_S)
            elif known is not None:
                pair.until_s, pair.pause_s = known.until_s, known.pause_s
            self._add(pair)
            if known is None or known.factor != pair.factor:
                _tell(pair)
        elif known is not None and known.lives != (prefill.key, decode.key):
            self._forget(known)

    def note(self, prefill: Worker, decode: Worker, factor: str) -> None:
        """A request found that decode refuses this prefill worker."""
        known = self.pairs.get(_key(prefill, decode))
        if known is None:
            until_s = time.monotonic() + FIRST_PAUSE_S
            lives = (prefill.key, decode.key)
            pair = RefusedPair(prefill, decode, factor=factor, local="", remote="", until_s=until_s, lives=lives)
            self._add(pair)
            _tell(pair)

    def fits(self, prefill: Worker, decode: Worker) -> None:
        """A request of this pair was answered: forget a refusal that an earlier request found."""
        known = self.pairs.get(_key(prefill, decode))
        if known is not None and known.lives is not None:
            self._forget(known)

    def forget(self, worker: Worker) -> None:
        """This proxy does not use the worker any more."""
        for key in list(self._of.get(worker, ())):
            self._remove(self.pairs[key])
        self._said.pop(worker, None)
        self._refusing.pop(worker, None)

    def _add(self, pair: RefusedPair) -> None:
        key = _key(pair.prefill, pair.decode)
        self.pairs[key] = pair
        for worker in (pair.prefill, pair.decode):
            self._of.setdefault(worker, {})[key] = None

    def _remove(self, pair: RefusedPair) -> None:
        key = _key(pair.prefill, pair.decode)
        del self.pairs[key]
        for worker in (pair.prefill, pair.decode):
            of_worker = self._of[worker]
            del of_worker[key]
            if not of_worker:
                del self._of[worker]

    def _forget(self, pair: RefusedPair) -> None:
        self._remove(pair)
        log.warning("%s and %s no longer refuse each other", pair.prefill.name, pair.decode.name)

    def known(self, prefill: Worker, decode: Worker) -> RefusedPair | None:
        """The refusal of this pair, if any."""
        return self.pairs.get(_key(prefill, decode))

    def now(self) -> frozenset[tuple[str, str]]:
        """Keys of the pairs to be avoided now."""
        now = time.monotonic()
        return frozenset((pair.prefill.key, pair.decode.key) for pair in self if now < pair.until_s)

    def try_again(self, prefill: Worker, decode: Worker) -> bool:
        """The pair gets a request. True if it is refused: no other request follows until the pause is over."""
        pair = self.pairs.get(_key(prefill, decode))
        if pair is None:
            return False
        pair.until_s = time.monotonic() + pair.pause_s
        pair.pause_s = min(2 * pair.pause_s, LONGEST_PAUSE_S)
        return True


def _key(prefill: Worker, decode: Worker) -> tuple[str, str]:
    return prefill.id, decode.id


def _said(worker: Worker) -> tuple[object, ...]:
    """All of a worker that `_found` looks at, and its life; not `retry_s`, which runs down."""
    said = worker.health
    if said is None:
        return ()
    refused = tuple((each.peer, each.address, each.factor, each.local, each.remote) for each in said.refused)
    return said.epoch, said.name, worker.addresses, refused


def _tell(pair: RefusedPair) -> None:
    values = f": {pair.local!r} and {pair.remote!r}" if pair.local or pair.remote else ""
    log.warning("%s%s; requests avoid this pair, and decode recomputes where there is no other", pair, values)


def _found(prefill: Worker, decode: Worker) -> WorkerRefusal | None:
    """Decode's refusal of prefill, which it dials, or else prefill's refusal of decode."""
    for asked, about in ((decode, prefill), (prefill, decode)):
        if asked.health is None or about.health is None:
            continue
        for refused in asked.health.refused:
            # Without the key, which follows the address.
            dialed = refused.address.partition("?")[0]
            if refused.peer == about.health.name or (dialed and dialed in about.addresses):
                return refused
    return None
