"""A leg of a request that is answered in one piece, while there is nothing to decide (`plain.py`): one step when it
leaves and one when its whole answer is there, for what `RunningLeg` does in many."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from .http_client import header_lines
from .http_connection import Listener
from .openai import read_answer
from .records import LegRecord
from .running_leg import MIN_PACE_TOKENS
from .steps import Leg

if TYPE_CHECKING:
    from .fleet import PlacementRequest
    from .http_client import Request
    from .http_connection import Connection, Headers, HttpError
    from .openai import Usage
    from .running_leg import RunningLeg
    from .shared import Shared
    from .worker import Worker


class Hears(Protocol):
    """The request that it belongs to."""

    shared: Shared
    transfer_id: str

    def said(self, leg: PlainLeg, headers: Headers, body: bytes, usage: Usage) -> None:
        """Its whole answer, which is well."""

    def unusual(self, leg: PlainLeg) -> RunningLeg:
        """Something else has happened to it: what goes on with it."""

    def broke(self, leg: PlainLeg, error: Exception) -> None:
        """Our own code failed at its answer."""


class PlainLeg(Listener):
    """One of the two legs. `RunningLeg` in short, for a worker that is not on trial and an answer in one piece."""

    __slots__ = (
        "_hears",
        "ahead",
        "answered_s",
        "breaker",
        "leg",
        "outlier",
        "request",
        "sent_s",
        "tokens",
        "url",
        "work",
        "worker",
    )

    def __init__(self, hears: Hears, leg: Leg, worker: Worker) -> None:
        self._hears, self.leg, self.worker = hears, leg, worker
        self.answered_s: float | None = None
        """Its whole answer has come."""
        self.request: Connection | Request | None = None
        """None when that has come."""

    def start(self, path: str, body: bytes, lines: bytes, request: PlacementRequest, tokens: int) -> None:
        """As of `RunningLeg`."""
        worker, shared = self.worker, self._hears.shared
        self.tokens = tokens
        self.sent_s = now = time.monotonic()
        self.work = work = shared.pools.sent(request, worker, tokens, now)
        self.ahead = work.load
        self.breaker, self.outlier = worker.breaker, worker.outlier  # of the life of the worker that gets the leg
        worker.legs.add(self)
        self.url = url = worker.url + path
        if worker.headers:
            lines += header_lines(worker.headers)
        self.request = shared.clients[self.leg].send("POST", url, self, body, lines)

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        hears, worker = self._hears, self.worker
        shared = hears.shared
        if 200 <= status < 300 and len(body) <= shared.max_body_nbytes:
            usage = read_answer(headers.content_type, body)
            if not isinstance(usage, str):
                self.answered_s = now = time.monotonic()
                self.request = None
                worker.legs.discard(self)
                pace = None
                if self.breaker.failures:
                    self.breaker.end(0, now, failed=False)
                if self.ahead >= MIN_PACE_TOKENS and self.leg is Leg.PREFILL:
                    pace = (now - self.sent_s) / self.ahead
                self.outlier.end(now, probe=False, failed=False, pace=pace)
                if worker.on_trial:
                    worker.judged()
                self.work.finished(self.tokens, now, served=True)
                if shared.queue.num:
                    shared.serve_queue()
                try:
                    hears.said(self, headers, body, usage)
                except Exception as error:  # noqa: BLE001 -- the connection serves other requests already
                    hears.broke(self, error)
                return
        hears.unusual(self).on_whole(status, headers, body)

    def record(self, zero_s: float) -> LegRecord:
        """As of `RunningLeg`."""
        answered_s, end = self.answered_s, "served"
        if answered_s is None:
            end = "let go"
        else:
            answered_s -= zero_s
        return LegRecord(
            self._hears.transfer_id,
            self.leg.value,
            self.worker.label,
            self.sent_s - zero_s,
            answered_s,
            answered_s,
            end,
        )

    # ---- what is unusual

    def on_head(self, status: int, headers: Headers) -> None:
        self._hears.unusual(self).on_head(status, headers)

    def on_data(self, data: bytes) -> None:
        self._hears.unusual(self).on_data(data)

    def on_end(self) -> None:
        self._hears.unusual(self).on_end()

    def on_lost(self, error: HttpError) -> None:
        self._hears.unusual(self).on_lost(error)

    def gone(self, reason: str) -> None:
        """Its worker is not there any more."""
        self._hears.unusual(self).gone(reason)
