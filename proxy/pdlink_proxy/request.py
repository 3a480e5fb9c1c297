"""One client request: does what `flow.py` decides, reports events to it, and writes the client's answer.

No task works on a request. It goes on when a worker's connection has bytes: they are told to the flow, and what it
lets through is written to the client's connection in the same step. A client that reads slowly holds its own worker
back: that worker's connection is not read meanwhile. What nobody has to look at passes natively (`Exchange.pass_to`).

A stream's head says how the KV came, and cannot be changed later. So the first events may wait a moment for decode to
say it (`kv_header_grace_s`).
"""

from __future__ import annotations

import logging
import math
import random
import time
from typing import TYPE_CHECKING, Any

from pdlink._http import num_events, place_of_done, usage_of
from pdlink.api import kv_path
from pdlink.api.errors import error_body, error_for
from pdlink.api.keys import key_of, owner_of
from pdlink.api.openai import LAST_EVENTS
from pdlink.api.session import ID_HEADER, KEPT, KEPT_HEADER, OWNER_HEADER, asked_session
from pdlink.api.sse import payloads
from pdlink.errors import PdlinkError
from pdlink.logs import about

from .admission import Admission
from .attempt import Attempt
from .decision_log import Tally, logged
from .decisions import Told
from .fleet import wanted
from .flow import Flow
from .leg import ended_leg
from .metrics import MAX_EXEMPLAR_CHARS, trace_of
from .pair_times import MIN_TOKENS
from .records import TIMING_HEADER, EndedRequest, stages
from .recovery import PATHS, Recovery
from .sessions import SessionTurn
from .steps import (
    DECODE,
    FIRST,
    PREFILL,
    Answered,
    BlameLeg,
    CancelLeg,
    Chunk,
    ClientLeft,
    Ended,
    EndStream,
    Event,
    Forward,
    LetGo,
    Loss,
    Lost,
    Outcome,
    Place,
    Respond,
    ShuttingDown,
    StartDecode,
    StartLegs,
    TellToStop,
    Tick,
)
from .tokenizing import LEAST_NBYTES
from .upstream import tell_to_stop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from pdlink._http import Headers
    from pdlink.api.openai import Call
    from pdlink.api.session import AskedSession
    from pdlink.observe.sources import Sourced

    from .client_answer import ClientAnswer
    from .decisions import Decided
    from .leg import WorkerLeg
    from .shared import Shared
    from .spans import RequestTrace
    from .worker import Worker

log = logging.getLogger("pdlink.proxy")

_OWN_FAULTS = frozenset({Loss.CONNECT, Loss.RESET, Loss.TIMEOUT, Loss.MALFORMED, Loss.ERROR})
"""Losses that are the worker's own, and not its peer's or ours."""

_INTERNAL = error_body("the proxy failed unexpectedly; see its log", kind="server_error", code=PdlinkError.code)

_NO_HEADERS: Mapping[str, str] = {}
_NO_STAGES: Mapping[str, float] = {}
_STREAM = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
"""The latter, or nginx in front would collect tokens."""


class Request:
    """One client request from its checked body to its answer: it waits for workers, runs, answers, and is over."""

    _closed = False
    _trace: RequestTrace | None = None
    _recovery: Recovery | None = None
    """Of a stream that may go on elsewhere."""
    _attempt: Attempt | None = None
    """The newest one: the client hears of no other."""
    _tally: Tally | None = None
    """Counts for the decision log, if it has this request."""
    _opened_s: float | None = None
    """When its stream began."""
    _num_events = 0
    """Of its stream, so far: about its tokens."""
    _kv_told = ""
    """How its KV came, as its client was told at the end."""
    _kept_line = ""
    """The header that says how much of its prompt its session keeps."""
    _tail = b""
    """The last part of the answer; of a stream, the last read."""
    _before_tail = b""
    """Of a stream, the read before that."""
    _early: bytes | None = None
    """Events of prefill's that wait for decode's KV path."""
    _stages = _NO_STAGES
    """Of the time to its first token, as the client was told last."""
    _passing: WorkerLeg | None = None
    """Its events pass natively."""
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
        self._shared, self.client, self._call, self._leg_headers = shared, client, call, headers
        self._started_s = now_s = time.monotonic()
        self.request_id = request_id = headers["X-Request-Id"]
        dialect = shared.dialect
        if shared.tracer is not None:
            self._trace = shared.tracer.begin(headers)
        self._seed = random.getrandbits(32)
        if call.streaming:
            resumes, most = dialect.resumes, shared.recover_streams
            if most and resumes is not None and call.path in PATHS:
                asks = call if resumes.begin is None else resumes.begin(call, self._seed)
                self._recovery = Recovery(asks, resumes, most, lambda: shared.pools.links)
        self._flow = Flow(
            shared.limits,
            now_s,
            (dialect.rules_of(call) if dialect.rules_of is not None else None) or dialect.rules,
            request_id=request_id,
            keyed=not (dialect.key_as_bearer and "Authorization" in headers),
            recovery=self._recovery,
            last_events=LAST_EVENTS.get(call.path, ()),
        )
        self._attempts: dict[int, Attempt] = {}
        asked: AskedSession | None = None
        if ID_HEADER in said or call.said.session_id:
            asked = asked_session(call.said.session_id, call.said.session_ttl_s, said)  # checked by `Entry`
        to_place = wanted(call, None if asked is None else asked.id)
        if asked is not None:
            owner = owner_of(key_of(said))
            to_place.turn = SessionTurn(owner, asked.id, to_place.salt, to_place.model, asked.ttl_s)
            if owner:
                headers[OWNER_HEADER] = owner
        self._admission = Admission(
            shared,
            to_place,
            said=said,
            now_s=now_s,
            whole=(dialect.whole is not None and dialect.whole(call))
            or (shared.pools.has_engines and call.path not in dialect.engine_paths),
        )
        self._exemplar = {"request_id": request_id} if len(request_id) <= MAX_EXEMPLAR_CHARS else {}
        """What names it there: a part of an id names nothing."""
        if "traceparent" in headers:
            self._exemplar |= trace_of(headers["traceparent"])
        if shared.decision_log is not None and self._admission.sampled:
            self._tally = Tally()
        self._tell_over = over

    def begin(self) -> None:
        tokenizing, asked = self._shared.tokenizing, self._admission.wanted
        try:
            if (
                tokenizing is not None
                and len(asked.prompt) >= LEAST_NBYTES
                and (waits := tokenizing.prepare(asked, self._call)) is not None
            ):
                self._preparing = self._shared.spawn(self._prepare(waits))
                return
            self.happen(self._admission.place(FIRST, self))
        except Exception as error:  # noqa: BLE001 -- of any policy or dialect
            self.fail(error)

    async def _prepare(self, prepared: Coroutine[Any, Any, object]) -> None:
        try:
            await prepared
            self._preparing = None
            if not self._flow.over:  # it may be, with a client that has not read its answer yet
                self.happen(self._admission.place(FIRST, self))
        except Exception as error:  # noqa: BLE001 -- of any tokenizer, policy or dialect
            self._preparing = None
            self.fail(error)

    def place_now(self) -> bool:
        """Of `PlacesLater`."""
        try:
            if (found := self._admission.place_now()) is None:
                return False
            self.happen(found)
        except Exception as error:  # noqa: BLE001 -- of any policy: its own request fails, the queue goes on
            self.fail(error)
        return True

    def leave(self) -> None:
        """The client has left. Nothing if its answer is written."""
        self._close()

    def _end_later(self) -> None:
        """Nothing more is written, and the client has not read all of it."""
        if not self._closed and self._last is None:
            self._leave_queue()
            self._last = self._shared.spawn(self._let_catch_up())

    def _leave_queue(self) -> None:
        if (waiting := self._admission.waiting) is not None:
            self._shared.queue.remove(waiting)
            self._admission.waiting = None  # which has this request: the collector would have to find both

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._admission.waiting is not None:
                self._leave_queue()
            if (turn := self._admission.wanted.turn) is not None and self._admission.chosen:
                self._shared.sessions.ended(turn, time.monotonic())
            if self._flow.outcome is None:
                self.happen(ClientLeft())
        except Exception as error:  # noqa: BLE001 -- of a policy or a dialect: it is over all the same
            self._tell_of(error)
        try:
            shared, alarms = self._shared, self._shared.alarms
            alarms.due_s.pop(self.tick, None)
            if self._early is not None:
                alarms.due_s.pop(self._open, None)
            if self._opened_s is not None:
                shared.metrics.num_streams[0] -= 1
            if self._preparing is not None:
                self._preparing.cancel()
            if self._catching_up is not None:
                self._catching_up.cancel()
            if self._last is not None:
                self._last.cancel()
            self._keep()
        except Exception as error:  # noqa: BLE001 -- as above
            self._tell_of(error)
        over, self._tell_over = self._tell_over, _nothing
        over()

    def _tell_of(self, error: Exception) -> None:
        log.error("request %s: its end failed unexpectedly", self.request_id, exc_info=error, extra=self._about())

    @property
    def decided(self) -> Sequence[Decided]:
        """What was decided about it, while it runs; then `EndedRequest` has that."""
        return () if self._closed else self._admission.decided

    def _keep(self) -> None:
        """What is known of it when it has ended, and what the metrics count."""
        outcome = self._flow.outcome or Outcome.FAILED
        shared, admission, flow, attempt = self._shared, self._admission, self._flow, self._attempt
        started_s, ended_s, first_s = self._started_s, time.monotonic(), self._opened_s
        if first_s is None and not self._call.streaming:
            first_s = flow.tries[-1].prefill_s
        prompt_tokens, answer_tokens = usage_of(self._tail)
        if not (prompt_tokens or answer_tokens) and self._before_tail:
            prompt_tokens, answer_tokens = usage_of(self._before_tail)
        further, per_token_s = (answer_tokens or self._num_events) - 1, None
        if outcome is Outcome.OK and first_s is not None and further > 0:
            per_token_s = (ended_s - first_s) / further
        prefill = decode = None
        if attempt is not None:
            decode = attempt.chosen[DECODE].label
            if (of_prefill := attempt.chosen.get(PREFILL)) is not None:
                prefill = of_prefill.label
        kept = EndedRequest(
            self.request_id,
            time.time(),
            outcome.value,
            self._kv_told or self._kv_value,
            started_s,
            ended_s,
            first_s,
            flow.attempts,
            prompt_tokens or admission.num_prompt_tokens,
            not (prompt_tokens or admission.wanted.counted),
            per_token_s,
            admission.wanted.model,
            [each.transfer_id for each in self._attempts.values()],
            prefill,
            decode,
            [(each.wanted_s, each.placed_s, each.prefill_s, each.decode_s) for each in flow.tries],
            [ended_leg(leg) for each in self._attempts.values() for leg in each.legs.values()],
            admission.why,
            admission.wanted.num_tokens,
            admission.decided,
        )
        if self._opened_s is not None and attempt is not None and kept.prompt_tokens >= MIN_TOKENS:
            shared.pools.streamed(kept, attempt.chosen)
        shared.metrics.ended(kept, self._stages, self._exemplar)
        shared.records.keep(kept)
        if self._tally is not None and shared.decision_log is not None:
            num_answered = answer_tokens or self._tally.answer_tokens
            attempts = [attempt.logged() for attempt in self._attempts.values()]
            shared.decision_log.add(logged(kept, admission.wanted, num_answered, attempts))
        if self._trace is not None:
            self._trace.ended(kept.record(), self._call)

    def fail(self, error: Exception) -> None:
        """Our own code failed."""
        if self._closed:
            return
        log.error("request %s failed unexpectedly", self.request_id, exc_info=error, extra=self._about())
        if self.client.begun:
            self.client.abort()
        else:
            lines, said = f"X-Request-Id: {self.request_id}\r\n", error_for(self._call.path, 500, _INTERNAL)
            self.client.respond(500, "application/json", lines, said)
        self._close()

    def shut_down(self) -> None:
        """End it now, with an error for the client."""
        self.happen(ShuttingDown())

    # ---- events and actions

    def happen(self, event: Event) -> None:
        """Report an event to the flow and do its actions."""
        flow = self._flow
        follows: Event | None = None
        if self._passing is not None:
            self._hear_passed()
        actions = flow.on(event, time.monotonic())
        if flow.said:
            self._note_said()
        if actions:
            forward = b""
            for action in actions:
                if (do := _DO.get(type(action))) is not None:
                    do(self, action)
                elif isinstance(action, Forward):
                    forward += action.data  # no copy of the first one, nearly always the only one
                elif isinstance(action, EndStream):
                    self._end_stream(forward + action.data)
                    forward = b""
                elif isinstance(action, Place):  # the last one, if there is one
                    if forward:  # what follows may end the stream
                        self._forward(forward)
                        forward = b""
                    num_behind = self._recovery.num_behind if self._recovery is not None else 0
                    follows = self._admission.place(action, self, num_behind)
            if forward:
                self._forward(forward)
        if follows is not None:
            self.happen(follows)
        elif flow.outcome is not None:
            if self.client.connection.writing_paused and not self.client.gone:
                self._end_later()
            elif self._last is None:
                self._close()
        else:
            due_s, flow.hastened_s = flow.hastened_s, math.inf
            if due_s < self._armed_s:
                self._armed_s = due_s = due_s if self._behind_since_s is None else self._due_s()
                alarms = self._shared.alarms
                if due_s < alarms.rings_s:
                    alarms.set(self.tick, due_s)
                else:  # nearly always
                    alarms.due_s[self.tick] = due_s

    def _let_go(self, action: LetGo) -> None:
        self._attempts[action.attempt].legs[action.leg].let_go(self._shared.alarms)

    def _cancel(self, action: CancelLeg) -> None:
        self._attempts[action.attempt].cancel(action.leg)

    def _start_decode(self, action: StartDecode) -> None:
        self._attempts[action.attempt].start_decode(self, action.params)

    def _tell(self, action: TellToStop) -> None:
        self._shared.spawn(self._tell_to_stop(self._attempts[action.attempt].legs[action.leg], action.reason))

    # ---- deadlines

    def _due_s(self) -> float:
        """Time of the next tick. Silence of a worker does not count while its last bytes wait for the client."""
        due_s = self._flow.deadline_s
        if self._behind_since_s is not None:
            due_s = max(due_s, self._behind_since_s + self._shared.config.idle_timeout_s)
        return due_s

    def tick(self) -> None:
        """A deadline may have passed."""
        self._armed_s = math.inf
        if self._passing is not None:
            self._hear_passed()
        if time.monotonic() < self._due_s():
            pass
        elif self._behind_since_s is not None:
            self._abort_client()
        else:
            self.happen(Tick())
        if self._armed_s == math.inf and not self._flow.over:
            self._armed_s = self._due_s()
            self._shared.alarms.set(self.tick, self._armed_s)

    def _blame(self, action: BlameLeg) -> None:
        reason = action.reason.value if isinstance(action.reason, Loss) else str(action.reason)
        self._shared.metrics.leg_failures.add(1, action.leg.value, reason)
        attempt = self._attempts[action.attempt]
        run = attempt.legs[action.leg]
        worker, run.fate = run.worker, reason
        self._admission.note("failed", f"{action.leg.value} leg on {worker.label}: {reason}; {action.then}")
        level = _level_of(action.reason)
        more = worker.told.admits(time.monotonic()) if level >= logging.WARNING else ""
        if more is not None:
            log.log(
                level,
                "request %s, transfer %s: %s leg on %s failed (%s: %s); %s%s",
                *(self.request_id, run.transfer_id, action.leg.value, worker.id),
                *(reason, action.detail, action.then, more),
                extra=self._about(run.transfer_id),
            )
        run.blame(own=self._is_own_fault(action.reason))
        if run.connection is None:  # it ended with this, so nobody cancels it: before another attempt is placed
            run.close(well=None)
        match action.reason:
            case Loss.CONNECT | Loss.RESET:
                self._shared.pools.fault(worker, f"a request's connection failed ({reason})")
            case Loss.BARRED:
                worker.barred(f"it refuses requests: {self._shared.dialect.key_setting}")
                worker.poke.set()
            case Loss.MISPAIRED if PREFILL in attempt.chosen:
                self._shared.pools.mispaired(attempt.chosen[PREFILL], attempt.chosen[DECODE])
            case Loss.STALE:
                worker.poke.set()  # most likely idle, perhaps gone
            case int() if action.reason in self._shared.dialect.rules.lost_statuses:
                worker.poke.set()  # the engine may be dead while the HTTP server still answers

    def _start_legs(self, action: StartLegs) -> None:
        recovery = self._recovery
        call = self._call if recovery is None else recovery.call  # the client's request, or the rest of it
        attempt = Attempt(
            shared=self._shared,
            number=action.attempt,
            admission=self._admission,
            call=call,
            leg_headers=self._leg_headers,
            trace=self._trace,
        )
        self._attempts[action.attempt] = self._attempt = attempt
        attempt.start(self, self._seed, at_once=action.at_once)

    # ---- what legs report

    def began(self, leg: WorkerLeg, headers: Headers) -> None:
        """Its event stream begins."""
        if self._admission.wanted.turn is not None:
            self._note_session(self._admission.wanted.turn, headers)
        if leg.leg is not DECODE:
            return
        attempt = self._attempts[leg.attempt]
        if self._shared.pools.refusals.pairs:
            self._fits(attempt, leg)
        if self._shared.dialect.head_says:
            attempt.kv = attempt.kv or self._shared.dialect.said(headers, b"").kv
        attempt.decode_spoke = True
        if attempt is self._attempt and self._early is not None:  # its events wait no longer
            self._open()

    def sent(self, leg: WorkerLeg, data: bytes) -> None:
        """Bytes of its event stream."""
        self.happen(Chunk(leg.attempt, leg.leg, data))
        if self._flow.outcome is not None:
            return
        if (
            self._opened_s is not None
            and self._flow.passes(leg.attempt, leg.leg)
            and (to := self.client.native) is not None
            and leg.connection is not None
        ):
            self._passing = leg
            leg.connection.pass_to(to, self._flow.look)
        if self.client.connection.writing_paused:
            self._hold(leg)

    def passed(self, leg: WorkerLeg, data: bytes, at_s: float, *, finished: bool) -> None:
        """Events of its stream have gone to the client, the last of them then. finished: with a finish_reason."""
        self._flow.passed(data, at_s, finished=finished)
        self._count(data)
        if self.client.connection.writing_paused:
            self._hold(leg)

    def _hear_passed(self) -> None:
        """Of all events that have passed, before something is decided."""
        leg, self._passing = self._passing, None
        if leg is not None and leg.connection is not None:
            leg.connection.pass_no_more()

    def ended(self, leg: WorkerLeg, data: bytes) -> None:
        """Its event stream ended properly. data: its last bytes, perhaps none."""
        if self._flow.outcome is None:
            self.happen(Ended(leg.attempt, leg.leg, data))
        leg.close(well=True)

    def answered(self, leg: WorkerLeg, status: int, headers: Headers, body: bytes) -> None:
        """Its whole answer."""
        if self._admission.wanted.turn is not None:
            self._note_session(self._admission.wanted.turn, headers)
        if status >= 300:
            self._failed(leg, status)
        elif leg.leg is DECODE or self._shared.dialect.prefill_says:
            said = self._shared.dialect.said(headers, body)
            if leg.leg is DECODE:
                attempt = self._attempts[leg.attempt]
                if self._shared.pools.refusals.pairs:
                    self._fits(attempt, leg)
                attempt.kv = attempt.kv or said.kv
            if said.source is not None:
                self._tell_source(leg.worker, said.source)
        self.happen(Answered(leg.attempt, leg.leg, status=status, body=body, content_type=headers.content_type))
        leg.close(well=True)

    def lost(self, leg: WorkerLeg, loss: Loss, detail: str) -> None:
        """It ended without an answer."""
        self._failed(leg, loss)
        self.happen(Lost(leg.attempt, leg.leg, loss=loss, detail=detail))

    def _failed(self, leg: WorkerLeg, reason: Loss | int) -> None:
        """Its end, before another attempt is placed."""
        own = not self._flow.over and self._is_own_fault(reason)
        leg.close(well=False if own else None)

    def _fits(self, attempt: Attempt, decode: WorkerLeg) -> None:
        """Decode takes KV of this prefill worker."""
        refusals = self._shared.pools.refusals
        if (prefill := attempt.legs.get(PREFILL)) is not None:
            refusals.fits(prefill.worker, decode.worker)

    # ---- the client's answer

    @property
    def _kv_value(self) -> str:
        """How the KV came, as far as it is known now."""
        attempt = self._attempt
        if attempt is not None and attempt.kv is not None:
            return attempt.kv
        if not self._call.streaming:
            return kv_path.UNKNOWN
        if attempt is None or not attempt.decode_spoke:
            return kv_path.TRANSFERRING
        # Some engines say it in the last event, where there is one.
        later = self._shared.dialect.rules.says_kv and self._flow.outcome is None
        return kv_path.TRANSFERRING if later else kv_path.UNKNOWN

    def _respond(self, action: Respond) -> None:
        """An answer in one piece."""
        status, body = action.status, action.body
        lines = self._lines("total", time.monotonic())
        if 200 <= status < 300:
            self._tail, self._kv_told = body, self._kv_value
            lines += f"{kv_path.HEADER}: {self._kv_told}\r\n"
            if (prefill_s := self._flow.tries[-1].prefill_s) is not None:
                self._shared.metrics.ttft_of[PREFILL].observe(prefill_s - self._started_s, self._exemplar)
        elif status == 503:
            lines += f"Retry-After: {self._shared.queue.retry_after_s()}\r\n"
        if status >= 400:
            body = error_for(self._call.path, status, body)
        self.client.respond(status, action.content_type, lines, body)

    def _count(self, data: bytes) -> None:
        """Bytes of a stream that pass; this is done for every token, so it looks for as little as it can."""
        self._num_events += num_events(data)
        self._tail = data
        if self._tally is not None:
            self._tally.add(data)

    def _forward(self, data: bytes) -> None:
        """Events for the client, the first of which begin the stream."""
        client, grace_s = self.client, self._shared.config.kv_header_grace_s
        self._count(data)
        if client.begun:
            client.write(data)
        elif self._early is not None:
            self._early += data
        elif self._flow.first_leg is PREFILL and grace_s > 0 and not (self._attempt and self._attempt.decode_spoke):
            self._early = data
            self._shared.alarms.set(self._open, time.monotonic() + grace_s)
        else:
            self._open(data)

    def _open(self, data: bytes = b"") -> None:
        """Begin the stream, with the events that waited for it and these. Nothing if it has begun: it is an alarm,
        too."""
        if self._opened_s is not None:
            return
        self._opened_s = now_s = time.monotonic()
        lines = f"{self._lines('ttft', now_s)}{kv_path.HEADER}: {self._kv_value}\r\n{_STREAM}"
        if self._early is not None:
            data, self._early = self._early + data, None
            self._shared.alarms.due_s.pop(self._open, None)
        self.client.begin(lines, data)
        metrics = self._shared.metrics
        metrics.num_streams[0] += 1
        if (first := self._flow.first_leg) is not None:
            metrics.ttft_of[first].observe(now_s - self._started_s, self._exemplar)

    def _end_stream(self, data: bytes) -> None:
        """Its last events."""
        self._before_tail = self._tail  # it may have the usage
        self._count(data)
        if self._opened_s is None:
            self._open()
        self._stages, timing = stages(self._flow.tries, self._admission.placement_s, time.monotonic(), "total")
        self._kv_told = self._kv_value
        comment = f": {TIMING_HEADER}: {timing}\n: {kv_path.HEADER}: {self._kv_told}\n\n"
        self.client.end(data, comment.encode(), place_of_done(data))

    def _lines(self, last: str, now_s: float) -> str:
        """Headers: which request, where its time went, and of the attempt, which transfer and which workers."""
        self._stages, timing = stages(self._flow.tries, self._admission.placement_s, now_s, last)
        of_attempt = self._attempt.lines if self._attempt is not None else ""
        return f"X-Request-Id: {self.request_id}\r\n{TIMING_HEADER}: {timing}\r\n{of_attempt}{self._kept_line}"

    # ---- what follows

    def _is_own_fault(self, reason: Loss | int) -> bool:
        """Whether a leg's worker is at fault for this end, and not its peer or ourselves."""
        if isinstance(reason, Loss):
            return reason in _OWN_FAULTS
        return 500 <= reason != self._shared.dialect.rules.no_kv_status

    def _note_session(self, turn: SessionTurn, headers: Headers) -> None:
        """A leg may say how much of the prompt its session keeps."""
        if (said := KEPT.fullmatch(headers.get(KEPT_HEADER, ""))) is not None:
            self._kept_line = f"{KEPT_HEADER}: {said[0]}\r\n"
            self._shared.sessions.kept(turn, int(said[1]))

    def _note_said(self) -> None:
        """Decode may have said in its stream how its KV came."""
        flow = self._flow
        events, flow.said = flow.said, b""
        attempt = self._attempts[flow.attempts]
        for payload in payloads(events):
            said = self._shared.dialect.said(_NO_HEADERS, payload)
            attempt.kv = attempt.kv or said.kv
            if said.source is not None:
                self._tell_source(attempt.chosen[DECODE], said.source)

    def _tell_source(self, worker: Worker, said: Sourced) -> None:
        """For `explain`, where the KV of a leg's prompt came from."""
        self._shared.told.append(Told(self.request_id, worker.label, said))

    def broke(self, leg: WorkerLeg, error: Exception) -> None:
        """Our own code failed at what it said."""
        if not self._flow.over:
            self.happen(Lost(leg.attempt, leg.leg, loss=Loss.LOCAL, detail=f"internal error: {type(error).__name__}"))
        if not self._flow.over or not self.client.ended:
            self.fail(error)

    async def _tell_to_stop(self, leg: WorkerLeg, reason: str) -> None:
        shared, timeout_s = self._shared, self._shared.config.connect_timeout_s
        if not await tell_to_stop(shared.control, leg.worker.url, leg.transfer_id, reason, timeout_s=timeout_s):
            # No error: its own deadline ends the transfer.
            log.info(
                "request %s, transfer %s: no stop call to %s",
                *(self.request_id, leg.transfer_id, leg.worker.url),
                extra=self._about(leg.transfer_id),
            )

    def _about(self, transfer_id: str = "") -> Mapping[str, str]:
        """Of a line about this request."""
        return about(request_id=self.request_id, transfer_id=transfer_id)

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


_DO: dict[type, Callable[[Request, Any], None]] = {
    StartLegs: Request._start_legs,
    StartDecode: Request._start_decode,
    Respond: Request._respond,
    LetGo: Request._let_go,
    CancelLeg: Request._cancel,
    BlameLeg: Request._blame,
    TellToStop: Request._tell,
}
"""By type of action, where that says all; a match would ask for one type after the other."""


def _nothing() -> None:
    pass


def _level_of(reason: Loss | int) -> int:
    """WARNING for lost legs; less for a client's mistake or an idle connection."""
    if reason is Loss.STALE:
        return logging.INFO
    return logging.DEBUG if isinstance(reason, int) and 400 <= reason < 500 else logging.WARNING
