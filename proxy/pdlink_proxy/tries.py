"""Where the time of a request went, attempt by attempt: what it waited for adds up to what it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Try(msgspec.Struct, gc=False):
    """Times of one attempt, on one clock; None for what was not reached."""

    wanted_s: float
    """Workers were wanted for it: of the first one, when the request came."""
    placed_s: float | None = None
    """It had its workers."""
    prefill_s: float | None = None
    """Prefill's token was there."""
    decode_s: float | None = None
    """Decode's first token was there, or its answer."""

    def since(self, zero_s: float) -> Try:
        """The same, counted from then."""
        placed_s, prefill_s, decode_s = self.placed_s, self.prefill_s, self.decode_s
        return Try(
            self.wanted_s - zero_s,
            None if placed_s is None else placed_s - zero_s,
            None if prefill_s is None else prefill_s - zero_s,
            None if decode_s is None else decode_s - zero_s,
        )


class Phase(NamedTuple):
    """A part of a request's time, in one of its attempts."""

    attempt: int
    """From 1."""
    name: str
    """queue, prefill, transfer, decode; or lost, of an attempt that gave no whole answer."""
    begin_s: float
    end_s: float


def phases(tries: Sequence[Try], end_s: float, *, well: bool) -> list[Phase]:
    """The parts of a request's time until its end, one after the other without gaps. well: its last attempt gave the
    whole answer. Parts that were not reached are left out; an attempt ends when the next one is wanted."""
    found = []
    ends = [each.wanted_s for each in tries[1:]] + [end_s]
    for number, (each, until_s) in enumerate(zip(tries, ends, strict=True), 1):
        at_s = each.wanted_s
        marks = {"queue": each.placed_s, "prefill": each.prefill_s, "transfer": each.decode_s}
        last = "queue" if each.placed_s is None else "decode" if well and number == len(tries) else "lost"
        for name, reached_s in (*marks.items(), (last, until_s)):
            if reached_s is None:
                continue
            to_s = min(until_s, max(at_s, reached_s))
            found.append(Phase(number, name, at_s, to_s))
            at_s = to_s
    return found


class UntilFirst(NamedTuple):
    """What passed before the attempt that gave the first token had its workers."""

    queued_s: float
    """In the queue, in all attempts until then."""
    lost_s: float
    """In attempts before it."""
    of: Try
    """That attempt."""


def until_first(tries: Sequence[Try], first_s: float) -> UntilFirst:
    """first_s: when the first token was there, or the end of a request without one."""
    queued_s = lost_s = 0.0
    before: Try | None = None
    of = tries[0]
    if len(tries) == 1 and of.placed_s is not None and of.placed_s <= first_s:  # nearly all
        return UntilFirst(of.placed_s - of.wanted_s, 0.0, of)
    for each in tries:
        if each.wanted_s > first_s:
            break
        if before is not None:
            placed_s = before.wanted_s if before.placed_s is None else before.placed_s
            lost_s += each.wanted_s - placed_s
        queued_s += (first_s if each.placed_s is None else min(first_s, each.placed_s)) - each.wanted_s
        before = of = each
    return UntilFirst(queued_s, lost_s, of)
