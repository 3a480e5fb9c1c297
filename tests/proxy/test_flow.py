"""The two-leg machine without HTTP: its table, and what holds whatever order events come in."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.errors import Overloaded
from pdlink_proxy.flow import Flow, Limits
from pdlink_proxy.records import phases, until_first
from pdlink_proxy.rules import REACTIONS, News, Reaction, Rules
from pdlink_proxy.steps import (
    FIRST,
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
from tests.proxy.fakes import DONE, END, FINISH, event, passed

if TYPE_CHECKING:
    from collections.abc import Sequence

P, D = Leg.PREFILL, Leg.DECODE
ZERO, REST = event("zero"), event("one") + event("two") + END
LIMITS = Limits(retries=1, first_byte_s=10, idle_s=5, request_s=100)
_ANSWER = b'{"choices":[]}'
_BODY = b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}'


# Prefill's stream is read for output token 0; it is answered whole, beside decode; before decode; beside decode, of
# which the client gets nothing before that.
KINDS = {
    "streams": Rules(),
    "beside": Rules(untold=True),
    "before": Rules(untold=True, handover=lambda answer: answer),
    "awaited": Rules(untold=True, awaits_prefill=True),
}


def running(*, sent: Leg | None = None, prefill: str | None = "p", limits: Limits = LIMITS) -> Flow:
    """A flow whose first attempt has started at 0 s; sent: the leg that delivered token 0."""
    flow = Flow(limits, 0.0)
    assert flow.on(Placed(prefill, "d"), 0.0) == [StartLegs(1, prefill, "d")]
    if sent is not None:
        assert flow.on(Chunk(1, sent, ZERO), 0.0) == [Forward(ZERO)]
    return flow


NEWS_AS_EVENTS: dict[News, Sequence[tuple[int | Loss, bool]]] = {
    News.REJECTED: [(400, True), (404, True), (422, True), (429, True), (499, True)],
    News.FAILED: [(500, True), (501, True), (302, True)],
    News.LOST: [(status, True) for status in (502, 503, 504)]
    + [(loss, False) for loss in Loss if loss is not Loss.STALE],
    News.STALE: [(Loss.STALE, False)],
}


@pytest.mark.parametrize(
    ("leg", "news", "reason", "sent"),
    [
        (leg, news, reason, sent)
        for leg, news in REACTIONS
        for reason, _ in NEWS_AS_EVENTS[news]
        for sent in (None, P, D)
        # A leg that has sent token 0 has begun a 200, so it has no status left to answer.
        if not (sent is leg and isinstance(reason, int))
    ],
)
def test_every_row_of_the_table(leg: Leg, news: News, reason: int | Loss, sent: Leg | None) -> None:
    flow = running(sent=sent)
    bad = Answered(1, leg, reason, _BODY) if isinstance(reason, int) else Lost(1, leg, reason, "why")
    blame, *actions = flow.on(bad, 1.0)
    assert isinstance(blame, BlameLeg)
    assert (blame.attempt, blame.leg, blame.reason) == (1, leg, reason)
    assert blame.detail
    assert blame.then
    other = D if leg is P else P
    match REACTIONS[leg, news][sent is not None]:
        case Reaction.ANSWER:
            final = actions.pop()
            assert actions == [CancelLeg(1, other)]
            assert isinstance(final, Respond)
            assert final.status == (502 if reason == 302 else reason)
            assert flow.outcome is (Outcome.REJECTED if news is News.REJECTED else Outcome.FAILED)
        case Reaction.TELL_DECODE if sent is D:
            assert actions == [], "decode has what it needs"
            assert not flow.over
        case Reaction.TELL_DECODE:
            assert [type(action) for action in actions] == [TellToStop]
            assert isinstance(actions[0], TellToStop)
            assert actions[0].leg is D
            assert not flow.over
        case Reaction.RETRY:
            assert actions[0] == CancelLeg(1, other)
            assert [action.why for action in actions[1:] if isinstance(action, Place)] == [Why.RETRY]
        case Reaction.RESEND:
            assert actions == [CancelLeg(1, other), Place(Why.RESEND, frozenset())]
        case Reaction.BREAK:
            final = actions.pop()
            assert isinstance(final, EndStream)
            assert b'"stream_error"' in final.data
            assert final.data.endswith(DONE)
            assert flow.outcome is Outcome.BROKEN


@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS)
def test_the_table_has_a_row_for_every_news_of_every_leg(rules: Rules) -> None:
    assert set(rules.reactions) == {(leg, news) for leg in Leg for news in News}


@pytest.mark.parametrize("kind", ["beside", "before"])
@pytest.mark.parametrize(
    ("bad", "retried"),
    [
        (Lost(1, P, Loss.RESET, "why"), True),
        (Lost(1, P, Loss.STALE, "why"), True),
        (Answered(1, P, 503, _BODY), True),
        (Answered(1, P, 501, _BODY), False),
        (Answered(1, P, 400, _BODY), False),
    ],
)
def test_decode_that_cannot_be_told_is_not_left_waiting(kind: str, bad: Event, retried: bool) -> None:
    flow = Flow(LIMITS, 0.0, KINDS[kind])
    assert flow.on(Placed("p", "d"), 0.0) == [StartLegs(1, "p", "d", at_once=kind == "beside")]
    _, *cancels, last = flow.on(bad, 1.0)
    assert cancels == ([CancelLeg(1, D)] if kind == "beside" else [])
    if retried:
        stale = isinstance(bad, Lost) and bad.loss is Loss.STALE
        assert last == (Place(Why.RESEND, frozenset()) if stale else Place(Why.RETRY, frozenset({"p"})))
    else:
        assert isinstance(last, Respond)
        assert flow.over


def test_decode_that_follows_has_its_own_time_from_its_start() -> None:
    flow = Flow(LIMITS, 0.0, KINDS["before"])
    flow.on(Placed("p", "d"), 0.0)
    assert flow.deadline_s == 10
    assert flow.on(Answered(1, P, 200, _ANSWER), 9.0) == [StartDecode(1, _ANSWER)]
    assert flow.deadline_s == 19
    assert flow.on(ClientLeft(), 10.0) == [CancelLeg(1, D)]


@pytest.mark.parametrize(
    ("prefill_news", "decode_news", "avoided"),
    [
        (None, Answered(1, D, 502, _BODY), {"p", "d"}),
        (Lost(1, P, Loss.RESET, ""), Answered(1, D, 502, _BODY), {"p"}),
        (None, Answered(1, D, 503, _BODY), {"d"}),
        (None, Lost(1, D, Loss.CONNECT, ""), {"d"}),
        (Answered(1, P, 500, _BODY), Lost(1, D, Loss.RESET, ""), {"p", "d"}),
        (Ended(1, P), Lost(1, D, Loss.RESET, ""), {"d", "p"}),
    ],
)
def test_a_retry_avoids_who_may_have_been_at_fault(
    prefill_news: Event | None, decode_news: Event, avoided: set[str]
) -> None:
    flow = running()
    if prefill_news is not None:
        flow.on(prefill_news, 1.0)
    assert flow.on(decode_news, 2.0)[-1] == Place(Why.RETRY, frozenset(avoided))


def test_a_stale_connection_is_resent_once_and_then_counts_as_a_retry() -> None:
    flow = running()
    assert flow.on(Lost(1, D, Loss.STALE, ""), 0.0)[-1] == Place(Why.RESEND, frozenset())
    flow.on(Placed("p", "d"), 0.0)
    assert flow.on(Lost(2, D, Loss.STALE, ""), 0.0)[-1] == Place(Why.RETRY, frozenset({"d"}))
    flow.on(Placed("p", "d"), 0.0)
    assert [type(action) for action in flow.on(Lost(3, P, Loss.STALE, ""), 0.0)] == [BlameLeg, TellToStop]
    assert isinstance(flow.on(Lost(3, D, Loss.STALE, ""), 0.0)[-1], Respond)


def test_decode_alone_needs_no_prefill() -> None:
    flow = running(prefill=None)
    assert flow.on(Chunk(1, D, ZERO + REST), 1.0) == [LetGo(1, D), EndStream(ZERO + REST)]
    assert flow.outcome is Outcome.OK


def test_error_that_was_passed_is_told_once_where_the_last_line_is_cut() -> None:
    flow = running()
    flow.on(Chunk(1, D, ZERO), 1.0)
    flow.on(Chunk(1, D, b"data: " + _BODY + b"\n\n"), 1.1)
    assert flow.on(Chunk(1, D, b"data: [DONE]\n"), 1.2) == []
    actions = flow.on(Ended(1, D), 1.3)
    assert [action for action in actions if isinstance(action, Forward | EndStream)] == [EndStream(DONE)]
    assert flow.outcome is Outcome.BROKEN


def test_no_worker_is_unavailable_and_after_a_failure_the_failure() -> None:
    flow = Flow(LIMITS, 0.0)
    (answer,) = flow.on(Unplaced("none"), 0.0)
    assert isinstance(answer, Respond)
    assert (answer.status, flow.outcome) == (503, Outcome.UNAVAILABLE)
    flow = running()
    flow.on(Answered(1, D, 502, _BODY), 1.0)
    (answer,) = flow.on(Unplaced("none"), 1.0)
    assert isinstance(answer, Respond)
    assert (answer.status, flow.outcome) == (502, Outcome.FAILED)
    assert b"decode worker answered 502" in answer.body


def test_deadlines_of_first_byte_idle_and_request() -> None:
    flow = running()
    assert flow.deadline_s == 10
    flow.on(Chunk(1, D, b": still here\n\n"), 8.0)
    assert flow.deadline_s == 10, "a comment is no first byte of an answer"
    flow.on(Chunk(1, P, ZERO), 9.0)
    assert flow.deadline_s == 10, "decode has not begun"
    flow.on(Chunk(1, D, ZERO), 9.5)
    assert flow.deadline_s == 14.5
    flow.on(Chunk(1, D, event("one")), 98.0)
    assert flow.deadline_s == 100
    assert flow.on(Tick(), 99.9) == []
    *cancels, final = flow.on(Tick(), 100.0)
    assert cancels == [CancelLeg(1, D), CancelLeg(1, P)]
    assert isinstance(final, EndStream)
    assert b"deadline_exceeded" in final.data


def test_decode_that_was_told_gets_its_own_time_to_recompute() -> None:
    flow = running()
    told = flow.on(Tick(), 10.0)
    assert isinstance(told[0], BlameLeg)
    assert (told[0].leg, told[0].reason) == (P, Loss.TIMEOUT)
    assert told[1] == CancelLeg(1, P)
    assert isinstance(told[2], TellToStop)
    assert flow.deadline_s == 20


def test_prefill_is_told_only_if_closing_its_leg_could_not_tell_it() -> None:
    flow = running()
    assert flow.on(ClientLeft(), 1.0) == [CancelLeg(1, D), CancelLeg(1, P)]
    flow = running(sent=P)
    flow.on(Ended(1, P), 1.0)
    cancel, told = flow.on(ClientLeft(), 1.0)
    assert cancel == CancelLeg(1, D)
    assert isinstance(told, TellToStop)
    assert told.leg is P
    flow = running(sent=P)
    flow.on(Ended(1, P), 1.0)
    flow.on(Chunk(1, D, ZERO), 1.0)
    assert flow.on(ClientLeft(), 1.0) == [CancelLeg(1, D)], "decode had its KV"


def test_a_last_event_without_its_blank_line_reaches_the_client_whole() -> None:
    """A worker that closes right after `[DONE]` said all; without a blank line the client would not see it."""
    for cut in (b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n"):
        flow = running()
        flow.on(Chunk(1, D, FINISH), 1.0)
        flow.on(Chunk(1, D, cut), 1.0)
        assert flow.on(Ended(1, D), 1.0)[-1] == EndStream(b"data: [DONE]\n\n")
        assert flow.outcome is Outcome.OK


def test_an_endless_event_of_prefills_costs_its_leg_and_not_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.api.sse.MAX_EVENT_NBYTES", 10)
    flow = running(sent=P)
    assert flow.on(Chunk(1, P, b"data: and so on and on"), 1.0) == [
        BlameLeg(1, P, Loss.MALFORMED, "an event of more than 10 bytes", "decode goes on without it"),
        CancelLeg(1, P),
        TellToStop(1, D, "prefill worker: an event of more than 10 bytes"),
    ]
    assert not flow.over


@pytest.mark.parametrize("cut", [0, len(ZERO), len(ZERO + REST)])
def test_a_stream_that_ends_before_prefills_answer_goes_to_the_client_with_that(cut: int) -> None:
    whole = ZERO + REST
    flow = Flow(LIMITS, 0.0, KINDS["awaited"])
    flow.on(Placed("p", "d"), 0.0)
    assert flow.on(Chunk(1, D, whole[:cut]), 1.0) == []
    assert flow.on(Ended(1, D, whole[cut:]), 1.0) == []
    actions = flow.on(Answered(1, P, 200, _ANSWER), 2.0)
    assert b"".join(action.data for action in actions if isinstance(action, Forward | EndStream)) == whole
    assert [action for action in actions if isinstance(action, LetGo | CancelLeg)] == [], "both have ended"
    assert flow.outcome is Outcome.OK


def test_events_that_waited_for_prefills_answer_go_to_the_client_in_one() -> None:
    flow = Flow(LIMITS, 0.0, KINDS["awaited"])
    flow.on(Placed("p", "d"), 0.0)
    events = [ZERO, *[b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(9)]]
    for each in events:
        assert flow.on(Chunk(1, D, each), 1.0) == []
    assert flow.on(Answered(1, P, 200, _ANSWER), 2.0) == [Forward(b"".join(events))]


@pytest.mark.parametrize(("status", "outcome"), [(400, Outcome.REJECTED), (500, Outcome.FAILED), (503, None)])
def test_decodes_error_is_judged_at_once_where_prefill_is_awaited(status: int, outcome: Outcome | None) -> None:
    flow = Flow(LIMITS, 0.0, KINDS["awaited"])
    flow.on(Placed("p", "d"), 0.0)
    blame, cancel, last = flow.on(Answered(1, D, status, _BODY), 1.0)
    assert isinstance(blame, BlameLeg)
    assert (blame.leg, blame.reason) == (D, status)
    assert cancel == CancelLeg(1, P)
    assert isinstance(last, Place if outcome is None else Respond)
    assert flow.outcome is outcome


@pytest.mark.parametrize("streaming", [True, False])
def test_what_waited_for_prefill_has_the_time_at_which_it_came_and_its_deadline_counts_from_then_on(
    streaming: bool,
) -> None:
    flow = Flow(LIMITS, 0.0, KINDS["awaited"])
    flow.on(Placed("p", "d"), 0.0)
    for now, news in ((1.0, Chunk(1, D, ZERO)), (2.0, Chunk(1, D, event("one")))):
        assert flow.on(news if streaming else Answered(1, D, 200, _ANSWER), now) == []
    flow.on(Answered(1, P, 200, _ANSWER), 8.0)
    assert (flow.tries[0].decode_s, flow.tries[0].prefill_s) == (1.0, 8.0)
    assert flow.deadline_s == (8 + LIMITS.idle_s if streaming else math.inf)


class World:
    """A driver that keeps the books and checks every action against them."""

    def __init__(self, kind: str, streaming: bool, retries: int, waits_s: float) -> None:
        """waits_s: of each attempt, for its workers."""
        self.kind, self.waits_s = kind, waits_s
        self.streaming = streaming
        self.retries = retries
        self.flow = Flow(Limits(retries=retries, first_byte_s=10, idle_s=5, request_s=100), 0.0, KINDS[kind])
        self.now = 0.0
        self.open: set[tuple[int, Leg]] = set()
        """Legs that run."""
        self.finished: set[tuple[int, Leg]] = set()
        """Legs that have said their last word or were cancelled."""
        self.unsaid: dict[tuple[int, Leg], bytes] = {}
        self.to_client = b""
        self.forwarded = False
        self.finals: list[Action] = []
        self.places: Counter[Why] = Counter()
        self.blamed: set[tuple[int, Leg]] = set()
        self.left = False

    def happen(self, news: Event, placed: Event | None = None) -> None:
        before_s, self.flow.hastened_s = self.flow.deadline_s, math.inf
        actions = self.flow.on(news, self.now)
        assert self.flow.deadline_s >= min(before_s, self.flow.hastened_s), "the tick that is set would be late"
        for action in actions:
            assert not self.finals, "nothing follows the final answer"
            self.check(action, placed)

    def check(self, action: Action, placed: Event | None) -> None:
        match action:
            case Place(why=why):
                assert not self.forwarded, "no attempt after something was sent"
                assert not self.open, "an attempt ends before the next one begins"
                self.places[why] += 1
                self.now += self.waits_s
                self.happen(placed or Placed("p", "d"))
            case StartLegs(attempt=attempt, prefill=prefill):
                if prefill:
                    self.start(attempt, P)
                if not prefill or self.kind != "before":
                    self.start(attempt, D)
            case StartDecode(attempt=attempt, params=params):
                assert params == _ANSWER
                assert (attempt, P) in self.finished
                self.start(attempt, D)
            case BlameLeg(attempt=attempt, leg=leg):
                self.blamed.add((attempt, leg))
            case CancelLeg(attempt=attempt, leg=leg):
                self.open.remove((attempt, leg))  # KeyError: cancelled what does not run
                self.finished.add((attempt, leg))
            case LetGo(attempt=attempt, leg=leg):
                self.open.remove((attempt, leg))
            case TellToStop(attempt=attempt, leg=leg):
                assert self.kind == "streams", "nobody would hear it"
                assert 0 < attempt <= self.flow.attempts
                assert leg is D or (attempt, leg) in self.finished
            case Forward(data=data):
                assert data
                assert data.endswith(b"\n\n")
                self.forwarded = True
                self.to_client += data
            case Respond():
                assert not self.forwarded
                self.finals.append(action)
            case EndStream(data=data):
                assert self.forwarded or data
                self.to_client += data
                self.finals.append(action)

    def start(self, attempt: int, leg: Leg) -> None:
        assert (attempt, leg) not in self.unsaid, "a leg starts once"
        self.open.add((attempt, leg))
        self.unsaid[attempt, leg] = ZERO if leg is P else ZERO + REST

    def streams(self, leg: Leg) -> bool:
        return self.streaming and (leg is D or self.kind == "streams")

    def last_word(self, key: tuple[int, Leg], news: Event) -> None:
        fails = isinstance(news, Lost) or (isinstance(news, Answered) and news.status != 200)
        judged = fails and key in self.open
        self.open.discard(key)
        self.finished.add(key)
        self.happen(news)
        assert not judged or key in self.blamed, "a failure is judged at once, whatever else is awaited"


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    streaming=st.booleans(),
    retries=st.integers(0, 2),
    waits_s=st.sampled_from([0.0, 0.5]),
)
def test_in_any_order_the_client_gets_one_answer_and_no_leg_is_left(
    data: st.DataObject, kind: str, streaming: bool, retries: int, waits_s: float
) -> None:
    world = World(kind, streaming, retries, waits_s)
    placements: list[Event] = [Placed("p", "d"), Placed(None, "d"), Unplaced("none")]
    first = data.draw(st.sampled_from(placements))
    world.check(FIRST, first)
    for _ in range(data.draw(st.integers(0, 25))):
        legs = sorted(
            (key for key in world.unsaid if key not in world.finished), key=lambda key: (key[0], key[1].value)
        )
        kinds = ["tick", "stale news"] + ["leg"] * 8 * bool(legs) + ["leave", "shut down"]
        match data.draw(st.sampled_from(kinds)):
            case "tick":
                world.now += data.draw(st.floats(0, 30))
                world.happen(Tick())
            case "leave":
                world.left = world.left or not world.flow.over
                world.happen(ClientLeft())
            case "shut down":
                world.happen(ShuttingDown())
            case "stale news":
                attempt = data.draw(st.integers(0, max(world.flow.attempts, 1) - 1))
                world.happen(Lost(attempt, data.draw(st.sampled_from(Leg)), Loss.RESET, "late"))
            case "leg":
                _leg_says(data, world, *data.draw(st.sampled_from(legs)))
    world.left = world.left or not world.flow.over
    if world.left:
        world.happen(ClientLeft())
    assert world.flow.over
    assert world.open == set(), "legs that nobody ends"
    assert len(world.finals) == (0 if world.flow.outcome is Outcome.CLIENT_LEFT else 1)
    assert world.to_client.count(ZERO) <= 1
    if world.flow.outcome is Outcome.OK and world.to_client:
        assert world.to_client == ZERO + REST
    elif world.flow.outcome is Outcome.OK:
        assert world.finals == [Respond(200, _ANSWER)]
    times_add_up(world)
    assert world.places[Why.RETRY] <= world.retries
    assert world.places[Why.RESEND] <= 1


def times_add_up(world: World) -> None:
    """What the request waited for, attempt by attempt, is what it took: without gaps and twice nothing."""
    tries, end_s = world.flow.tries, world.now
    assert len(tries) >= world.flow.attempts
    found = phases(tries, end_s, well=world.flow.outcome is Outcome.OK)
    assert [each.begin_s for each in found] == [0.0, *(each.end_s for each in found[:-1])]
    assert found[-1].end_s == end_s
    assert all(each.begin_s <= each.end_s for each in found)
    queued_s = sum(each.end_s - each.begin_s for each in found if each.name == "queue")
    if tries[-1].placed_s is not None:
        assert queued_s == pytest.approx(world.waits_s * len(tries))
    for first_s in (end_s, *(each.end_s for each in found)):
        until = until_first(tries, first_s)
        assert until.queued_s >= 0
        assert until.lost_s >= 0
        begun_s = first_s if until.of.placed_s is None else min(first_s, until.of.placed_s)
        assert until.queued_s + until.lost_s == pytest.approx(begun_s)
        if until.of.prefill_s is not None and until.of.placed_s is not None:
            assert until.of.placed_s <= until.of.prefill_s


def _leg_says(data: st.DataObject, world: World, attempt: int, leg: Leg) -> None:
    key = (attempt, leg)
    unsaid = world.unsaid[key]
    begun = len(unsaid) < len(ZERO if leg is P else ZERO + REST)
    kind = data.draw(st.sampled_from(["speak"] * 4 + ["answer", "lose", "end"]))
    if kind == "lose":
        losses = [Loss.RESET, Loss.MALFORMED] if begun else [loss for loss in Loss if loss is not Loss.TIMEOUT]
        world.last_word(key, Lost(attempt, leg, data.draw(st.sampled_from(losses)), "scripted"))
    elif kind == "answer" and not begun:
        statuses = [302, 400, 404, 500, 502, 503, 504] + [200] * 4 * (not world.streams(leg))
        status = data.draw(st.sampled_from(statuses))
        world.last_word(key, Answered(attempt, leg, status, _ANSWER if status == 200 else _BODY))
    elif kind == "end" and world.streams(leg):
        cut = data.draw(st.integers(0, len(unsaid)))
        world.unsaid[key] = unsaid[cut:]
        world.last_word(key, Ended(attempt, leg, unsaid[:cut]))
    elif kind == "speak" and world.streams(leg) and unsaid:
        cut = data.draw(st.one_of(st.integers(1, len(unsaid)), st.just(len(unsaid))))
        world.unsaid[key] = unsaid[cut:]
        world.happen(Chunk(attempt, leg, unsaid[:cut]))


def test_a_request_without_a_worker_waits_until_its_time_or_the_clients_end() -> None:
    for last, outcome in ((Tick(), Outcome.UNAVAILABLE), (ClientLeft(), Outcome.CLIENT_LEFT)):
        flow = Flow(LIMITS, 0.0)
        assert flow.on(Waits("nobody", 3.0), 1.0) == []
        assert flow.deadline_s == 3
        assert flow.on(Tick(), 2.9) == []
        flow.on(last, 3.0)
        assert flow.outcome is outcome


def test_a_request_that_waited_is_placed_as_any_other() -> None:
    flow = Flow(LIMITS, 0.0)
    flow.on(Waits("nobody", 3.0), 0.0)
    assert flow.on(Placed("p", "d"), 2.0) == [StartLegs(1, "p", "d")]
    assert flow.deadline_s == 12


def test_a_retry_that_finds_nobody_ends_with_what_was_lost() -> None:
    flow = running()
    flow.on(Lost(1, D, Loss.CONNECT, ""), 1.0)
    flow.on(Waits("nobody", 3.0), 1.0)
    (final,) = flow.on(Tick(), 3.0)
    assert isinstance(final, Respond)
    assert b"decode worker lost" in final.body


def test_a_full_queue_is_said_by_the_status_of_its_error() -> None:
    flow = Flow(LIMITS, 0.0)
    (final,) = flow.on(Unplaced("full", full=True), 0.0)
    assert isinstance(final, Respond)
    assert final.status == Overloaded.http_status
    assert b'"overloaded"' in final.body


_PIECES = [
    event("one"),
    event("two") + event("three"),
    event("[DONE]"),
    event("half")[:9],
    event("half")[9:],
    DONE,
    b'data: {"error":{"message":"m","code":500}}\n\n',
    b": comment\n\n",
    b"\n\n",
]


@given(st.lists(st.tuples(st.sampled_from(_PIECES), st.sampled_from([P, D]), st.sampled_from([0, 1])), max_size=8))
@settings(max_examples=300, deadline=None)
def test_what_passes_is_what_would_be_forwarded_as_it_is(pieces: list[tuple[bytes, Leg, int]]) -> None:
    flow, twin = running(sent=D), running(sent=D)
    for number, (data, leg, attempt) in enumerate(pieces):
        now = float(number)
        actions = twin.on(Chunk(attempt, leg, data), now)
        if passed(flow, attempt, leg, data, now):
            assert actions == [Forward(data)]
        else:
            assert flow.on(Chunk(attempt, leg, data), now) == actions
        assert (flow.deadline_s, flow.outcome) == (twin.deadline_s, twin.outcome)
