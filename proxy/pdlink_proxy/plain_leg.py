"""A leg of a request that is answered in one piece, while there is nothing to decide (`plain.py`): one step when it
leaves and one when its whole answer is there, for what `RunningLeg` does in many."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from pdlink.api.openai import read_answer

from .http_client import header_lines
from .http_connection import Listener
from .records import LegRecord
from .running_leg import RunningLeg
from .steps import Leg

if TYPE_CHECKING:
    from pdlink.api.openai import Usage

    from . import running_leg
    from .alarms import Alarms
    from .http_client import HttpClient, Request
    from .http_connection import Connection, Headers, HttpError
    from .leg_account import LegAccount
    from .worker import Worker


class Hears(Protocol):
    """The request that it belongs to."""

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
        "_max_nbytes",
        "account",
        "answered_s",
        "leg",
        "request",
        "url",
        "worker",
    )

    def __init__(self, hears: Hears, leg: Leg, worker: Worker, account: LegAccount, max_nbytes: int) -> None:
        """max_nbytes: of its answer."""
        self._hears, self.leg, self.worker, self.account, self._max_nbytes = hears, leg, worker, account, max_nbytes
        self.answered_s: float | None = None
        """Its whole answer has come."""
        self.request: Connection | Request | None = None
        """None when that has come."""

    def start(self, client: HttpClient, path: str, body: bytes, lines: bytes) -> None:
        """As of `RunningLeg`."""
        worker = self.worker
        worker.legs.add(self)
        self.url = url = worker.url + path
        if worker.headers:
            lines += header_lines(worker.headers)
        self.request = client.send("POST", url, self, body, lines)

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        hears = self._hears
        if 200 <= status < 300 and len(body) <= self._max_nbytes:
            usage = read_answer(headers.content_type, body)
            if not isinstance(usage, str):
                self.answered_s = now = time.monotonic()
                self.request = None
                self.worker.legs.discard(self)
                account = self.account
                account.end(now, well=True, pace=account.pace(now) if self.leg is Leg.PREFILL else None)
                try:
                    hears.said(self, headers, body, usage)
                except Exception as error:  # noqa: BLE001 -- the connection serves other requests already
                    hears.broke(self, error)
                return
        hears.unusual(self).on_whole(status, headers, body)

    def grown(self, hears: running_leg.Hears, transfer_id: str, alarms: Alarms) -> RunningLeg:
        """The same leg from where it is, as one to which anything can happen."""
        leg = RunningLeg(
            *(hears, 1, self.leg, self.worker, transfer_id, self.account, alarms),
            max_nbytes=self._max_nbytes,
            streams=False,
        )
        self.worker.legs.discard(self)
        leg.take_over(self.url, self.answered_s, self.request)
        self.request = None
        return leg

    def record(self, zero_s: float) -> LegRecord:
        """As of `RunningLeg`."""
        answered_s, end = self.answered_s, "served"
        if answered_s is None:
            end = "let go"
        else:
            answered_s -= zero_s
        return LegRecord(
            transfer_id=self._hears.transfer_id,
            leg=self.leg.value,
            worker=self.worker.label,
            sent_s=self.account.sent_s - zero_s,
            answered_s=answered_s,
            ended_s=answered_s,
            end=end,
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
