"""What workers say of themselves at GET /pdlink/state, asked while somebody looks, and for the memory of the page."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..http_connection import HttpError
from ..upstream import Asking, ask
from ..worker import State
from .exposition import report_of
from .report import Rates, Report, grown

if TYPE_CHECKING:
    from ..shared import Shared
    from ..worker import Worker

_FRESH_S = 0.8
"""A report is not asked for again before."""
_TIMEOUT_S = 1.0
_ALL_S = 2.0
"""For the reports of all together."""
_MAX_AT_ONCE = 32
_MAX_NBYTES = 4 << 20
_MAX_SCRAPED = 64
"""The metrics of more workers, 100 KiB each, nobody reads every second."""
_RATE_S = 12.0
"""Reports so old are the begin of rates; while nobody looks they come every ten seconds."""
_MOVED = "transfer_bytes"
_ANSWERING = (State.OK, State.DRAINING, State.FAILED, State.WRONG_ROLE)


class _Counted(NamedTuple):
    """What rates need of a report."""

    totals: dict[str, dict[str, float]]
    sampled: float

    @classmethod
    def of(cls, report: Report) -> _Counted:
        return cls({_MOVED: report.totals.get(_MOVED, {})}, report.sampled)


class WorkerReports:
    """The newest report of each worker."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._asked_s = 0.0
        self.at_s = 0.0
        """Unix time of the newest reports: rates are differences between two of them."""
        self._lock = asyncio.Lock()
        self.newest: dict[str, Report] = {}
        """By URL, what was asked for last; late ones are left out."""
        self._past: deque[tuple[float, dict[str, _Counted]]] = deque()
        """What rates are of, with the monotonic time at which it came, oldest first. Whole reports name transfers one
        by one, and a thousand workers send one every second."""

    async def now(self) -> dict[str, Report]:
        """Reports by URL, at most `_FRESH_S` old; late ones are left out."""
        async with self._lock:  # two people who look cost the workers as much as one
            if time.monotonic() - self._asked_s >= _FRESH_S:
                slots = asyncio.Semaphore(_MAX_AT_ONCE)
                # Others would only be waited for.
                workers = {worker.url: worker for worker in self._shared.pools.all if worker.state in _ANSWERING}
                if self._shared.dialect.metrics and len(workers) > _MAX_SCRAPED:
                    workers = {}
                asked = {url: asyncio.create_task(self._ask(worker, slots)) for url, worker in workers.items()}
                if asked:
                    await asyncio.wait(asked.values(), timeout=_ALL_S)
                answers = {url: task.result() if task.done() else None for url, task in asked.items()}
                for task in asked.values():
                    task.cancel()
                self.newest = {url: answer for url, answer in answers.items() if answer is not None}
                self._asked_s, self.at_s = time.monotonic(), time.time()
                self._past.append((self._asked_s, {url: _Counted.of(each) for url, each in self.newest.items()}))
                while self._asked_s - self._past[0][0] > _RATE_S:
                    self._past.popleft()
            return self.newest

    @property
    def rates(self) -> Rates | None:
        """None before two reports."""
        if len(self._past) < 2:
            return None
        (began_s, before), (ended_s, now) = self._past[0], self._past[-1]
        took_s, sampled = ended_s - began_s, 0.0
        nbytes: Counter[str] = Counter()
        for url, new in now.items():
            if (old := before.get(url)) is not None:
                nbytes.update(grown(new.totals, old.totals, _MOVED))
                sampled += new.sampled - old.sampled if new.sampled >= old.sampled else new.sampled
        return Rates({lane: moved / took_s for lane, moved in nbytes.items() if moved}, sampled / took_s)

    async def _ask(self, worker: Worker, slots: asyncio.Semaphore) -> Report | None:
        asking = Asking(self._shared.control, worker.url, _TIMEOUT_S)
        prefix = self._shared.dialect.metrics
        try:
            async with slots:
                reply = await ask(asking, "/metrics" if prefix else "/pdlink/state", _MAX_NBYTES)
            if reply.status != 200:
                return None
            if prefix:
                return report_of(reply.body.decode(), prefix, worker.name)
            return msgspec.json.decode(reply.body, type=Report)
        except (HttpError, OSError, ValueError, RecursionError, KeyError, OverflowError):
            return None
