"""One client request: does what `flow.py` decides, and reports events to it; `answer.py` has the client's side.

No task works on a request. It goes on when a worker's connection has bytes: they are told to the flow, and what it
lets through is written to the client's connection in the same step. A client that reads slowly holds its own worker
back: that worker's connection is not read meanwhile. What nobody has to look at passes natively (`relaying.py`).
"""

from __future__ import annotations

import logging
import math
import random
import time
from typing import TYPE_CHECKING

from pdlink.api.errors import error_body
from pdlink.api.keys import key_of
from pdlink.api.openai import LAST_EVENTS
from pdlink.api.sse import payloads
from pdlink.errors import PdlinkError
from pdlink.logs import about

from .admission import Admission
from .answer import Answer
from .attempt import Attempt
from .decision_log import Tally
from .decisions import Told
from .ending import keep, logged
from .fleet import wanted
from .flow import Flow
from .recovery import PATHS, Recovery
from .steps import (
    Answered,
    BlameLeg,
    CancelLeg,
    Chunk,
    ClientLeft,
    Ended,
    EndStream,
    Event,
    Forward,
    Leg,
    LetGo,
    Loss,
    Lost,
    Outcome,
    Place,
    Placed,
    Respond,
    ShuttingDown,
    StartDecode,
    Started,
    StartLegs,
    TellToStop,
    Tick,
    Waits,
)
from .upstream import tell_to_stop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from pdlink.api.openai import Call
    from pdlink.observe.sources import Sourced

    from .client_answer import ClientAnswer
    from .http_connection import Headers
    from .leg import WorkerLeg
    from .shared import Shared
    from .worker import Worker

log = logging.getLogger("pdlink.proxy")

_OWN_FAULTS = frozenset({Loss.CONNECT, Loss.RESET, Loss.TIMEOUT, Loss.MALFORMED, Loss.ERROR})
"""Losses that are the worker's own, and not its peer's or ours."""

_INTERNAL = error_body("the proxy failed unexpectedly; see its log", kind="server_error", code=PdlinkError.code)

_STARTED = Started()
_NO_HEADERS: Mapping[str, str] = {}
_BRING_DEADLINES = (Placed, Waits, Chunk)
"""Events after which the next deadline may be earlier than before."""


class Request:
    """One client request from its checked body to its answer: it waits for workers, runs, answers, and is over."""

    _closed = False
    _recovery: Recovery | None = None
    """Of a stream that may go on elsewhere."""
    _lent: int | None = None
    """Its key at `_relays` while its stream passes natively."""
    _lent_leg: WorkerLeg | None = None
    _behind_since_s: float | None = None
    """The client has not read what was sent to it."""
    _catching_up: asyncio.Task[None] | None = None
    """Waits until it has."""
    _preparing: asyncio.Task[None] | None = None
    """Waits for the tokens of its prompt."""
    _last: asyncio.Task[None] | None = None
    """Waits until the client has read the end."""
    _armed_s = math.inf

    def __init__(
        self,
        shared: Shared,
        client: ClientAnswer,
        call: Call,
        headers: dict[str, str],
        said: Mapping[str, str],
        over: Callable[[], None],
    ) -> None:
        """headers: for both legs; X-Request-Id also for the client. said: the client's headers. over: called once,
        when the answer is written or the client has left."""
        self._shared, self._call, self._leg_headers = shared, call, headers
        self._started_s = time.monotonic()
        request_id = headers["X-Request-Id"]
        dialect = shared.dialect
        self._trace = shared.tracer.begin(headers) if shared.tracer is not None else None
        self._seed = random.getrandbits(32)
        if call.streaming:
            resumes, most = dialect.resumes, shared.config.recover_streams
            if most and resumes is not None and call.path in PATHS:
                self._recovery = Recovery(call, resumes, most, self._seed, lambda: shared.pools.links)
        self._flow = Flow(
            shared.limits,
            self._started_s,
            (dialect.rules_of(call) if dialect.rules_of is not None else None) or dialect.rules,
            request_id=request_id,
            keyed=not (dialect.key_as_bearer and "Authorization" in headers),
            recovery=self._recovery,
            last_events=LAST_EVENTS.get(call.path, ()),
        )
        self._attempts: dict[int, Attempt] = {}
        self._admission = Admission(
            shared,
            wanted(call, said.get("x-session-id")),
            request_id=request_id,
            tenant=key_of(said),
            whole=shared.whole(call),
            happen=self.happen,
            failed=self.fail,
        )
        self._request_id = request_id
        self.client = client
        self._answer = Answer(shared, client, call, headers, self._flow, self._admission, self._started_s)
        if shared.decision_log is not None and self._admission.sampled:
            self._answer.tally = Tally()
        self._relays = shared.relays
        """Where its stream may pass natively."""
        self._tell_over = over

    def begin(self) -> None:
        tokenizing, asked = self._shared.tokenizing, self._admission.wanted
        try:
            if tokenizing is not None and (waits := tokenizing.prepare(asked, self._call)) is not None:
                self._preparing = self._shared.spawn(self._prepare(waits))
                return
            self.happen(_STARTED)
        except Exception as error:  # noqa: BLE001 -- of any policy or dialect
            self.fail(error)

    async def _prepare(self, prepared: Coroutine[Any, Any, object]) -> None:
        try:
            await prepared
            self._preparing = None
            if not self._closed:
                self.happen(_STARTED)
        except Exception as error:  # noqa: BLE001 -- of any tokenizer, policy or dialect
            self._preparing = None
            self.fail(error)

    def leave(self) -> None:
        """The client has left. Nothing if its answer is written."""
        self._close()

    def _end(self) -> None:
        """The flow is over: nothing more is written."""
        if self._closed or self._last is not None:
            return
        if self.client.behind and not self.client.gone:
            self._last = self._shared.spawn(self._let_catch_up())
        else:
            self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._admission.leave()
        if self._flow.outcome is None:
            self.happen(ClientLeft())
        self._shared.alarms.clear(self.tick)
        answer = self._answer
        answer.close()
        if self._preparing is not None:
            self._preparing.cancel()
        if self._catching_up is not None:
            self._catching_up.cancel()
        if self._last is not None:
            self._last.cancel()
        record = answer.record(self._flow.outcome or Outcome.FAILED, self._attempts.values())
        if answer.tally is not None and (log_ := self._shared.decision_log) is not None:
            log_.add(logged(record, self._admission, answer.tally, self._attempts.values()))
        if self._trace is not None:
            self._trace.ended(record, self._call)
        asked = self._admission.wanted
        keep(self._shared, record, self._admission.why, asked.num_tokens, answer.stages, answer.exemplar)
        over, self._tell_over = self._tell_over, _nothing
        over()

    def fail(self, error: Exception) -> None:
        """Our own code failed."""
        if self._closed:
            return
        log.error("request %s failed unexpectedly", self._request_id, exc_info=error, extra=self._about())
        self._answer.fail(_INTERNAL)
        self._close()

    def shut_down(self) -> None:
        """End it now, with an error for the client."""
        self.happen(ShuttingDown())

    # ---- events and actions

    def happen(self, event: Event) -> None:
        """Report an event to the flow and do its actions."""
        flow, forward = self._flow, b""
        if self._lent is not None and self._relays is not None:
            self._relays.take_back(self._lent)
        actions = flow.on(event, time.monotonic())
        if flow.said:
            self._note_said()
        for action in actions:
            match action:
                # The usual ones first: each case that does not match costs its test.
                case Forward(data=data):
                    forward = data
                case StartLegs():
                    self._start_legs(action.attempt, at_once=action.at_once)
                case Place():
                    if forward:  # what follows may end the stream
                        self._answer.forward(forward)
                        forward = b""
                    num_behind = self._recovery.num_behind if self._recovery is not None else 0
                    self.happen(self._admission.place(action, num_behind))
                case Respond(status=status, content_type=content_type, body=body):
                    self._answer.respond(status, content_type, body)
                case LetGo(attempt=attempt, leg=leg):
                    self._attempts[attempt].legs[leg].let_go()
                case EndStream(data=data):
                    self._answer.end_stream(forward + data)
                    forward = b""
                case CancelLeg(attempt=attempt, leg=leg):
                    self._attempts[attempt].cancel(leg)
                case BlameLeg():
                    self._blame(action)
                case TellToStop(attempt=attempt, leg=leg, reason=reason):
                    self._shared.spawn(self._tell_to_stop(self._attempts[attempt].legs[leg], reason))
                case StartDecode(attempt=attempt, params=params):
                    self._attempts[attempt].start_decode(self, params)
        if forward:
            self._answer.forward(forward)
        if flow.outcome is not None:
            self._end()
        elif isinstance(event, _BRING_DEADLINES) and (due_s := flow.deadline_s) < self._armed_s:
            self._armed_s = due_s if self._behind_since_s is None else self._due_s()
            self._shared.alarms.set(self.tick, self._armed_s)

    # ---- deadlines

    def _arm(self, due_s: float) -> None:
        self._armed_s = due_s
        self._shared.alarms.set(self.tick, due_s)

    def _due_s(self) -> float:
        """Time of the next tick. Silence of a worker does not count while its last bytes wait for the client."""
        due_s = self._flow.deadline_s
        if self._behind_since_s is not None:
            due_s = max(due_s, self._behind_since_s + self._shared.config.idle_timeout_s)
        return due_s

    def tick(self) -> None:
        """A deadline may have passed."""
        self._armed_s = math.inf
        if self._lent is not None and self._relays is not None:
            self._flow.heard(self._relays.heard_s(self._lent))
        if time.monotonic() < self._due_s():
            pass
        elif self._behind_since_s is not None:
            self._abort_client()
        else:
            self.happen(Tick())
        if self._armed_s == math.inf and not self._flow.over:
            self._arm(self._due_s())

    def _blame(self, action: BlameLeg) -> None:
        reason = action.reason.value if isinstance(action.reason, Loss) else str(action.reason)
        self._shared.metrics.leg_failures.add(1, action.leg.value, reason)
        attempt = self._attempts[action.attempt]
        run = attempt.legs[action.leg]
        worker, run.fate = run.worker, reason
        self._admission.note("failed", f"{action.leg.value} leg on {worker.label}: {reason}; {action.then}")
        log.log(
            _level_of(action.reason),
            "request %s, transfer %s: %s leg on %s failed (%s: %s); %s",
            *(self._request_id, run.transfer_id, action.leg.value, worker.id),
            *(reason, action.detail, action.then),
            extra=self._about(run.transfer_id),
        )
        if self._is_own_fault(action.reason):  # that it failed may show after its end
            run.account.end(time.monotonic(), well=False)
        match action.reason:
            case Loss.CONNECT | Loss.RESET:
                self._shared.pools.fault(worker, f"a request's connection failed ({reason})")
            case Loss.BARRED:
                worker.barred(f"it refuses requests: {self._shared.dialect.key_setting}")
                worker.poke.set()
            case Loss.MISPAIRED if Leg.PREFILL in attempt.chosen:
                self._shared.pools.mispaired(attempt.chosen[Leg.PREFILL], attempt.chosen[Leg.DECODE])
            case Loss.STALE:
                worker.poke.set()  # most likely idle, perhaps gone
            case int() if action.reason in self._shared.dialect.rules.lost_statuses:
                worker.poke.set()  # the engine may be dead while the HTTP server still answers

    def _start_legs(self, number: int, *, at_once: bool) -> None:
        admission, recovery = self._admission, self._recovery
        call = self._call if recovery is None else recovery.call  # the client's request, or the rest of it
        attempt = Attempt(self._shared, number, admission, call, self._leg_headers, self._seed)
        attempt.trace = self._trace
        self._attempts[number] = self._answer.attempt = attempt
        attempt.start(self, at_once=at_once)

    # ---- what legs report

    def began(self, leg: WorkerLeg, headers: Headers) -> None:
        """Its event stream begins."""
        if leg.leg is not Leg.DECODE:
            return
        attempt = self._attempts[leg.attempt]
        if self._shared.pools.refusals.pairs:
            self._fits(attempt, leg)
        attempt.note_kv(self._shared.dialect.said(headers, b"").kv)
        attempt.decode_spoke = True
        if attempt is self._answer.attempt:
            self._answer.decode_spoke()

    def sent(self, leg: WorkerLeg, data: bytes) -> None:
        """Bytes of its event stream."""
        if self._answer.opened and self._flow.passes(leg.attempt, leg.leg, data, time.monotonic()):
            self._answer.count(data)
            if self._relays is None or not self._lend(leg, data):
                self.client.write(data)
        else:
            self.happen(Chunk(leg.attempt, leg.leg, data))
        if self.client.behind:
            self._hold(leg)

    def ended(self, leg: WorkerLeg) -> None:
        """Its event stream ended properly."""
        self.happen(Ended(leg.attempt, leg.leg))
        leg.end(well=True)

    def answered(self, leg: WorkerLeg, status: int, headers: Headers, body: bytes) -> None:
        """Its whole answer."""
        if status >= 300:
            self._failed(leg, status)
        elif leg.leg is Leg.DECODE or self._shared.dialect.prefill_says:
            said = self._shared.dialect.said(headers, body)
            if leg.leg is Leg.DECODE:
                attempt = self._attempts[leg.attempt]
                if self._shared.pools.refusals.pairs:
                    self._fits(attempt, leg)
                attempt.note_kv(said.kv)
            if said.source is not None:
                self._tell_source(leg.worker, said.source)
        kind = "application/json" if headers.is_json else headers.content_type
        self.happen(Answered(leg.attempt, leg.leg, status, body, kind))
        leg.end(well=True)

    def lost(self, leg: WorkerLeg, loss: Loss, detail: str) -> None:
        """It ended without an answer."""
        self._failed(leg, loss)
        self.happen(Lost(leg.attempt, leg.leg, loss, detail))

    def _failed(self, leg: WorkerLeg, reason: Loss | int) -> None:
        """Its end, before another attempt is placed."""
        own = not self._flow.over and self._is_own_fault(reason)
        leg.end(well=False if own else None)

    def _fits(self, attempt: Attempt, decode: WorkerLeg) -> None:
        """Decode takes KV of this prefill worker."""
        refusals = self._shared.pools.refusals
        if (prefill := attempt.legs.get(Leg.PREFILL)) is not None:
            refusals.fits(prefill.worker, decode.worker)

    # ---- a stream that passes natively

    def _lend(self, leg: WorkerLeg, data: bytes) -> bool:
        """Let the rest of a stream pass natively, from these events on; whether they are written."""
        assert self._relays is not None
        connection, client = leg.connection, self.client.lend()
        if not client:
            if client == 0:
                self._relays = None
            return False
        worker = connection.lend() if connection is not None else None
        if connection is None or worker is None:
            return False
        self._lent_leg = leg
        self._lent, unsent = self._relays.lend(worker, client, self.client.chunk(data), self._flow.look, self)
        if self._lent is None:
            self.client.write_chunks(unsent)
            connection.give_back(b"")
        return True

    def on_passed(self, data: bytes) -> None:
        """Of `Lends`."""
        if self._lent_leg is not None:
            self._lent_leg.nbytes += len(data)
        self._flow.passed(data, time.monotonic())
        self._answer.count(data)

    def on_returned(self, unsent: bytes, unread: bytes) -> None:
        """Of `Lends`."""
        leg, self._lent, self._lent_leg = self._lent_leg, None, None
        self.client.write_chunks(unsent)
        if leg is not None and leg.connection is not None:
            leg.connection.give_back(unread)
            if self.client.behind:
                self._hold(leg)

    # ---- what follows

    def _is_own_fault(self, reason: Loss | int) -> bool:
        """Whether a leg's worker is at fault for this end, and not its peer or ourselves."""
        if isinstance(reason, Loss):
            return reason in _OWN_FAULTS
        return 500 <= reason != self._shared.dialect.rules.no_kv_status

    def _note_said(self) -> None:
        """Decode may have said in its stream how its KV came."""
        flow = self._flow
        events, flow.said = flow.said, b""
        attempt = self._attempts[flow.attempts]
        for payload in payloads(events):
            said = self._shared.dialect.said(_NO_HEADERS, payload)
            attempt.note_kv(said.kv)
            if said.source is not None:
                self._tell_source(attempt.chosen[Leg.DECODE], said.source)

    def _tell_source(self, worker: Worker, said: Sourced) -> None:
        """For `explain`, where the KV of a leg's prompt came from."""
        self._shared.decisions.told.append(Told(self._request_id, worker.label, said))

    def broke(self, leg: WorkerLeg, error: Exception) -> None:
        """Our own code failed at what it said."""
        if not self._flow.over:
            self.happen(Lost(leg.attempt, leg.leg, Loss.LOCAL, f"internal error: {type(error).__name__}"))
        if not self._flow.over or not self.client.ended:
            self.fail(error)

    async def _tell_to_stop(self, leg: WorkerLeg, reason: str) -> None:
        shared, timeout_s = self._shared, self._shared.config.connect_timeout_s
        if not await tell_to_stop(shared.control, leg.worker.url, leg.transfer_id, reason, timeout_s=timeout_s):
            # No error: its own deadline ends the transfer.
            log.info(
                "request %s, transfer %s: no stop call to %s",
                *(self._request_id, leg.transfer_id, leg.worker.url),
                extra=self._about(leg.transfer_id),
            )

    def _about(self, transfer_id: str = "") -> Mapping[str, str]:
        """Of a line about this request."""
        return about(request_id=self._request_id, transfer_id=transfer_id)

    # ---- a client that reads slowly

    def _hold(self, leg: WorkerLeg) -> None:
        """Read no more of this leg until the client has read what it was sent."""
        leg.pause()
        if self._behind_since_s is None:
            self._behind_since_s = time.monotonic()
            self._catching_up = self._shared.spawn(self._catch_up())

    async def _catch_up(self) -> None:
        try:
            await self.client.drain()
        except ConnectionError:
            self.happen(ClientLeft())
            return
        self._behind_since_s = self._catching_up = None
        for attempt in self._attempts.values():
            for leg in attempt.legs.values():
                leg.resume()

    async def _let_catch_up(self) -> None:
        """The whole answer is on its way, to a client that reads slowly."""
        await self.client.caught_up(self._shared.config.idle_timeout_s)
        self._last = None
        self._close()

    def _abort_client(self) -> None:
        """The client has stopped reading for too long."""
        self.client.abort()
        self.happen(ClientLeft())


def _nothing() -> None:
    pass


def _level_of(reason: Loss | int) -> int:
    """WARNING for lost legs; less for a client's mistake or an idle connection."""
    if reason is Loss.STALE:
        return logging.INFO
    return logging.DEBUG if isinstance(reason, int) and 400 <= reason < 500 else logging.WARNING
