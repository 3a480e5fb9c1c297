"""The two legs of one client request, as a machine: (event, now) -> actions. No HTTP, no I/O, no clock.

A request is made in *attempts*. Each attempt has a prefill and a decode leg (or decode alone), which end together.
They start together, or one after the other if the dialect needs it (`Rules.handover`). The client gets decode's
answer. If prefill's leg streams, too, the faster leg sends output token 0, and the slower leg's copy is dropped.
Three rules, which the tests hold against random orders of events:
  1. the client gets exactly one final answer, unless it left;
  2. after the first byte there is another attempt only if the stream can go on behind it (`recovery.py`): otherwise a
     failure ends the stream with a typed error;
  3. when the machine is over, every started leg has ended, was cancelled or was let go.

`rules.py` maps failures of legs to reactions. Events of an earlier attempt are ignored.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pdlink._http import ANYTHING, CACHED, DONE, ERROR, FAILED, FINISH, NAMED, first_data_event, is_answer, marks_of
from pdlink.api.errors import error_code, excerpt, is_rejection
from pdlink.api.sse import (
    FAILURES,
    EventBuffer,
    EventTooLong,
    before_end,
    before_finish_error,
    fails,
    has_named,
    is_done,
    problem_of,
    until_error,
)
from pdlink.errors import (
    DeadlineExceeded,
    NoWorker,
    PdlinkError,
    PeerNotAllowed,
)

from . import usage
from .client_words import BROKEN, ClientWords
from .records import Try
from .recovery import Diverged
from .rules import News, Reaction, Rules
from .steps import (
    DECODE,
    PREFILL,
    Action,
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
    StartLegs,
    TellToStop,
    Tick,
    Unplaced,
    Waits,
    Why,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .recovery import Recovery

_LOOK = ERROR | FAILED | DONE
"""Marks of events that are more than tokens."""
_NO_FINISH = "the stream ended without a finish_reason"
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


class LegState(msgspec.Struct):
    """What the flow knows of a leg."""

    worker: str
    since_s: float
    """Its last sign of life; its deadline counts from there."""
    running: bool = True
    ended_well: bool = False
    spoke: bool = False
    """Its first data event or whole answer is here."""
    ends: bool = False
    """Its last word is here, though perhaps not judged yet: there is nothing to cancel."""
    buffer: EventBuffer | None = None
    """From when its stream came with an event in pieces."""


class Flow:
    """One client request from the answer to `FIRST` to over."""

    attempts = 0
    """Their number, which is that of the newest one."""
    first_leg: Leg | None = None
    """The leg of the newest attempt from which the client got the first event; None before that."""
    outcome: Outcome | None = None
    """None until over."""
    said = b""
    """Decode's newest events that may say how its KV came, as they came."""
    look = _LOOK
    """Marks of decode's events that are judged here. Others go to the client as they are."""
    hastened_s = math.inf
    """`deadline_s` may have come as near as this; the caller sets it back."""
    _begun = False
    """The client has a part of the answer."""
    _waits: Waits | None = None
    """What it waits for, while it has no workers."""
    _decode = ""
    """Decode's worker of this attempt."""
    _prefill_answer = b""
    _may_resend = True
    _avoid: frozenset[str] = frozenset()
    _last_failure: Respond | None = None
    _error_passed = False

    def __init__(
        self,
        limits: Limits,
        now: float,
        rules: Rules | None = None,
        *,
        request_id: str = "",
        keyed: bool = True,
        recovery: Recovery | None = None,
        last_events: tuple[bytes, ...] = (),
    ) -> None:
        """request_id: for the client's errors, which do not name workers. keyed: the workers get the proxy's key, so
        a 401 is the proxy's fault; otherwise they get the client's. recovery: of a stream that may go on.
        last_events: of `openai.LAST_EVENTS`."""
        self._recovery = recovery
        self.tries = [Try(now)]
        """Times of its attempts; the newest one is last."""
        self._limits, self._rules = limits, rules or Rules()
        self._request_id, self._keyed = request_id, keyed
        self._last_events = last_events
        self._request_deadline_s = now + limits.request_s
        self._legs: dict[Leg, LegState] = {}
        self._kept: list[tuple[Chunk | Ended | Answered, float]] = []
        """Of decode legs whose prefill has not answered (`Rules.awaits_prefill`), and when they came."""
        self._retries_left = limits.retries
        self._finished = bool(last_events)
        """The client has a finish_reason, or such streams have none."""

    @property
    def _words(self) -> ClientWords:
        """For its client, if something fails."""
        return ClientWords(self._request_id, named=bool(self._last_events))

    @property
    def over(self) -> bool:
        return self.outcome is not None

    @property
    def deadline_s(self) -> float:
        """Time of the next Tick, on the clock of `now`; infinite when over."""
        if self.outcome is not None:
            return math.inf
        deadline_s = self._request_deadline_s
        if self._waits is not None:
            deadline_s = min(deadline_s, self._waits.until_s)
        limits = self._limits
        for leg, state in self._legs.items():  # as `_deadline_of`, without its calls
            if state.running and not (leg is PREFILL and state.spoke):
                due_s = state.since_s + (limits.idle_s if state.spoke else limits.first_byte_s)
                if due_s < deadline_s:
                    deadline_s = due_s
        return deadline_s

    def on(self, event: Event, now: float) -> list[Action]:
        """The actions for `event`, in order."""
        return [] if self.outcome is not None else _REACTIONS[type(event)](self, event, now)

    def passes(self, attempt: int, leg: Leg) -> bool:
        """Whether whole events of this leg without marks of `look` go to the client as they are, and nothing else
        follows: `on` of their Chunk would give one Forward of them. For most events of a stream this is all there is
        to decide."""
        state = self._legs.get(leg)
        return (
            leg is DECODE
            and state is not None
            and state.spoke
            and state.running
            and attempt == self.attempts
            and self.outcome is None
            and (state.buffer is None or state.buffer.is_empty)
            and not self.look & ANYTHING
        )

    def passed(self, data: bytes, now: float, *, finished: bool) -> None:
        """Such events of decode's went to the client. finished: with a finish_reason."""
        self._legs[DECODE].since_s = now
        self._finished = self._finished or finished
        if self._recovery is not None:
            self._recovery.sent.add(data)

    # ---- events

    def _of_ended(self, event: Ended, now: float) -> list[Action]:
        leg = event.leg
        state = self._legs.get(leg) if event.attempt == self.attempts else None
        if state is None or not state.running or (self._rules.awaits_prefill and self._keeps(event, now)):
            return []
        if not event.data:
            return self._on_ended(leg, now)
        state.ends = True
        actions = self._on_chunk(event, now)
        if self.outcome is None and self._awaited(event.attempt, leg):
            actions += self._on_ended(leg, now)
        return actions

    def _of_lost(self, event: Lost, now: float) -> list[Action]:
        if not self._awaited(event.attempt, event.leg):
            return []
        self._legs[event.leg].running = False
        return self._on_lost(event.leg, event.loss, event.detail, now)

    def _of_waits(self, event: Waits, _now: float) -> list[Action]:
        self._waits, self.hastened_s = event, min(event.until_s, self._request_deadline_s)
        return []

    def _of_client_left(self, _event: ClientLeft, _now: float) -> list[Action]:
        return self._finish(Outcome.CLIENT_LEFT, None)

    def _of_shutting_down(self, _event: ShuttingDown, _now: float) -> list[Action]:
        return self._give_up(NoWorker, "the proxy is shutting down")

    def _on_unplaced(self, event: Unplaced, _now: float = 0.0) -> list[Action]:
        if self._last_failure is not None:
            return self._finish(Outcome.FAILED, self._last_failure)
        return self._finish(*self._words.unplaced(event))

    def _on_placed(self, event: Placed, now: float) -> list[Action]:
        self.attempts += 1
        self._waits, self.hastened_s = None, min(now + self._limits.first_byte_s, self._request_deadline_s)
        self._legs, self._decode = {}, event.decode
        self._prefill_answer, self.tries[-1].placed_s = b"", now
        at_once = self._rules.handover is None
        look = _LOOK | NAMED if self._last_events else _LOOK
        if event.prefill is not None:
            look |= CACHED | self._rules.marks
        if self._recovery is not None and self._recovery.joins:
            look |= ANYTHING
        self.look = look
        if event.prefill is None or at_once:
            self._legs[DECODE] = LegState(event.decode, now)
        if event.prefill is not None:
            self._legs[PREFILL] = LegState(event.prefill, now)
        return [StartLegs(self.attempts, event.prefill, decode=event.decode, at_once=at_once)]

    def _on_chunk(self, event: Chunk | Ended, now: float) -> list[Action]:
        leg, data = event.leg, event.data
        state = self._legs.get(leg) if event.attempt == self.attempts else None
        if state is None or not state.running or (self._rules.awaits_prefill and self._keeps(event, now)):
            return []
        forward, events, buffer = b"", data, state.buffer
        try:
            if buffer is not None or not data.endswith(b"\n\n"):
                buffer = state.buffer = buffer or EventBuffer()
                events = buffer.pass_whole_events(data)
            if leg is PREFILL and state.spoke:
                self._hear_cached(events)
            elif state.spoke:
                state.since_s = now
                forward = events
            else:
                if (found := first_data_event(events)) is None:
                    return []
                begin, end, is_token = found
                if not is_token and (problem := problem_of(events[begin:end])) is not None:
                    return self._malformed(leg, *problem, now)
                state.spoke, state.since_s = True, now
                self.hastened_s = min(now + self._limits.idle_s, self._request_deadline_s)
                if leg is PREFILL:
                    self.tries[-1].prefill_s = now
                else:
                    self.tries[-1].decode_s = now
                if leg is PREFILL:
                    self._hear_cached(events[end:])
                if self.first_leg is None:
                    self.first_leg = leg
                    forward = events[begin:] if leg is DECODE else events[begin:end]
                elif leg is DECODE:
                    forward = events[end:]
        except EventTooLong as error:
            return self._malformed(leg, str(error), b"", now)
        if not forward:
            return []
        look = self.look | FINISH
        marks = marks_of(forward, look)
        if not marks:
            return self._to_client(forward)
        blames: list[Action] = []
        if leg is DECODE and PREFILL in self._legs:
            if marks & self._rules.marks:
                self.said = forward if self._rules.says_kv else b""
                forward = self._rules.merge_events(self._prefill_answer, forward)
                marks = marks_of(forward, look)
            if marks & CACHED:
                forward = usage.merged_events(self._prefill_answer, forward)
        if leg is DECODE and (marks & ERROR or (marks & NAMED and has_named(forward, FAILURES))):
            if self._recovery is not None and (cut := until_error(forward)) and not is_rejection(cut[1]):
                return self._broken_by(*cut, now)
            forward, errors = self._words.in_our_words(forward)
            marks = marks_of(forward, look)
            self._error_passed = self._error_passed or bool(errors)
            then = _THEN[Reaction.ANSWER]
            blames += [
                BlameLeg(self.attempts, DECODE, reason=reason, detail=text, then=then) for reason, text in errors
            ]
        if self._recovery is not None and self._recovery.joins:
            try:
                forward = self._recovery.join(forward)
            except Diverged as error:
                return self._malformed(leg, str(error), b"", now, Loss.DIVERGED)
            if not forward:
                return blames
            marks = marks_of(forward, look)
        if marks & FINISH and not self._last_events:
            if marks & FAILED and (cut := before_finish_error(forward))[1]:
                before, failed = cut
                return self._failed_by(
                    leg, before, Loss.ERROR, "its answer ended with finish_reason error", failed, now
                )
            self._finished = True
        if leg is DECODE and marks & NAMED and has_named(forward, FAILURES):
            self._error_passed = True
            detail = excerpt(forward)
            blames = [
                *blames,
                BlameLeg(self.attempts, DECODE, reason=Loss.ERROR, detail=detail, then=_THEN[Reaction.ANSWER]),
            ]
        if leg is DECODE and (self._is_last(forward) if self._last_events else marks & DONE):
            if not (self._finished or self._error_passed):
                return self._failed_by(leg, before_end(forward), Loss.MALFORMED, _NO_FINISH, b"", now)
            # Do not wait for the end of the HTTP body: a worker that dies now has lost nothing.
            return [*blames, *self._finish_stream(forward)]
        return [*blames, *self._to_client(forward)]

    def _hear_cached(self, events: bytes) -> None:
        """Of prefill's events after its first one only what they tell of cached tokens counts."""
        self._prefill_answer = usage.told_cached(events) or self._prefill_answer

    def _to_client(self, events: bytes) -> list[Action]:
        if not events:
            return []
        self._begun = True
        if self._recovery is not None:
            self._recovery.sent.add(events)
        return [Forward(events)]

    def _broken_by(self, events: bytes, document: bytes, now: float) -> list[Action]:
        """Decode sent these events, and then an error in place of the rest."""
        if self._recovery is not None and self._recovery.joins:
            try:
                events = self._recovery.join(events)
            except Diverged as error:
                return self._malformed(DECODE, str(error), b"", now, Loss.DIVERGED)
        sent, cancel = self._to_client(events), self._cancel(DECODE)
        answer = self._words.broken(document)
        blame, *rest = self._react(DECODE, News.LOST, Loss.ERROR, answer, BROKEN, excerpt(document), now)
        return [*sent, blame, *cancel, *rest]

    def _failed_by(
        self, leg: Leg, events: bytes, loss: Loss, message: str, document: bytes, now: float
    ) -> list[Action]:
        """A leg sent these events, and then an end that no answer has. A client that has nothing yet gets none
        of them: another attempt may give the whole answer."""
        if not self._begun:
            events, self.first_leg = b"", None
        sent = self._to_client(events)
        return [*sent, *self._malformed(leg, message, document, now, loss)]

    def _on_ended(self, leg: Leg, now: float) -> list[Action]:
        state = self._legs[leg]
        state.running = False
        if leg is PREFILL and state.spoke:
            state.ended_well = True
            return []
        rest = state.buffer.take_rest() if state.buffer is not None else b""
        told = self._finished or self._error_passed
        if leg is DECODE and state.spoke and self._is_last(rest) and told:
            # Only the blank line after the last event is missing; without it the client would not see the event.
            forward = rest.rstrip(b"\r\n") + b"\n\n"
            return self._finish_stream(forward)
        detail = _NO_FINISH if self._is_last(rest) else "the stream ended early"
        return self._on_lost(leg, Loss.MALFORMED, detail, now)

    def _on_answered(self, event: Answered, now: float) -> list[Action]:
        leg, status, body = event.leg, event.status, event.body
        state = self._legs.get(leg) if event.attempt == self.attempts else None
        if state is None or not state.running:
            return []
        if not 200 <= status < 300:  # also before prefill's answer: that may wait for decode
            state.running = False
            return self._on_bad_status(event, now)
        if self._rules.awaits_prefill and self._keeps(event, now):
            return []
        state.running = False
        marks = marks_of(body, self.look)
        problem = ""
        if event.content_type != "application/json":
            problem = "the answer's type is not application/json"
        elif not is_answer(body):
            problem = "the answer is not a JSON object of its kind"
        elif marks & FAILED and fails(body):
            problem = "the answer ended with finish_reason error"
        if problem:
            return self._on_lost(leg, Loss.MALFORMED, f"{problem}: {excerpt(body)}", now)
        state.spoke = state.ended_well = True
        if leg is PREFILL:
            self._prefill_answer, self.tries[-1].prefill_s = body, now
            return self._on_prefilled(now) if self._rules.awaits_prefill or self._rules.handover else []
        self.tries[-1].decode_s = now
        if PREFILL in self._legs:
            if marks & self._rules.marks:
                body = self._rules.merge_answer(self._prefill_answer, body)
            if marks & CACHED:
                body = usage.merged(self._prefill_answer, body)
        return self._finish(Outcome.OK, Respond(status, body))

    def _keeps(self, event: Chunk | Ended | Answered, now: float) -> bool:
        """Whether decode's event waits for prefill's answer, with `Rules.awaits_prefill`."""
        prefill = self._legs.get(PREFILL)
        keeps = event.leg is DECODE and prefill is not None and prefill.running
        if keeps:
            self._kept.append((event, now))
            self._legs[DECODE].ends = not isinstance(event, Chunk)
        return keeps

    def _on_bad_status(self, event: Answered, now: float) -> list[Action]:
        leg, status = event.leg, event.status
        said = excerpt(event.body)
        detail = f"it answered {status}: {said}"
        if status == 403 and error_code(event.body) == PeerNotAllowed.code:
            return self._on_lost(leg, Loss.MISPAIRED, detail, now)
        if status in (401, 403) and self._keyed:
            return self._on_lost(leg, Loss.BARRED, detail, now)
        answer, summary = self._words.answered(leg, status, event.body)
        if leg is PREFILL and self._rules.prefill_may_misread and status <= 500:
            blame = BlameLeg(self.attempts, leg, reason=status, detail=said, then="decode's answer decides")
            if DECODE in self._legs:
                return [blame]
            if self._limits.decode_alone:
                return [blame, *self._again(Why.RETRY, answer, now, alone=True)]
        lost = News.LOST if status in self._rules.lost_statuses else News.FAILED
        news = News.REJECTED if 400 <= status < 500 else lost
        return self._react(leg, news, status, answer, summary, said, now)

    def _on_prefilled(self, now: float) -> list[Action]:
        """Decode has waited for its answer."""
        if self._rules.awaits_prefill:
            kept, self._kept = self._kept, []
            of, actions = self.tries[-1], list[Action]()
            for event, came_s in kept:
                actions += self.on(event, now)  # what follows, and deadlines, count from now
                if of.decode_s == now:
                    of.decode_s = came_s
            return _joined(actions)
        if self._rules.handover is None or DECODE in self._legs:
            return []
        params = self._rules.handover(self._prefill_answer)
        if params is None:
            self._legs[PREFILL].ended_well = False
            return self._on_lost(PREFILL, Loss.MALFORMED, "its answer is not a JSON object", now)
        self._legs[DECODE] = LegState(self._decode, now)
        return [StartDecode(self.attempts, params)]

    def _on_lost(self, leg: Leg, loss: Loss, detail: str, now: float) -> list[Action]:
        answer, summary = self._words.lost(leg, loss)
        return self._react(leg, News.STALE if loss is Loss.STALE else News.LOST, loss, answer, summary, detail, now)

    def _malformed(
        self, leg: Leg, message: str, document: bytes, now: float, loss: Loss = Loss.MALFORMED
    ) -> list[Action]:
        """A running leg sent something other than tokens, or other ones."""
        cancel = self._cancel(leg)
        summary = f"{leg.value} worker: {message}"
        answer = self._words.malformed(summary, document)
        detail = f"{message}: {excerpt(document)}" if document else message
        blame, *rest = self._react(leg, News.LOST, loss, answer, summary, detail, now)
        return [blame, *cancel, *rest]

    def _on_tick(self, _event: Tick, now: float) -> list[Action]:
        if now >= self._request_deadline_s:
            return self._give_up(DeadlineExceeded, f"no answer within {self._limits.request_s:g} s")
        if self._waits is not None and now >= self._waits.until_s:
            return self._on_unplaced(Unplaced(self._waits.message))
        actions: list[Action] = []
        number = self.attempts
        for leg in Leg:
            if self.over or not self._awaited(number, leg):
                continue
            state = self._legs[leg]
            if now >= self._deadline_of(leg, state):
                cancel = self._cancel(leg)
                blame, *rest = self._on_lost(leg, Loss.TIMEOUT, f"silent for {now - state.since_s:.3g} s", now)
                actions += [blame, *cancel, *rest]
        return actions

    # ---- reactions

    def _react(
        self, leg: Leg, news: News, reason: Loss | int, answer: Respond, summary: str, detail: str, now: float
    ) -> list[Action]:
        """First the Blame. answer: the client's, if this failure decides the request. summary: the same as a
        sentence, for a stream that has begun. detail: for the log."""
        before, after = self._rules.reactions[leg, news]
        reaction = before if self.first_leg is None else after
        lost_stream = self._begun and reaction in (Reaction.RETRY, Reaction.BREAK) and news is not News.REJECTED
        if reaction is Reaction.RESEND and not self._may_resend:
            reaction = self._rules.reactions[leg, News.LOST][0]
        why = ""
        if lost_stream and self._recovery is not None:
            refusal = self._recovery.go_on()
            if not refusal:
                self._avoid |= self._to_avoid(leg, reason)
                then = "the stream goes on elsewhere"
                return [
                    BlameLeg(self.attempts, leg, reason=reason, detail=detail, then=then),
                    *self._again(Why.RECOVER, answer, now),
                ]
            why = f"; the stream cannot go on elsewhere: {refusal}"
            summary += why
        if lost_stream:
            reaction = Reaction.BREAK
        alone = False
        if reaction is Reaction.RETRY and self._retries_left == 0:
            alone = leg is PREFILL and self._limits.decode_alone  # once: this attempt has no prefill leg to lose
            reaction = Reaction.RETRY if alone else Reaction.ANSWER
        blame = BlameLeg(self.attempts, leg, reason=reason, detail=detail, then=_THEN[reaction] + why)
        match reaction:
            case Reaction.TELL_DECODE:
                return [blame, *self._tell_decode(summary, now)]
            case Reaction.RESEND:
                self._may_resend = False
                return [blame, *self._again(Why.RESEND, answer, now)]
            case Reaction.RETRY:
                self._retries_left -= not alone
                self._avoid |= self._to_avoid(leg, reason)
                return [blame, *self._again(Why.RETRY, answer, now, alone=alone)]
            case Reaction.ANSWER:
                outcome = Outcome.REJECTED if news is News.REJECTED else Outcome.FAILED
                return [blame, *self._finish(outcome, answer)]
            case Reaction.BREAK:
                end = self._words.end(summary, error_code(answer.body))
                return [blame, *self._finish(Outcome.BROKEN, end)]

    def _tell_decode(self, reason: str, now: float) -> list[Action]:
        decode = self._legs[DECODE]
        if decode.spoke:
            return []  # it has its KV, or has recomputed it
        decode.since_s = now  # recomputing gets the full deadline
        return [TellToStop(self.attempts, DECODE, reason)]

    def _again(self, why: Why, failure: Respond, now: float, *, alone: bool = False) -> list[Action]:
        self._last_failure = failure
        self.tries.append(Try(now))
        actions = self._end_legs()
        self._legs, self.first_leg = {}, None
        return [*actions, Place(why, self._avoid, alone)]

    def _to_avoid(self, leg: Leg, reason: Loss | int) -> frozenset[str]:
        """Workers to avoid in the next attempt, after this leg was lost."""
        if reason is Loss.MISPAIRED:
            return frozenset()  # each is healthy; the pair does not fit
        if leg is PREFILL:
            return frozenset({self._legs[leg].worker})
        decode, prefill = self._legs[DECODE], self._legs.get(PREFILL)
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
        actions: list[Action] = []
        if outcome is not Outcome.OK:
            actions = self._end_legs()
        else:
            for leg, state in self._legs.items():
                if state.running and not state.ends:
                    actions.append(LetGo(self.attempts, leg))  # noqa: PERF401 -- a comprehension is a call
        if self._begun and isinstance(final, Respond):  # of an attempt to go on
            final, outcome = self._words.as_end(final), Outcome.BROKEN
        self.outcome = outcome
        return actions if final is None else [*actions, final]

    def _finish_stream(self, last: bytes) -> list[Action]:
        actions = self._finish(Outcome.OK, EndStream(last))
        if self._error_passed:
            self.outcome = Outcome.BROKEN
        return actions

    def _give_up(self, error: type[PdlinkError], message: str) -> list[Action]:
        if not self._begun:
            return self._finish(Outcome.FAILED, self._words.failure(error, message))
        return self._finish(Outcome.BROKEN, self._words.end(message, error.code))

    def _cancel(self, leg: Leg) -> list[Action]:
        state = self._legs[leg]
        state.running = False
        return [] if state.ends else [CancelLeg(self.attempts, leg)]

    def _end_legs(self) -> list[Action]:
        """The attempt is over and did not succeed."""
        actions: list[Action] = []
        prefill, decode = self._legs.get(PREFILL), self._legs.get(DECODE)
        untold = self._rules.untold
        for leg, state in self._legs.items():
            if state.running:
                actions += self._cancel(leg)
        if not untold and prefill is not None and prefill.ended_well and decode is not None and not decode.spoke:
            # Its connection is closed already, so closing cannot tell it that no receiver will come: decode may have
            # ended before it knew of the transfer.
            actions.append(TellToStop(self.attempts, PREFILL, "decode ended without taking the KV"))
        return actions

    # ---- facts

    def _is_last(self, events: bytes) -> bool:
        """Whether the stream ends with these whole events."""
        return has_named(events, self._last_events) if self._last_events else is_done(events)

    def _awaited(self, attempt: int, leg: Leg) -> bool:
        """Whether an event of this leg is news."""
        return attempt == self.attempts and (state := self._legs.get(leg)) is not None and state.running

    def _deadline_of(self, leg: Leg, state: LegState) -> float:
        if not state.running or (leg is PREFILL and state.spoke):
            return math.inf
        return state.since_s + (self._limits.idle_s if state.spoke else self._limits.first_byte_s)


def _joined(actions: Iterable[Action]) -> list[Action]:
    """The same, with what follows each other for the client in one: there may be thousands of kept events."""
    found: list[Action] = []
    for kind, of_one in itertools.groupby(actions, type):
        some = list(of_one)
        found += (
            [Forward(b"".join(each.data for each in some if isinstance(each, Forward)))] if kind is Forward else some
        )
    return found


_REACTIONS: dict[type[Event], Callable[[Flow, Any, float], list[Action]]] = {
    Placed: Flow._on_placed,
    Unplaced: Flow._on_unplaced,
    Waits: Flow._of_waits,
    Chunk: Flow._on_chunk,
    Ended: Flow._of_ended,
    Answered: Flow._on_answered,
    Lost: Flow._of_lost,
    ClientLeft: Flow._of_client_left,
    Tick: Flow._on_tick,
    ShuttingDown: Flow._of_shutting_down,
}
"""By event; a match asks for one type after the other."""
