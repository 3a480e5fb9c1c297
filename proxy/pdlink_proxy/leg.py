"""One leg of a request at its worker: its connection, what its answer says, and what it counts for."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from pdlink.logs import about

from .http_client import header_lines
from .http_connection import AnswerListener, WorkerGone
from .records import LegRecord
from .steps import Leg
from .upstream import describe, loss_of

if TYPE_CHECKING:
    from .alarms import Alarms
    from .http_client import HttpClient, HttpRequest
    from .http_connection import Connection, Headers, HttpError
    from .leg_account import LegAccount
    from .steps import Loss
    from .worker import Worker

LET_GO_S = 1.0
"""A leg that is not needed any more may take this long to end by itself; then its connection is closed."""

MIN_PACE_NBYTES = 2048
"""Of a stream for its pace to count."""

log = logging.getLogger("pdlink.proxy")


class Hears(Protocol):
    """The request that a leg belongs to. It ends the leg when it hears of an end."""

    def began(self, leg: WorkerLeg, headers: Headers) -> None:
        """Its event stream begins."""

    def sent(self, leg: WorkerLeg, data: bytes) -> None:
        """Bytes of its event stream."""

    def ended(self, leg: WorkerLeg) -> None:
        """Its event stream ended properly."""

    def answered(self, leg: WorkerLeg, status: int, headers: Headers, body: bytes) -> None:
        """Its whole answer: to a request that does not stream, or with a status that is not 2xx."""

    def lost(self, leg: WorkerLeg, loss: Loss, detail: str) -> None:
        """It ended without an answer."""

    def broke(self, leg: WorkerLeg, error: Exception) -> None:
        """It is cancelled, because one of these calls raised."""


class WorkerLeg(AnswerListener):
    """Listens to one answer. Once it has ended it tells no more."""

    url = ""
    fate = ""
    """How it ended, for people."""
    answered_s: float | None = None
    """When its stream began, or its whole answer was there."""
    ended_s: float | None = None
    span_id = ""
    """Of its span, if the request is traced."""
    connection: Connection | HttpRequest | None = None
    """Until the end of the answer."""
    nbytes = 0
    """Of its stream, so far."""
    _paused = False
    """Its client has kept it waiting."""
    _let_go = False

    def __init__(
        self,
        request: Hears,
        attempt: int,
        leg: Leg,
        worker: Worker,
        transfer_id: str,
        account: LegAccount,
        alarms: Alarms,
        *,
        max_nbytes: int,
        streams: bool,
    ) -> None:
        """max_nbytes: of an answer in one piece. streams: its answer is a stream of events, if its status is 2xx."""
        self._hears: Hears | None = request
        """None once it has ended: or both would wait for the collector."""
        self.attempt, self.leg, self.worker, self.transfer_id = attempt, leg, worker, transfer_id
        self.account, self._alarms = account, alarms
        self._max_nbytes, self._streams = max_nbytes, streams
        self.most_nbytes = 0 if streams else max_nbytes

    def start(self, client: HttpClient, path: str, body: bytes, lines: bytes) -> None:
        """lines: headers."""
        worker = self.worker
        worker.legs.add(self)
        self.url = url = worker.url + path
        if worker.headers:
            lines += header_lines(worker.headers)
        self.connection = client.send("POST", url, self, body, lines)

    def end(self, *, well: bool | None) -> None:
        """It is over, unless it was before. well: as of `LegAccount.end`."""
        if self._hears is None:
            return
        self._hears = None
        self.ended_s = now_s = time.monotonic()
        if not self.fate:
            self.fate = "served" if well else "cancelled"
        self.worker.legs.discard(self)
        if not self.account.ended:
            # Given up, a stream of decode says nothing of its pace: it may have waited for prefill.
            pace = None
            if self.leg is Leg.PREFILL:
                pace = self.account.pace(now_s)
            elif well and self._streams:
                pace = self._pace(now_s)
            self.account.end(now_s, well=well, pace=pace)
        if self._let_go:
            self._alarms.clear(self.cancel)

    def cancel(self) -> None:
        """Close its connection; the worker aborts."""
        if self._hears is not None:
            self._leave()
            self.end(well=None)

    def gone(self, reason: str) -> None:
        """Its worker is not there any more, and its connection says nothing of it: the same as if that had broken."""
        if self._hears is not None:
            self._leave()
            self.on_lost(WorkerGone(ConnectionError(reason), reused=False, answered=self.answered_s is not None))

    def let_go(self) -> None:
        """It is not needed any more: close its connection unless it ends by itself in a moment."""
        self.fate = self.fate or ("served" if self.leg is Leg.DECODE else "let go")  # decode's answer was whole
        self._let_go = True
        self._alarms.after(self.cancel, LET_GO_S)

    def pause(self) -> None:
        """Hold the worker back: its bytes are not read."""
        self._paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    def record(self, zero_s: float) -> LegRecord:
        """What is known of it now. zero_s: its request's arrival."""
        return LegRecord(
            transfer_id=self.transfer_id,
            leg=self.leg.value,
            worker=self.worker.label,
            sent_s=self.account.sent_s - zero_s,
            answered_s=None if self.answered_s is None else self.answered_s - zero_s,
            ended_s=None if self.ended_s is None else self.ended_s - zero_s,
            end=self.fate,
            span_id=self.span_id,
        )

    def _pace(self, now_s: float) -> float | None:
        """Seconds for a unit of its work, which is a byte of a stream; of a prompt see `LegAccount.pace`. None where
        it says nothing about the worker."""
        if self._paused or self.nbytes < MIN_PACE_NBYTES or self.answered_s is None:
            return None
        return (now_s - self.answered_s) / self.nbytes

    def _leave(self) -> None:
        if self.connection is not None:
            self.connection.leave()
            self.connection = None

    def _broke(self, error: Exception) -> None:
        words = "transfer %s: its request failed unexpectedly"
        log.error(words, self.transfer_id, exc_info=error, extra=about(transfer_id=self.transfer_id))
        hears = self._hears
        self.cancel()
        if hears is not None:
            hears.broke(self, error)

    # ---- the connection's, which serves other requests later, whatever is raised here

    def on_head(self, status: int, headers: Headers) -> None:
        self.answered_s = time.monotonic()
        if not 200 <= status < 300:
            self.most_nbytes = self._max_nbytes
            return
        try:
            if self._hears is not None:
                self._hears.began(self, headers)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_data(self, data: bytes) -> None:
        self.nbytes += len(data)
        try:
            if self._hears is not None:
                self._hears.sent(self, data)
            if self.leg is Leg.PREFILL and not self.account.ended:  # it has nothing to do after its first token
                now_s = time.monotonic()
                self.account.end(now_s, well=True, pace=self.account.pace(now_s))
                self.fate = self.fate or "served"
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_end(self) -> None:
        self.connection = None
        try:
            if self._hears is not None:
                self._hears.ended(self)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.connection = None
        if self.answered_s is None:
            self.answered_s = time.monotonic()
        try:
            if self._hears is not None:
                self._hears.answered(self, status, headers, body)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_lost(self, error: HttpError) -> None:
        self.connection = None
        try:
            if self._hears is not None:
                self._hears.lost(self, loss_of(error), f"{self.url}: {describe(error)}")
        except Exception as problem:  # noqa: BLE001
            self._broke(problem)
