"""Verdicts on clients' answers.

A request has a known answer. Before its deadline the client must get exactly this answer or an explicit error; text
before an error must be a prefix of the answer. Anything else is wrong.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class ExchangeOutcome(enum.Enum):
    RIGHT = "right"
    ERROR = "explicit error"
    WRONG = "wrong"
    UNSETTLED = "unsettled"
    """No end before the deadline."""
    CUT = "cut"
    """The connection to the proxy was refused or broke: right only while the proxy is away."""
    LEFT = "client left"


class ClientEnd(enum.Enum):
    """The end of an exchange, seen by the client."""

    COMPLETE = "complete"
    """The proper end of HTTP, and of a stream also [DONE]."""
    SHORT = "stream without [DONE]"
    BROKEN = "connection broke"
    DEADLINE = "deadline"
    LEFT = "client left"


@dataclass(frozen=True, slots=True)
class Expected:
    text: str
    finish_reason: str
    usage: tuple[int, int]


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request with a known answer."""

    path: str
    body: dict[str, Any]
    expected: Expected | None = None
    """None: the request is invalid and must get a 4xx."""


@dataclass(slots=True)
class ClientReply:
    end: ClientEnd = ClientEnd.BROKEN
    status: int = 0
    """0 if no answer began."""
    text: str = ""
    finish_reason: str = ""
    usage: tuple[int, int] | None = None
    error: str | None = None
    """Code of an error object, in the body or in the stream."""
    detail: str = ""
    events: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: ExchangeOutcome
    why: str = ""
    """Empty for RIGHT; an error's code for ERROR."""


_HONEST_4XX = frozenset({408, 429})
"""4xx statuses that a valid request may get from a server in trouble."""


def judge(case: KnownRequest, reply: ClientReply) -> Verdict:
    if reply.end is ClientEnd.DEADLINE:
        return Verdict(
            ExchangeOutcome.UNSETTLED, f"status {reply.status or 'none'}, {len(reply.text)} characters by then"
        )
    expected = case.expected
    if expected is not None and not expected.text.startswith(reply.text):
        return Verdict(ExchangeOutcome.WRONG, f"text {_around(reply.text, expected.text)}")
    if reply.end is ClientEnd.LEFT:
        return Verdict(ExchangeOutcome.LEFT)
    if reply.end is ClientEnd.BROKEN:
        return Verdict(ExchangeOutcome.CUT, reply.detail)
    if reply.status >= 500 or reply.status in _HONEST_4XX:
        if reply.error is None:
            return Verdict(ExchangeOutcome.WRONG, f"status {reply.status} without an error object")
        return Verdict(ExchangeOutcome.ERROR, f"{reply.status} {reply.error}")
    if expected is None:
        if reply.status >= 400 and reply.error is not None:
            return Verdict(ExchangeOutcome.RIGHT)
        return Verdict(ExchangeOutcome.WRONG, f"an invalid request was answered {reply.status}")
    if reply.status != 200:
        return Verdict(
            ExchangeOutcome.WRONG, f"a valid request was answered {reply.status} {reply.error}: {reply.detail}"
        )
    if reply.error is not None:
        return Verdict(ExchangeOutcome.ERROR, f"stream {reply.error}")
    if reply.end is ClientEnd.SHORT:
        return Verdict(ExchangeOutcome.WRONG, f"stream ended without [DONE] or an error after {reply.events} events")
    got = Expected(reply.text, reply.finish_reason, reply.usage or (0, 0))
    if got != expected:
        return Verdict(ExchangeOutcome.WRONG, f"got {got}, expected {expected}")
    return Verdict(ExchangeOutcome.RIGHT)


def _around(got: str, expected: str) -> str:
    """The first difference of two texts."""
    at = next(
        (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected))
    )
    return f"differs from character {at}: got {got[at : at + 20]!r}, expected {expected[at : at + 20]!r}"


@dataclass(slots=True)
class ExchangeTally:
    counts: dict[ExchangeOutcome, int] = field(default_factory=lambda: dict.fromkeys(ExchangeOutcome, 0))
    errors: dict[str, int] = field(default_factory=dict)
    """Explicit errors by status and code."""
    wrong: list[str] = field(default_factory=list)
    """The first wrong and unsettled ones, in words."""
    cuts: list[tuple[float, float, str]] = field(default_factory=list)
    """Start, end (time.monotonic) and detail of every CUT: explained only by the proxy's own absence."""
    right_s: list[float] = field(default_factory=list)
    """Times of complete right answers (time.monotonic)."""
    slowest_s: float = 0.0

    @property
    def sent(self) -> int:
        return sum(self.counts.values())

    def add(self, case: KnownRequest, reply: ClientReply) -> Verdict:
        """Judge one reply and count it."""
        verdict = judge(case, reply)
        self.counts[verdict.outcome] += 1
        took_s = reply.ended_s - reply.started_s
        self.slowest_s = max(self.slowest_s, took_s)
        match verdict.outcome:
            case ExchangeOutcome.RIGHT:
                self.right_s.append(reply.ended_s)
            case ExchangeOutcome.ERROR:
                self.errors[verdict.why] = self.errors.get(verdict.why, 0) + 1
            case ExchangeOutcome.CUT:
                self.cuts.append((reply.started_s, reply.ended_s, verdict.why))
            case ExchangeOutcome.WRONG | ExchangeOutcome.UNSETTLED if len(self.wrong) < _KEPT:
                self.wrong.append(f"{verdict.outcome.value} after {took_s:.2f} s, {reply.request_id}: {verdict.why}")
        return verdict

    def unexplained_cuts(self, absences: list[tuple[float, float]]) -> list[str]:
        """Cuts outside an absence of the proxy."""
        return [
            f"{detail} after {ended_s - started_s:.2f} s"
            for started_s, ended_s, detail in self.cuts
            if not any(started_s <= back_s and gone_s <= ended_s for gone_s, back_s in absences)
        ]

    def longest_silence_s(self, from_s: float, to_s: float, outages: Sequence[tuple[float, float]] = ()) -> float:
        """Longest time between two right answers, without `outages`."""
        moments = [from_s, *sorted(at for at in self.right_s if from_s <= at <= to_s), to_s]
        return max(
            later - earlier - sum(max(0.0, min(later, end) - max(earlier, begin)) for begin, end in outages)
            for earlier, later in zip(moments, moments[1:], strict=False)
        )

    def full_again_s(self, from_s: float, to_s: float, rate: float) -> float | None:
        """The first time after `from_s` with right answers at 80% of `rate` for 2 s; None if there is none."""
        at_s = from_s
        while at_s + _WINDOW_S <= to_s:
            if sum(at_s <= right < at_s + _WINDOW_S for right in self.right_s) >= _FULL * rate * _WINDOW_S:
                return at_s - from_s
            at_s += 0.25
        return None


_KEPT = 50
_WINDOW_S = 2.0
_FULL = 0.8
"""Answers come in lumps; 80% over two seconds tells full throughput from half of the workers."""
