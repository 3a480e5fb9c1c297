"""One leg of a request at its worker: its connection, and what it says."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from pdlink.logs import about

from .http_client import header_lines
from .http_connection import Disconnected, Headers, Listener
from .records import LegRecord
from .steps import Answered, Ended, Event, Leg, Lost
from .upstream import describe, loss_of, too_long

if TYPE_CHECKING:
    from .alarms import Alarms
    from .http_client import HttpClient, Request
    from .http_connection import Connection, HttpError
    from .leg_account import LegAccount
    from .worker import Worker

_NO_HEADERS = Headers([])

LET_GO_S = 1.0
"""A leg that is not needed any more may take this long to end by itself; then its connection is closed."""

MIN_PACE_NBYTES = 2048
"""Of a stream for its pace to count."""

log = logging.getLogger("pdlink.proxy")


class Hears(Protocol):
    """The request that a leg belongs to."""

    def began(self, leg: RunningLeg, headers: Headers) -> None:
        """A 2xx answer begins."""

    def sent(self, leg: RunningLeg, data: bytes) -> None:
        """Bytes of its event stream."""

    def passed(self, leg: RunningLeg, data: bytes) -> None:
        """Events of its stream that the client was sent natively."""

    def returned(self, leg: RunningLeg, unsent: bytes, unread: bytes) -> None:
        """Its stream, which was lent, has come back: see `Relays`."""

    def says(self, leg: RunningLeg, event: Event) -> None:
        """Its end, whatever it is."""

    def broke(self, leg: RunningLeg, error: Exception) -> None:
        """It is cancelled, because one of these calls raised."""


class _Nobody:
    """Hears of a leg that has ended. So the leg does not hold its request, which holds the leg: the collector would
    have to find them."""

    def began(self, _leg: RunningLeg, _headers: Headers) -> None:
        pass

    def sent(self, _leg: RunningLeg, _data: bytes) -> None:
        pass

    def passed(self, _leg: RunningLeg, _data: bytes) -> None:
        pass

    def returned(self, _leg: RunningLeg, _unsent: bytes, _unread: bytes) -> None:
        pass

    def says(self, _leg: RunningLeg, _event: Event) -> None:
        pass

    def broke(self, _leg: RunningLeg, _error: Exception) -> None:
        pass


NOBODY = _Nobody()


class _Ended:
    """The request of a leg that has been answered: its connection serves others."""

    def leave(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def lend(self) -> int | None:
        return None

    def give_back(self, _unread: bytes) -> None:
        pass


_ENDED = _Ended()


class RunningLeg(Listener):
    """Listens to one answer. Once it is over, or `cancel` was called, it tells no more."""

    url = ""
    headers = _NO_HEADERS
    """Of its answer."""
    fate = ""
    """How it ended, for people."""
    answered_s: float | None = None
    """When its answer began."""
    ended_s: float | None = None
    span_id = ""
    """Of its span, if the request is traced."""
    _status = 0
    _parts: list[bytes] | None = None
    _nbytes = 0
    _paused = False
    """Its client has kept it waiting."""
    _over = False
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
        self._hears: Hears = request
        self.attempt, self.leg, self.worker, self.transfer_id = attempt, leg, worker, transfer_id
        self.account, self._alarms = account, alarms
        self._max_nbytes, self._streams = max_nbytes, streams
        self._request: Connection | Request | _Ended = _ENDED

    def take_over(self, url: str, answered_s: float | None, request: Connection | Request | None) -> None:
        """It has left before this listens to it. answered_s, request: of its whole answer, or None and its
        connection."""
        self.url = url
        self.answered_s = self.ended_s = answered_s
        if request is None:
            self._over = True
            self.fate, self._hears = "served", NOBODY
        else:
            self.worker.legs.add(self)
            request.pass_to(self)
            self._request = request

    def start(self, client: HttpClient, path: str, body: bytes, lines: bytes) -> None:
        """lines: headers."""
        worker = self.worker
        worker.legs.add(self)
        self.url = url = worker.url + path
        if worker.headers:
            lines += header_lines(worker.headers)
        self._request = client.send("POST", url, self, body, lines)

    def cancel(self) -> None:
        """Close its connection; the worker aborts."""
        if not self._over:
            self._request.leave()
            self._end(well=None)

    def gone(self, reason: str) -> None:
        """Its worker is not there any more, and its connection says nothing of it: the same as if that had broken."""
        if not self._over:
            self._request.leave()
            self.on_lost(Disconnected(ConnectionError(reason), reused=False, answered=self.answered_s is not None))

    def let_go(self) -> None:
        """It is not needed any more: close its connection unless it ends by itself in a moment."""
        self.fate = self.fate or ("served" if self.leg is Leg.DECODE else "let go")  # decode's answer was whole
        self._let_go = True
        self._alarms.after(self.cancel, LET_GO_S)

    def pause(self) -> None:
        """Hold the worker back: its bytes are not read."""
        self._paused = True
        self._request.pause()

    def resume(self) -> None:
        self._request.resume()

    def lend(self) -> int | None:
        """Of its stream, see `Connection.lend`."""
        return self._request.lend()

    def give_back(self, unread: bytes) -> None:
        self._request.give_back(unread)

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

    def _pace(self, now: float) -> float | None:
        """Seconds for a unit of its work: a token to compute, its queue included; of a stream of decode, a byte. None
        where it says nothing about the worker."""
        if self.leg is Leg.PREFILL:
            return self.account.pace(now)
        if not self._streams or self._paused or self._nbytes < MIN_PACE_NBYTES or self.answered_s is None:
            return None
        return (now - self.answered_s) / self._nbytes

    def _end(self, *, well: bool | None) -> None:
        """It is over. well: as of `LegAccount.end`."""
        self._over = True
        self.ended_s = now = time.monotonic()
        if not self.fate:
            self.fate = "served" if well else "cancelled"
        self.worker.legs.discard(self)
        if not self.account.ended:
            # Given up, a stream of decode says nothing of its pace: it may have waited for prefill.
            pace = self._pace(now) if (well and self._streams) or self.leg is Leg.PREFILL else None
            self.account.end(now, well=well, pace=pace)
        if self._let_go:
            self._alarms.clear(self.cancel)
        self._hears = NOBODY

    def _finish(self, event: Event, *, well: bool | None) -> None:
        """The worker's last word. The request ends the account of a leg that failed, before it places another one."""
        if not self._over:
            self._hears.says(self, event)
        if not self._over:
            self._end(well=well)

    def _broke(self, error: Exception) -> None:
        words = "transfer %s: its request failed unexpectedly"
        log.error(words, self.transfer_id, exc_info=error, extra=about(transfer_id=self.transfer_id))
        hears = self._hears
        self.cancel()
        hears.broke(self, error)

    # ---- the connection's

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self.headers = status, headers
        self.answered_s = time.monotonic()
        if not 200 <= status < 300:
            self._streams = False
            return
        try:
            self._hears.began(self, headers)
        except Exception as error:  # noqa: BLE001 -- the connection serves other requests later
            self._broke(error)

    def on_data(self, data: bytes) -> None:
        if self._streams:
            self._nbytes += len(data)
            try:
                self._hears.sent(self, data)
                if self.leg is Leg.PREFILL and not self.account.ended:  # it has nothing to do after its first token
                    now = time.monotonic()
                    self.account.end(now, well=True, pace=self._pace(now))
                    self.fate = self.fate or "served"
            except Exception as error:  # noqa: BLE001
                self._broke(error)
            return
        if self._parts is None:
            self._parts = []
        self._parts.append(data)
        self._nbytes += len(data)
        if self._nbytes > self._max_nbytes:
            self._request.leave()
            self.on_lost(too_long(self._max_nbytes))

    def on_passed(self, data: bytes) -> None:
        """The relay's."""
        self._nbytes += len(data)
        try:
            self._hears.passed(self, data)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_returned(self, unsent: bytes, unread: bytes) -> None:
        """The relay's."""
        try:
            self._hears.returned(self, unsent, unread)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_end(self) -> None:
        self._request = _ENDED
        try:
            if self._streams:
                self._finish(Ended(self.attempt, self.leg), well=True)
            else:
                self._answered(b"".join(self._parts or ()))
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        if self._streams or len(body) > self._max_nbytes:
            super().on_whole(status, headers, body)
            return
        self._request = _ENDED
        self._status, self.headers, self._nbytes = status, headers, len(body)
        self.answered_s = time.monotonic()
        try:
            if status < 300:
                self._hears.began(self, headers)
            self._answered(body)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def _answered(self, body: bytes) -> None:
        answered = Answered(self.attempt, self.leg, self._status, body, self.headers.content_type)
        self._finish(answered, well=True if self._status < 300 else None)

    def on_lost(self, error: HttpError) -> None:
        self._request = _ENDED
        try:
            lost = Lost(self.attempt, self.leg, loss_of(error), f"{self.url}: {describe(error)}")
            self._finish(lost, well=None)
        except Exception as problem:  # noqa: BLE001
            self._broke(problem)
