"""One leg of a request at its worker: its connection, what its answer says, and what it counts for there."""

from __future__ import annotations

import logging
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from pdlink.logs import about

from .http_connection import AnswerListener, WorkerGone
from .steps import DECODE, PREFILL, Leg
from .upstream import describe, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink._http import Headers

    from .alarms import Alarms
    from .http_client import HttpRequest
    from .http_connection import Connection, HttpError
    from .queue import Queue
    from .records import EndedLeg
    from .steps import Loss
    from .worker import Worker

LET_GO_S = 1.0
"""A leg that is not needed any more may take this long to end by itself; then its connection is closed."""

MIN_PACE_NBYTES = 2048
"""Of a stream for its pace to count."""
MIN_PACE_S = 0.1
"""That it must have taken: what came at once tells of the connection, and a worker whose streams are paced would be
slow beside it, however well it is."""

MIN_PACE_TOKENS = 512
"""To compute for the pace of a leg to count: shorter ones measure the connection."""

log = logging.getLogger("pdlink.proxy")


class Frees(Protocol):
    """Has requests that wait for workers."""

    queue: Queue

    def serve_queue(self) -> None:
        """A worker has less to do."""


class LegAccount:
    """What a leg counts for at its worker, from when it leaves until the worker has nothing more to do for it: its
    load, and how it went for the breaker and the outlier. `end` is the only end."""

    ended = False
    failed = False
    """By its worker's own fault."""
    _call = 0
    _probe = False

    def __init__(self, worker: Worker, tokens: int, now_s: float, frees: Frees) -> None:
        """tokens: that the worker has to do for it. now_s: time.monotonic."""
        self.worker, self._tokens, self._frees = worker, tokens, frees
        self._work = work = worker.work  # of the worker's present life, in which its tokens are counted
        self.sent_s = now_s
        self._ahead = work.sent(tokens, now_s)
        """Tokens that the worker has to do, with this leg's."""
        self._breaker, self._outlier = worker.breaker, worker.outlier  # of the life of the worker that gets the leg
        if worker.on_trial:  # else no leg finds anything out
            self._call = self._breaker.begin(now_s)
            self._probe = self._outlier.begin()

    def end(self, now_s: float, *, well: bool | None, pace: float | None = None) -> None:
        """The worker has nothing to do for it any more. well: None if the end says nothing of the worker, as of a leg
        that was given up. pace: seconds for a unit of its work, at least so many if it was given up; None if it says
        nothing of the worker.

        Of several calls the first counts. A failure that shows after it counts as one, too.
        """
        first = not self.ended
        if well and first:  # nearly every end
            if self._call or self._breaker.failures:
                self._breaker.end(self._call, now_s, failed=False)
            if self._probe:
                self._outlier.end(now_s, probe=True, failed=False, pace=pace)
        elif well is False:
            if self.failed:
                return
            self.failed = True
            self._breaker.end(self._call, now_s, failed=True)
            self._outlier.end(now_s, probe=self._probe and first, failed=True)
            self.worker.judged()
        elif not first:
            return
        else:
            self._breaker.drop(self._call)
            self._outlier.drop(now_s, probe=self._probe, at_least=pace)
        if self.worker.on_trial and well is not False:  # nothing else can change
            self.worker.judged()
        if first:
            self.ended = True
            if well and not self._probe:
                self._work.served(self._tokens, now_s, self._outlier, pace)
            else:
                self._work.finished(self._tokens, now_s, well is True)
            if self._frees.queue.num:
                self._frees.serve_queue()


class Hears(Protocol):
    """The request that a leg belongs to. It closes the leg when it hears of an end."""

    def began(self, leg: WorkerLeg, headers: Headers) -> None:
        """Its event stream begins."""

    def sent(self, leg: WorkerLeg, data: bytes) -> None:
        """Bytes of its event stream."""

    def passed(self, leg: WorkerLeg, data: bytes, at_s: float, *, finished: bool) -> None:
        """Events of its stream have gone to the client, the last of them then. finished: with a finish_reason."""

    def ended(self, leg: WorkerLeg, data: bytes) -> None:
        """Its event stream ended properly. data: its last bytes, perhaps none."""

    def answered(self, leg: WorkerLeg, status: int, headers: Headers, body: bytes) -> None:
        """Its whole answer: to a request that does not stream, or with a status that is not 2xx."""

    def lost(self, leg: WorkerLeg, loss: Loss, detail: str) -> None:
        """It ended without an answer."""

    def broke(self, leg: WorkerLeg, error: Exception) -> None:
        """It is cancelled, because one of these calls raised."""


class WorkerLeg(LegAccount, AnswerListener):
    """Listens to one answer. Once it is closed it tells no more. `Attempt` sends it."""

    leg: Leg
    attempt = 0
    transfer_id = url = ""
    max_nbytes = 0
    """Of an answer in one piece."""
    hears: Hears | None = None
    """From when it is sent until it is closed: or both would wait for the collector."""
    fate = ""
    """How it ended, for people."""
    answered_s: float | None = None
    """When its stream began, or its whole answer was there."""
    closed_s: float | None = None
    """When its answer ended, or it was given up."""
    span_id = ""
    """Of its span, if the request is traced."""
    connection: Connection | HttpRequest | None = None
    """Until the end of the answer."""
    nbytes = 0
    """Of its stream, so far."""
    _paused = False
    """Its client has kept it waiting."""
    _let_go: Alarms | None = None
    """Where the end of its patience is set, once it is let go."""

    def close(self, *, well: bool | None) -> None:
        """It is over, unless it was before. well: as of `LegAccount.end`."""
        if self.hears is None:
            return
        self.hears = None
        self.closed_s = now_s = self.closed_s or time.monotonic()
        self.worker.legs.discard(self)
        if not self.fate:
            self.fate = "served" if well else "cancelled"
        if not self.ended:
            timed = self.nbytes >= MIN_PACE_NBYTES or self.leg is PREFILL
            self.end(now_s, well=well, pace=self.pace(now_s, well=well) if timed else None)
        if self._let_go is not None:
            self._let_go.due_s.pop(self.cancel, None)

    def pace(self, now_s: float, *, well: bool | None) -> float | None:
        """Of a prompt for each token that was ahead, of a stream of `MIN_PACE_NBYTES` or more for each byte."""
        if self.leg is PREFILL:
            return (now_s - self.sent_s) / self._ahead if self._ahead >= MIN_PACE_TOKENS else None
        # Given up, a stream says nothing: it may have waited for prefill.
        if not well or self._paused:
            return None
        took_s = now_s - self.answered_s if self.answered_s is not None else 0.0
        return took_s / self.nbytes if took_s >= MIN_PACE_S else None

    def blame(self, *, own: bool) -> None:
        """It failed, whatever its stream does from now on. own: by its worker's fault, which may show after its end;
        otherwise its end says nothing of the worker."""
        self.end(time.monotonic(), well=False if own else None)

    def cancel(self) -> None:
        """Close its connection; the worker aborts."""
        if self.hears is not None:
            self._leave()
            self.close(well=None)

    @property
    def passed_s(self) -> float:
        """When an event of its stream has passed to the client last; 0 if none has."""
        return self.connection.passed_s if self.connection is not None else 0.0

    def gone(self, reason: str) -> None:
        """Its worker is not there any more, and its connection says nothing of it: the same as if that had broken."""
        if self.hears is not None:
            self._leave()
            self.on_lost(WorkerGone(ConnectionError(reason), reused=False, answered=self.answered_s is not None))

    def let_go(self, alarms: Alarms) -> None:
        """It is not needed any more: close its connection unless it ends by itself in a moment."""
        self.fate = self.fate or ("served" if self.leg is DECODE else "let go")  # decode's answer was whole
        self._let_go = alarms
        alarms.after(self.cancel, LET_GO_S)

    def pause(self) -> None:
        """Hold the worker back: its bytes are not read."""
        self._paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    def _leave(self) -> None:
        if self.connection is not None:
            self.connection.leave()
            self.connection = None

    def _broke(self, error: Exception) -> None:
        words = "transfer %s: its request failed unexpectedly"
        log.error(words, self.transfer_id, exc_info=error, extra=about(transfer_id=self.transfer_id))
        hears = self.hears
        if not self.ended and self.fate == "served":  # its end was not heard
            self.fate = ""
        self.cancel()
        if hears is not None:
            hears.broke(self, error)

    # ---- the connection's, which serves other requests later, whatever is raised here

    def on_head(self, status: int, headers: Headers) -> None:
        self.answered_s = time.monotonic()
        if not 200 <= status < 300:
            self.most_nbytes = self.max_nbytes
            return
        self.worker.spoke_s = self.answered_s
        try:
            if self.hears is not None:
                self.hears.began(self, headers)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_data(self, data: bytes) -> None:
        self.nbytes += len(data)
        try:
            if self.hears is not None:
                self.hears.sent(self, data)
            if self.leg is PREFILL and not self.ended:  # it has nothing to do after its first token
                now_s = time.monotonic()
                self.end(now_s, well=True, pace=self.pace(now_s, well=True))
                self.fate = self.fate or "served"
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_passed(self, data: bytes, at_s: float, finished: bool) -> None:
        self.nbytes += len(data)
        self.worker.spoke_s = at_s
        try:
            if self.hears is not None:
                self.hears.passed(self, data, at_s, finished=finished)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_end(self, data: bytes) -> None:
        self.connection = None
        self.nbytes += len(data)
        self.closed_s, self.fate = time.monotonic(), self.fate or "served"  # before its request may be kept
        try:
            if self.hears is not None:
                self.hears.ended(self, data)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.connection = None
        self.closed_s = now_s = time.monotonic()
        if self.answered_s is None:
            self.answered_s = now_s
        if 200 <= status < 300:
            self.worker.spoke_s, self.fate = now_s, self.fate or "served"
        try:
            if self.hears is not None:
                self.hears.answered(self, status, headers, body)
        except Exception as error:  # noqa: BLE001
            self._broke(error)

    def on_lost(self, error: HttpError) -> None:
        self.connection = None
        try:
            if self.hears is not None:
                self.hears.lost(self, loss_of(error), f"{self.url}: {describe(error)}")
        except Exception as problem:  # noqa: BLE001
            self._broke(problem)


ended_leg: Callable[[WorkerLeg], EndedLeg] = attrgetter(
    *("attempt", "leg.value", "worker.label", "sent_s", "answered_s", "closed_s", "fate", "span_id")
)
"""What is known of a leg now."""
