"""One leg of a request at its worker: its connection, and what it counts for there (load, breaker, connections)."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from pdlink.logs import about

from .http_client import header_lines
from .http_connection import Disconnected, Headers, Listener
from .records import LegRecord
from .steps import Answered, Ended, Event, Leg, Lost
from .upstream import describe, loss_of, tell_to_stop, too_long

if TYPE_CHECKING:
    from .fleet import PlacementRequest
    from .http_client import Request
    from .http_connection import Connection, HttpError
    from .plain_leg import PlainLeg
    from .shared import Shared
    from .worker import Worker

_NO_HEADERS = Headers([])

LET_GO_S = 1.0
"""A leg that is not needed any more may take this long to end by itself; then its connection is closed."""

MIN_PACE_TOKENS = 512
"""To compute for the pace of a leg to count: shorter ones measure the connection."""
MIN_PACE_NBYTES = 2048
"""The same of a stream."""

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
    failed = False
    """By its worker's own fault."""
    fate = ""
    """How it ended, for people."""
    sent_s = 0.0
    answered_s: float | None = None
    """When its answer began."""
    ended_s: float | None = None
    span_id = ""
    """Of its span, if the request is traced."""
    _status = 0
    _parts: list[bytes] | None = None
    _nbytes = 0
    _began_s = 0.0
    """When it left; of a stream of decode, when its answer began."""
    _paused = False
    """Its client has kept it waiting."""
    _done = False
    """Its worker has nothing to do for it any more."""
    _over = False
    _counted = False
    """Its breaker and its outlier have heard how it went."""
    _let_go = False
    _call = 0
    """Its breaker's number of it, while the worker is on trial."""
    _probe = False
    """It finds out whether an outlier is well again."""

    def __init__(
        self,
        shared: Shared,
        request: Hears,
        attempt: int,
        leg: Leg,
        worker: Worker,
        transfer_id: str,
        *,
        streams: bool,
    ) -> None:
        """streams: its answer is a stream of events, if its status is 2xx."""
        self._shared = shared
        self._hears: Hears = request
        self.attempt, self.leg, self.worker, self.transfer_id = attempt, leg, worker, transfer_id
        self._streams = streams
        self._request: Connection | Request | _Ended = _ENDED

    @classmethod
    def grown(cls, leg: PlainLeg, shared: Shared, request: Hears, transfer_id: str) -> RunningLeg:
        """Of a request's first attempt, from where it is."""
        self = cls(shared, request, 1, leg.leg, leg.worker, transfer_id, streams=False)
        self.url, self._num_tokens, self._ahead, self._work = leg.url, leg.tokens, leg.ahead, leg.work
        self._began_s = self.sent_s = leg.sent_s
        self._breaker, self._outlier = leg.breaker, leg.outlier
        self.answered_s = self.ended_s = leg.answered_s
        if leg.request is None:
            self._done = self._counted = self._over = True
            self.fate, self._hears = "served", NOBODY
        else:
            leg.worker.legs.discard(leg)
            leg.worker.legs.add(self)
            leg.request.pass_to(self)
            self._request, leg.request = leg.request, None
        return self

    def start(self, path: str, body: bytes, lines: bytes, request: PlacementRequest, tokens: int) -> None:
        """lines: headers. tokens: that the worker has to do for it."""
        worker, shared = self.worker, self._shared
        self._num_tokens = tokens
        self._began_s = self.sent_s = now = time.monotonic()
        self._work = work = shared.pools.sent(request, worker, tokens, now)
        self._ahead = work.load
        self._breaker, self._outlier = worker.breaker, worker.outlier  # of the life of the worker that gets the leg
        if worker.on_trial:  # else no leg finds anything out
            self._call = self._breaker.begin(now)
            self._probe = self._outlier.begin()
        worker.legs.add(self)
        self.url = url = worker.url + path
        if worker.headers:
            lines += header_lines(worker.headers)
        self._request = shared.clients[self.leg].send("POST", url, self, body, lines)

    def cancel(self) -> None:
        """Close its connection; the worker aborts."""
        if not self._over:
            self._request.leave()
            self._end()

    def gone(self, reason: str) -> None:
        """Its worker is not there any more, and its connection says nothing of it: the same as if that had broken."""
        if not self._over:
            self._request.leave()
            self.on_lost(Disconnected(ConnectionError(reason), reused=False, answered=self.answered_s is not None))

    def let_go(self) -> None:
        """It is not needed any more: close its connection unless it ends by itself in a moment."""
        self.fate = self.fate or ("served" if self.leg is Leg.DECODE else "let go")  # decode's answer was whole
        self._let_go = True
        self._shared.alarms.set(self.cancel, self._shared.loop.time() + LET_GO_S)

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

    def blame(self) -> None:
        """The worker is at fault for what came of it."""
        if self.failed:
            return
        now = time.monotonic()
        self.failed = True
        self._breaker.end(self._call, now, failed=True)
        self._outlier.end(now, probe=self._probe and not self._counted, failed=True)
        self._counted = True
        self.worker.judged()

    def served(self, *, well: bool) -> None:
        """The worker has nothing to do for it any more."""
        if self._done:
            return
        self._done = True
        now = time.monotonic()
        if well:
            self._breaker.end(self._call, now, failed=False)
            says = self._streams or self._ahead >= MIN_PACE_TOKENS
            self._outlier.end(now, probe=self._probe, failed=False, pace=self._pace(now) if says else None)
            self._counted = True
            if not self.fate:
                self.fate = "served"
            if self.worker.on_trial:  # nothing else can change
                self.worker.judged()
        self._work.finished(self._num_tokens, now, served=well)
        shared = self._shared
        if shared.queue.num:
            shared.serve_queue()

    def record(self, zero_s: float) -> LegRecord:
        """What is known of it now. zero_s: its request's arrival."""
        return LegRecord(
            self.transfer_id,
            self.leg.value,
            self.worker.label,
            self.sent_s - zero_s,
            None if self.answered_s is None else self.answered_s - zero_s,
            None if self.ended_s is None else self.ended_s - zero_s,
            self.fate,
            self.span_id,
        )

    def _pace(self, now: float) -> float | None:
        """Seconds for a unit of its work: a token to compute, its queue included; of a stream of decode, a byte. None
        where it says nothing about the worker."""
        if self.leg is Leg.PREFILL:
            return (now - self._began_s) / self._ahead if self._ahead >= MIN_PACE_TOKENS else None
        if not self._streams or self._paused or self._nbytes < MIN_PACE_NBYTES:
            return None
        return (now - self._began_s) / self._nbytes

    async def tell_to_stop(self, reason: str) -> bool:
        """Tell its worker that the other leg failed. Whether the worker accepted; if not, its own deadline ends the
        transfer."""
        timeout_s = self._shared.config.connect_timeout_s
        return await tell_to_stop(
            self._shared.control, self.worker.url, self.transfer_id, reason, timeout_s=timeout_s
        )

    def _end(self) -> None:
        self._over = True
        self.ended_s = time.monotonic()
        self.fate = self.fate or "cancelled"
        self.worker.legs.discard(self)
        if not self._done:
            self.served(well=False)
        if not self._counted:
            self._breaker.drop(self._call)
            now = time.monotonic()
            late = self._pace(now) if self.leg is Leg.PREFILL else None
            self._outlier.drop(now, probe=self._probe, at_least=late)
            if self.worker.on_trial:
                self.worker.judged()
        if self._let_go:
            self._shared.alarms.clear(self.cancel)
        self._hears = NOBODY

    def _finish(self, event: Event, *, well: bool) -> None:
        """The worker's last word."""
        if self._over:
            return
        if not well:
            self.served(well=False)  # before another attempt is placed
        self._hears.says(self, event)
        self._close(well=not self.failed)

    def _close(self, *, well: bool) -> None:
        if not self._over:
            self.served(well=well)
            self._end()

    def _end_well(self, now: float) -> None:
        """`served` and `_end` at once, as they are of most legs."""
        worker, shared, breaker = self.worker, self._shared, self._breaker
        self._done = self._counted = self._over = True
        self.ended_s = now
        if not self.fate:
            self.fate = "served"
        worker.legs.discard(self)
        if breaker.failures or self._call:
            breaker.end(self._call, now, failed=False)
        pace = self._pace(now) if self._streams or self._ahead >= MIN_PACE_TOKENS else None
        self._outlier.end(now, probe=self._probe, failed=False, pace=pace)
        if worker.on_trial:  # nothing else can change
            worker.judged()
        self._work.finished(self._num_tokens, now, served=True)
        if shared.queue.num:
            shared.serve_queue()
        if self._let_go:
            shared.alarms.clear(self.cancel)
        self._hears = NOBODY

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
        if self.leg is Leg.DECODE:
            self._began_s = self.answered_s
        try:
            self._hears.began(self, headers)
        except Exception as error:  # noqa: BLE001 -- the connection serves other requests later
            self._broke(error)

    def on_data(self, data: bytes) -> None:
        if self._streams:
            self._nbytes += len(data)
            try:
                self._hears.sent(self, data)
                if self.leg is Leg.PREFILL:  # it has nothing to do after its first token
                    self.served(well=not self.failed)
            except Exception as error:  # noqa: BLE001
                self._broke(error)
            return
        if self._parts is None:
            self._parts = []
        self._parts.append(data)
        self._nbytes += len(data)
        most = self._shared.max_body_nbytes
        if self._nbytes > most:
            self._request.leave()
            self.on_lost(too_long(most))

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
        shared = self._shared
        if self._streams or len(body) > shared.max_body_nbytes:
            super().on_whole(status, headers, body)
            return
        self._request = _ENDED
        self._status, self.headers, self._nbytes = status, headers, len(body)
        self.answered_s = now = time.monotonic()
        try:
            if status >= 300:
                self._answered(body)
                return
            if self.leg is Leg.DECODE:
                self._began_s = now
                self._hears.began(self, headers)
            self._hears.says(self, Answered(self.attempt, self.leg, status, body, headers.content_type))
            if self._done or self.failed or self._over:
                self._close(well=not self.failed)
            else:
                self._end_well(now)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def _answered(self, body: bytes) -> None:
        answered = Answered(self.attempt, self.leg, self._status, body, self.headers.content_type)
        self._finish(answered, well=self._status < 300)

    def on_lost(self, error: HttpError) -> None:
        self._request = _ENDED
        try:
            lost = Lost(self.attempt, self.leg, loss_of(error), f"{self.url}: {describe(error)}")
            self._finish(lost, well=False)
        except Exception as problem:  # noqa: BLE001
            self._broke(problem)
