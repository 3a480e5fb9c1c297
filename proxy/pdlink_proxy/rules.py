"""What a leg's bad news leads to, and how dialects differ in it: data for `flow.py`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .steps import Leg

if TYPE_CHECKING:
    from collections.abc import Callable


class News(enum.Enum):
    """Bad news of a leg, by what can be done about it."""

    REJECTED = "rejected"
    """4xx: the request is at fault and would be rejected everywhere."""
    FAILED = "failed"
    """A status that nobody says would go away by trying again."""
    LOST = "lost"
    """Another try may succeed: such a status, no connection, a broken one, silence."""
    STALE = "stale"


class Reaction(enum.Enum):
    ANSWER = "answer"
    """Cancel the other leg and give the client this leg's answer."""
    TELL_DECODE = "tell decode"
    """Decode can go on without prefill: it recomputes, or fails by its own setting. If it has its KV, it need not."""
    RETRY = "retry"
    """A new attempt if one is left, else ANSWER."""
    RESEND = "resend"
    """A new attempt that is not counted, once per request; after that like LOST."""
    BREAK = "break"
    """End the client's stream with an error event."""


Reactions = dict[tuple[Leg, News], tuple[Reaction, Reaction]]
"""(leg, news) -> reaction while nothing was sent to the client, and after that."""

REACTIONS: Reactions = {
    (Leg.PREFILL, News.REJECTED): (Reaction.ANSWER, Reaction.TELL_DECODE),
    (Leg.PREFILL, News.FAILED): (Reaction.TELL_DECODE, Reaction.TELL_DECODE),
    (Leg.PREFILL, News.LOST): (Reaction.TELL_DECODE, Reaction.TELL_DECODE),
    (Leg.PREFILL, News.STALE): (Reaction.RESEND, Reaction.TELL_DECODE),
    (Leg.DECODE, News.REJECTED): (Reaction.ANSWER, Reaction.BREAK),
    (Leg.DECODE, News.FAILED): (Reaction.ANSWER, Reaction.BREAK),
    (Leg.DECODE, News.LOST): (Reaction.RETRY, Reaction.BREAK),
    (Leg.DECODE, News.STALE): (Reaction.RESEND, Reaction.BREAK),
}

# For decode workers that nobody can tell: one whose prefill is lost is cancelled, and the request tried again.
REACTIONS_UNTOLD: Reactions = {
    **REACTIONS,
    (Leg.PREFILL, News.FAILED): (Reaction.ANSWER, Reaction.TELL_DECODE),
    (Leg.PREFILL, News.LOST): (Reaction.RETRY, Reaction.TELL_DECODE),
}


def _as_it_is(_prefill_answer: bytes, data: bytes) -> bytes:
    return data


@dataclass(frozen=True, slots=True)
class Rules:
    """How a dialect's workers differ in the course of a request; the defaults are those of pdlink's own."""

    untold: bool = False
    """There is no way to tell a worker that the other side of its transfer will not come, but closing its leg."""
    handover: Callable[[bytes], bytes | None] | None = None
    """Makes the legs follow each other: decode's starts with what this finds in prefill's answer. None in place of
    the function starts both at once; None from it says that this was no answer."""
    lost_statuses: frozenset[int] = frozenset({502, 503, 504})
    """Statuses after which another try may succeed."""
    no_kv_status: int = 502
    """What decode answers if it is well but its KV did not come."""
    merge_answer: Callable[[bytes, bytes], bytes] = _as_it_is
    """(prefill's answer, decode's) -> the client's. Prefill's is empty if it is not here yet. Called, as the next one
    is, for every attempt with a prefill leg."""
    merge_events: Callable[[bytes, bytes], bytes] = _as_it_is
    """(prefill's answer, whole events of decode's stream) -> the client's."""

    @property
    def reactions(self) -> Reactions:
        # A decode leg that has not begun cannot be told either.
        return REACTIONS_UNTOLD if self.untold or self.handover else REACTIONS
