"""The two legs of one client request, as a machine: (event, now) -> actions. No HTTP, no I/O, no clock.

A request is made in *attempts*. Each attempt has a prefill and a decode leg (or decode alone), which end together.
They start together, or one after the other if the dialect needs it (`Rules.handover`). The client gets decode's
answer. If prefill's leg streams, too, the faster leg sends output token 0, and the slower leg's copy is dropped.
Three rules, which the tests hold against random orders of events:
  1. the client gets exactly one final answer, unless it left;
  2. after the first byte there is no other attempt: a failure ends the stream with a typed error;
  3. when the machine is over, every started leg has ended, was cancelled or was let go.

`rules.py` maps failures of legs to reactions. Events of an earlier attempt are ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from msgspec import structs

from pdlink.errors import (
    DeadlineExceeded,
    NoWorker,
    Overloaded,
    PdlinkError,
    PeerLost,
    PeerNotAllowed,
    ProtocolError,
    WorkerKeyRefused,
)

from .openai import (
    error_body,
    error_code,
    excerpt,
    is_rejection,
    problem_of_answer,
    rejection,
    stream_error,
)
from .rules import News, Reaction, Rules
from .sse import ERROR_MARK, EventBuffer, EventTooLong, has_error, is_done, is_error, problem_of, rewritten
from .steps import (
    Action,
    Answered,
    Blame,
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
    Unplaced,
    Waits,
    Why,
)

# The client's error for a lost leg.
_ERROR_OF: dict[Loss, type[PdlinkError]] = {
    Loss.CONNECT: PeerLost,
    Loss.RESET: PeerLost,
    Loss.STALE: PeerLost,
    Loss.TIMEOUT: DeadlineExceeded,
    Loss.MALFORMED: ProtocolError,
    Loss.LOCAL: Overloaded,
    Loss.ERROR: ProtocolError,
    Loss.BARRED: WorkerKeyRefused,
    Loss.MISPAIRED: PeerNotAllowed,
}
_OF_THE_DEPLOYMENT = {
    Loss.BARRED: "the workers refuse this proxy's key; its operator must fix that",
    Loss.MISPAIRED: "the workers refuse each other's keys; their operator must fix that",
}
_THEN = {
    Reaction.ANSWER: "the client gets the error",
    Reaction.TELL_DECODE: "decode goes on without it",
    Reaction.RETRY: "tried again",
    Reaction.RESEND: "sent again",
    Reaction.BREAK: "the stream ends with an error",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, from `ProxyConfig`."""

    retries: int
    first_byte_s: float
    idle_s: float
    request_s: float
    decode_alone: bool = False
    """Decode may compute a prompt itself if prefill was lost (`on_no_prefill`)."""


@dataclass(slots=True)
class _LegState:
    worker: str
    since_s: float
    """Its last sign of life; its deadline counts from here."""
    running: bool = True
    ended_well: bool = False
    spoke: bool = False
    """Its first data event or whole answer is here."""
    events: EventBuffer = field(default_factory=EventBuffer)


class Flow:
    """One client request from Started to over."""

    def __init__(
        self, limits: Limits, now: float, rules: Rules | None = None, *, request_id: str = "", keyed: bool = True
    ) -> None:
        """request_id: for the client's errors, which do not name workers. keyed: the workers get the proxy's key, so
        a 401 is the proxy's fault; otherwise they get the client's."""
        self.attempt = 0
        self.first_leg: Leg | None = None
        """The leg whose token 0 the client got; None before the first byte."""
        self.outcome: Outcome | None = None
        """None until over."""
        self.prefill_spoke_s: float | None = None
        """Time of prefill's token in the newest attempt."""
        self._limits, self._rules = limits, rules or Rules()
        self._request_id, self._keyed = request_id, keyed
        self._request_deadline_s = now + limits.request_s
        self._waits: Waits | None = None
        """What it waits for, while it has no workers."""
        self._legs: dict[Leg, _LegState] = {}
        self._decode = ""
        """Decode's worker of this attempt."""
        self._prefill_answer = b""
        self._retries_left = limits.retries
        self._may_resend = True
        self._avoid: frozenset[str] = frozenset()
        self._last_failure: Respond | None = None
        self._error_passed = False

    @property
    def over(self) -> bool:
        return self.outcome is not None

    @property
    def deadline_s(self) -> float:
        """Time of the next Tick, on the clock of `now`; infinite when over."""
        if self.over:
            return math.inf
        deadline_s = min(self._request_deadline_s, self._waits.until_s if self._waits else math.inf)
        for leg in self._legs:
            deadline_s = min(deadline_s, self._deadline_of(leg))
        return deadline_s

    def on(self, event: Event, now: float) -> list[Action]:
        """The actions for `event`, in order."""
        if self.over:
            return []
        match event:
            case Chunk(attempt=attempt, leg=leg):
                return self._on_chunk(leg, event.data, now) if self._awaited(attempt, leg) else []
            case Ended(attempt=attempt, leg=leg):
                return self._on_ended(leg, now) if self._awaited(attempt, leg) else []
            case Answered(attempt=attempt, leg=leg):
                return self._on_answered(event, now) if self._awaited(attempt, leg) else []
            case Lost(attempt=attempt, leg=leg):
                if not self._awaited(attempt, leg):
                    return []
                self._legs[leg].running = False
                return self._on_lost(leg, event.loss, event.detail, now)
            case Started():
                return [Place(Why.FIRST, self._avoid)]
            case Placed():
                return self._on_placed(event, now)
            case Unplaced():
                return self._on_unplaced(event)
            case Waits():
                self._waits = event
                return []
            case ClientLeft():
                return self._finish(Outcome.CLIENT_LEFT, None)
            case Tick():
                return self._on_tick(now)
            case ShuttingDown():
                return self._give_up(NoWorker, "the proxy is shutting down")

    # ---- events

    def _on_unplaced(self, event: Unplaced) -> list[Action]:
        if self._last_failure is not None:
            return self._finish(Outcome.FAILED, self._last_failure)
        if event.barred:
            failure = self._failure(WorkerKeyRefused, _OF_THE_DEPLOYMENT[Loss.BARRED])
            return self._finish(Outcome.FAILED, failure)
        if event.full:
            body = error_body(self._with_id(event.message), kind="rate_limit_error", code=Overloaded.code)
            return self._finish(Outcome.UNAVAILABLE, Respond(429, body))
        return self._finish(Outcome.UNAVAILABLE, self._failure(NoWorker, event.message))

    def _on_placed(self, event: Placed, now: float) -> list[Action]:
        self.attempt += 1
        self._waits = None
        self._legs, self._decode = {}, event.decode
        self._prefill_answer, self.prefill_spoke_s = b"", None
        if event.prefill is None or self._rules.handover is None:
            self._legs[Leg.DECODE] = _LegState(event.decode, now)
        if event.prefill is not None:
            self._legs[Leg.PREFILL] = _LegState(event.prefill, now)
        return [StartLegs(self.attempt, event.prefill, event.decode)]

    def _on_chunk(self, leg: Leg, data: bytes, now: float) -> list[Action]:
        state = self._legs[leg]
        if leg is Leg.PREFILL and state.spoke:
            return []  # only its first event counts
        if state.spoke:
            state.since_s = now
        forward = b""
        try:
            if state.spoke:
                forward = state.events.pass_whole_events(data)
            else:
                state.events.feed(data)
                event = state.events.take_first_data_event()
                if event is None:
                    return []
                problem = problem_of(event)
                if problem is not None:
                    return self._malformed(leg, *problem, now)
                state.spoke, state.since_s = True, now
                if leg is Leg.PREFILL:
                    self.prefill_spoke_s = now
                if self.first_leg is None:
                    self.first_leg = leg
                    forward = event
                if leg is Leg.DECODE:
                    forward += state.events.take_whole_events()
        except EventTooLong as error:
            return self._malformed(leg, str(error), b"", now)
        if not forward:
            return []
        blames: list[Action] = []
        if leg is Leg.DECODE:
            if Leg.PREFILL in self._legs:
                forward = self._rules.merge_events(self._prefill_answer, forward)
            if has_error(forward):
                forward, blames = self._in_our_words(forward)
            if is_done(forward):
                # Do not wait for the end of the HTTP body: a worker that dies now has lost nothing.
                return [*blames, Forward(forward), *self._finish_stream()]
        return [*blames, Forward(forward)]

    def _in_our_words(self, events: bytes) -> tuple[bytes, list[Action]]:
        """Decode's events with its errors rewritten for clients, and the blame for the errors."""
        blames: list[Action] = []

        def rewrite(document: bytes) -> bytes:
            if not is_error(document):
                return document
            blames.append(Blame(self.attempt, Leg.DECODE, Loss.ERROR, excerpt(document), "the client gets the error"))
            if is_rejection(document):
                return rejection(400, document)
            message = self._with_id("decode worker failed in the middle of its answer")
            return error_body(message, kind="stream_error", code=error_code(document))

        events = rewritten(events, ERROR_MARK, rewrite)
        self._error_passed = self._error_passed or bool(blames)
        return events, blames

    def _on_ended(self, leg: Leg, now: float) -> list[Action]:
        state = self._legs[leg]
        state.running = False
        if leg is Leg.PREFILL and state.spoke:
            state.ended_well = True
            return []
        rest = state.events.take_rest()
        if leg is Leg.DECODE and state.spoke and is_done(rest):
            # Only the blank line after the last event is missing; without it the client would not see the event.
            return [Forward(rest.rstrip(b"\r\n") + b"\n\n"), *self._finish_stream()]
        return self._on_lost(leg, Loss.MALFORMED, "the stream ended early", now)

    def _on_answered(self, event: Answered, now: float) -> list[Action]:
        state = self._legs[event.leg]
        state.running = False
        if 200 <= event.status < 300:
            if problem := problem_of_answer(event.content_type, event.body):
                return self._on_lost(event.leg, Loss.MALFORMED, f"{problem}: {excerpt(event.body)}", now)
            state.spoke = state.ended_well = True
            answer = Respond(event.status, event.body)
            if event.leg is Leg.PREFILL:
                return self._on_prefilled(event.body, now)
            if Leg.PREFILL in self._legs:
                answer = structs.replace(answer, body=self._rules.merge_answer(self._prefill_answer, event.body))
            return self._finish(Outcome.OK, answer)
        return self._on_bad_status(event, now)

    def _on_bad_status(self, event: Answered, now: float) -> list[Action]:
        leg, status, code = event.leg, event.status, error_code(event.body)
        summary = f"{leg.value} worker answered {status}"
        detail = f"it answered {status}: {excerpt(event.body)}"
        if status == 403 and code == PeerNotAllowed.code:
            return self._on_lost(leg, Loss.MISPAIRED, detail, now)
        if status in (401, 403) and self._keyed:
            return self._on_lost(leg, Loss.BARRED, detail, now)
        if 400 <= status < 500:
            answer = Respond(status, rejection(status, event.body))
            return self._react(leg, News.REJECTED, status, answer, summary, detail, now)
        if leg is Leg.PREFILL:  # its engine's message is for the operator, not for the client
            answer = self._failure(PeerLost, summary)
        elif status < 400:  # following a redirect would send the prompt to any address the worker names
            answer = self._failure(ProtocolError, summary)
        else:
            answer = Respond(status, error_body(self._with_id(summary), kind="server_error", code=code))
        news = News.LOST if status in self._rules.lost_statuses else News.FAILED
        return self._react(leg, news, status, answer, summary, detail, now)

    def _on_prefilled(self, answer: bytes, now: float) -> list[Action]:
        self._prefill_answer, self.prefill_spoke_s = answer, now
        if self._rules.handover is None:
            return []
        params = self._rules.handover(answer)
        if params is None:
            self._legs[Leg.PREFILL].ended_well = False
            return self._on_lost(Leg.PREFILL, Loss.MALFORMED, "its answer is not a JSON object", now)
        self._legs[Leg.DECODE] = _LegState(self._decode, now)
        return [StartDecode(self.attempt, params)]

    def _on_lost(self, leg: Leg, loss: Loss, detail: str, now: float) -> list[Action]:
        summary = _OF_THE_DEPLOYMENT.get(loss, f"{leg.value} worker lost ({loss.value})")
        news = News.STALE if loss is Loss.STALE else News.LOST
        return self._react(leg, news, loss, self._failure(_ERROR_OF[loss], summary), summary, detail, now)

    def _malformed(self, leg: Leg, message: str, document: bytes, now: float) -> list[Action]:
        """A running leg sent something other than tokens."""
        cancel = self._cancel(leg)
        summary = f"{leg.value} worker: {message}"
        code = error_code(document) if document else ProtocolError.code
        answer = Respond(
            ProtocolError.http_status, error_body(self._with_id(summary), kind="server_error", code=code)
        )
        detail = f"{message}: {excerpt(document)}" if document else message
        return [*cancel, *self._react(leg, News.LOST, Loss.MALFORMED, answer, summary, detail, now)]

    def _on_tick(self, now: float) -> list[Action]:
        if now >= self._request_deadline_s:
            return self._give_up(DeadlineExceeded, f"no answer within {self._limits.request_s:g} s")
        if self._waits is not None and now >= self._waits.until_s:
            return self._on_unplaced(Unplaced(self._waits.message))
        actions: list[Action] = []
        for leg in Leg:
            if not self.over and now >= self._deadline_of(leg):
                silent_s = now - self._legs[leg].since_s
                actions += self._cancel(leg)
                actions += self._on_lost(leg, Loss.TIMEOUT, f"silent for {silent_s:.3g} s", now)
        return actions

    # ---- reactions

    def _react(
        self, leg: Leg, news: News, reason: Loss | int, answer: Respond, summary: str, detail: str, now: float
    ) -> list[Action]:
        """answer: the client's, if this failure decides the request. summary: the same as a sentence, for a stream
        that has begun. detail: for the log."""
        before, after = self._rules.reactions[leg, news]
        reaction = before if self.first_leg is None else after
        if reaction is Reaction.RESEND and not self._may_resend:
            reaction = self._rules.reactions[leg, News.LOST][0]
        alone = False
        if reaction is Reaction.RETRY and self._retries_left == 0:
            alone = leg is Leg.PREFILL and self._limits.decode_alone  # once: this attempt has no prefill leg to lose
            reaction = Reaction.RETRY if alone else Reaction.ANSWER
        blame = Blame(self.attempt, leg, reason, detail, _THEN[reaction])
        match reaction:
            case Reaction.TELL_DECODE:
                return [blame, *self._tell_decode(summary, now)]
            case Reaction.RESEND:
                self._may_resend = False
                return [blame, *self._again(Why.RESEND, answer)]
            case Reaction.RETRY:
                self._retries_left -= not alone
                self._avoid |= self._to_avoid(leg, reason)
                return [blame, *self._again(Why.RETRY, answer, alone=alone)]
            case Reaction.ANSWER:
                outcome = Outcome.REJECTED if news is News.REJECTED else Outcome.FAILED
                return [blame, *self._finish(outcome, answer)]
            case Reaction.BREAK:
                code = error_code(answer.body)
                end = EndStream(stream_error(self._with_id(summary), code=code))
                return [blame, *self._finish(Outcome.BROKEN, end)]

    def _tell_decode(self, reason: str, now: float) -> list[Action]:
        decode = self._legs[Leg.DECODE]
        if decode.spoke:
            return []  # it has its KV, or has recomputed it
        decode.since_s = now  # recomputing gets the full deadline
        return [TellToStop(self.attempt, Leg.DECODE, reason)]

    def _again(self, why: Why, failure: Respond, *, alone: bool = False) -> list[Action]:
        self._last_failure = failure
        actions = self._end_legs()
        self._legs = {}
        return [*actions, Place(why, self._avoid, alone)]

    def _to_avoid(self, leg: Leg, reason: Loss | int) -> frozenset[str]:
        """Workers to avoid in the next attempt, after this leg was lost."""
        if reason is Loss.MISPAIRED:
            return frozenset()  # each is healthy; the pair does not fit
        if leg is Leg.PREFILL:
            return frozenset({self._legs[leg].worker})
        decode, prefill = self._legs[Leg.DECODE], self._legs.get(Leg.PREFILL)
        if prefill is None:
            return frozenset({decode.worker})
        prefill_failed = not prefill.running and not prefill.ended_well
        if reason == self._rules.no_kv_status:
            # Decode is healthy but did not get its KV: either end of the link may be at fault, unless prefill has
            # failed, too.
            return frozenset({prefill.worker} if prefill_failed else {prefill.worker, decode.worker})
        return frozenset({prefill.worker, decode.worker} if prefill_failed else {decode.worker})

    # ---- ends

    def _finish(self, outcome: Outcome, final: Respond | EndStream | None) -> list[Action]:
        actions = self._end_legs() if outcome is not Outcome.OK else self._let_go()
        self.outcome = outcome
        return actions if final is None else [*actions, final]

    def _finish_stream(self) -> list[Action]:
        actions = self._let_go()
        self.outcome = Outcome.BROKEN if self._error_passed else Outcome.OK
        return [*actions, EndStream(b"")]

    def _give_up(self, error: type[PdlinkError], message: str) -> list[Action]:
        if self.first_leg is None:
            return self._finish(Outcome.FAILED, self._failure(error, message))
        return self._finish(Outcome.BROKEN, EndStream(stream_error(self._with_id(message), code=error.code)))

    def _cancel(self, leg: Leg) -> list[Action]:
        self._legs[leg].running = False
        return [CancelLeg(self.attempt, leg)]

    def _end_legs(self) -> list[Action]:
        """The attempt is over and did not succeed."""
        actions: list[Action] = []
        prefill, decode = self._legs.get(Leg.PREFILL), self._legs.get(Leg.DECODE)
        untold = self._rules.untold
        for leg, state in self._legs.items():
            if state.running:
                actions += self._cancel(leg)
        if not untold and prefill is not None and prefill.ended_well and decode is not None and not decode.spoke:
            # Its connection is closed already, so closing cannot tell it that no receiver will come: decode may have
            # ended before it knew of the transfer.
            actions.append(TellToStop(self.attempt, Leg.PREFILL, "decode ended without taking the KV"))
        return actions

    def _let_go(self) -> list[Action]:
        return [LetGo(self.attempt, leg) for leg, state in self._legs.items() if state.running]

    # ---- facts

    def _awaited(self, attempt: int, leg: Leg) -> bool:
        state = self._legs.get(leg)
        return attempt == self.attempt and state is not None and state.running

    def _deadline_of(self, leg: Leg) -> float:
        state = self._legs.get(leg)
        if state is None or not state.running or (leg is Leg.PREFILL and state.spoke):
            return math.inf
        return state.since_s + (self._limits.idle_s if state.spoke else self._limits.first_byte_s)

    def _failure(self, error: type[PdlinkError], summary: str) -> Respond:
        status = (
            error.http_status if error.http_status >= 500 else 502
        )  # an error of the deployment, not of the client
        return Respond(status, error_body(self._with_id(summary), kind="server_error", code=error.code))

    def _with_id(self, summary: str) -> str:
        """A message with the request's id, under which the log has the details."""
        return f"{summary} (request {self._request_id[:128]})" if self._request_id else summary
