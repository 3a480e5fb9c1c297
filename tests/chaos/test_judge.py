"""The judge: what a client is owed, and what is called wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlink_bench.chaos.judge import (
    ClientEnd,
    ClientReply,
    ExchangeOutcome,
    ExchangeTally,
    Expected,
    KnownRequest,
    judge,
)

CASE = KnownRequest("/v1/completions", {"prompt": "x"}, Expected("abcdef", "length", (3, 6)))
INVALID = KnownRequest("/v1/completions", {"prompt": "x"})
RIGHT = ClientReply(
    end=ClientEnd.COMPLETE,
    status=200,
    text="abcdef",
    finish_reason="length",
    usage=(3, 6),
    started_s=1.0,
    ended_s=2.0,
)


def test_exactly_the_known_answer_is_right() -> None:
    assert judge(CASE, RIGHT).outcome is ExchangeOutcome.RIGHT


@pytest.mark.parametrize(
    "reply",
    [
        replace(RIGHT, text="abcdeX"),
        replace(RIGHT, text="abcde"),
        replace(RIGHT, text="abcdefg"),
        replace(RIGHT, text=""),
        replace(RIGHT, finish_reason="stop"),
        replace(RIGHT, usage=(3, 5)),
        replace(RIGHT, usage=None),
        replace(RIGHT, end=ClientEnd.SHORT),
        ClientReply(end=ClientEnd.COMPLETE, status=500),
        ClientReply(end=ClientEnd.COMPLETE, status=400, error="invalid_request"),
        ClientReply(end=ClientEnd.COMPLETE, status=204),
        replace(RIGHT, end=ClientEnd.COMPLETE, text="abX", error="peer_lost"),
        replace(RIGHT, end=ClientEnd.BROKEN, text="X"),
        replace(RIGHT, end=ClientEnd.LEFT, text="aX"),
    ],
    ids=[
        "another token",
        "too short",
        "too long",
        "empty",
        "another finish",
        "another usage",
        "no usage",
        "no DONE",
        "5xx without error object",
        "a valid request refused",
        "neither answer nor error",
        "foreign text before an error",
        "foreign text before a cut",
        "foreign text before the client left",
    ],
)
def test_anything_else_is_wrong(reply: ClientReply) -> None:
    assert judge(CASE, reply).outcome is ExchangeOutcome.WRONG


@pytest.mark.parametrize(
    "reply",
    [
        ClientReply(end=ClientEnd.COMPLETE, status=503, error="overloaded"),
        ClientReply(end=ClientEnd.COMPLETE, status=429, error="overloaded"),
        replace(RIGHT, text="abc", error="peer_lost"),
    ],
    ids=["status", "too many", "in the stream, after the beginning of the right text"],
)
def test_an_explicit_error_is_no_wrong_answer(reply: ClientReply) -> None:
    assert judge(CASE, reply).outcome is ExchangeOutcome.ERROR


def test_no_end_before_the_deadline_is_unsettled() -> None:
    assert (
        judge(CASE, ClientReply(end=ClientEnd.DEADLINE, status=200, text="abc")).outcome is ExchangeOutcome.UNSETTLED
    )


def test_an_invalid_request_must_be_refused() -> None:
    assert (
        judge(INVALID, ClientReply(end=ClientEnd.COMPLETE, status=400, error="invalid_request")).outcome
        is ExchangeOutcome.RIGHT
    )
    assert (
        judge(INVALID, ClientReply(end=ClientEnd.COMPLETE, status=503, error="overloaded")).outcome
        is ExchangeOutcome.ERROR
    )
    assert judge(INVALID, RIGHT).outcome is ExchangeOutcome.WRONG


def test_a_cut_is_explained_by_an_absence_of_the_proxy_only() -> None:
    tally = ExchangeTally()
    tally.add(CASE, ClientReply(end=ClientEnd.BROKEN, detail="reset", started_s=10.0, ended_s=12.0))
    assert tally.counts[ExchangeOutcome.CUT] == 1
    assert not tally.unexplained_cuts([(11.0, 15.0)])
    assert not tally.unexplained_cuts([(8.0, 11.0)])
    assert tally.unexplained_cuts([(12.5, 15.0)]) == ["reset after 2.00 s"]


def test_the_tally_names_what_was_wrong() -> None:
    tally = ExchangeTally()
    tally.add(CASE, replace(RIGHT, text="abcdeX", request_id="req-7"))
    assert tally.counts[ExchangeOutcome.WRONG] == 1
    assert "req-7" in tally.wrong[0]
    assert "'X'" in tally.wrong[0]


def test_silence_is_the_longest_time_between_right_answers() -> None:
    tally = ExchangeTally(right_s=[11.0, 12.0, 17.0])
    assert tally.longest_silence_s(10.0, 20.0) == 5.0
    assert tally.longest_silence_s(10.0, 30.0) == 13.0


def test_silence_that_nobody_could_have_broken_is_not_held_against_anyone() -> None:
    tally = ExchangeTally(right_s=[11.0, 12.0, 17.0])
    assert tally.longest_silence_s(10.0, 20.0, [(11.5, 13.0), (13.5, 16.5)]) == 3.0
    assert tally.longest_silence_s(10.0, 20.0, [(0.0, 100.0)]) == 0.0


def test_throughput_is_full_again_when_answers_come_as_before() -> None:
    tally = ExchangeTally(right_s=[100 + 5 + 0.1 * index for index in range(100)])
    assert tally.full_again_s(100.0, 115.0, rate=10.0) == pytest.approx(4.75, abs=0.3)
    assert tally.full_again_s(100.0, 115.0, rate=100.0) is None
