"""Reactions to failures of legs, and how dialects differ: data for `flow.py`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .steps import Leg

if TYPE_CHECKING:
    from collections.abc import Callable


class News(enum.Enum):
    """Failures of a leg, by the possible reaction."""

    REJECTED = "rejected"
    """4xx: the request is at fault; every worker would reject it."""
    FAILED = "failed"
    """An error status that a retry would not change."""
    LOST = "lost"
    """A retry may succeed: status in `lost_statuses`, no connection, broken connection, silence."""
    STALE = "stale"


class Reaction(enum.Enum):
    ANSWER = "answer"
    """Cancel the other leg and give the client this leg's answer."""
    TELL_DECODE = "tell decode"
    """Decode goes on without prefill: it recomputes, or fails by its own setting, unless it has its KV."""
    RETRY = "retry"
    """A new attempt if one is left, else ANSWER."""
    RESEND = "resend"
    """A new attempt that is not counted, once per request; after that like LOST."""
    BREAK = "break"
    """End the client's stream with an error event."""


Reactions = dict[tuple[Leg, News], tuple[Reaction, Reaction]]
"""(leg, news) -> reaction before the first byte to the client, and after it."""

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

# For decode workers without a stop call: if prefill is lost, decode is cancelled and the request tried again.
REACTIONS_UNTOLD: Reactions = {
    **REACTIONS,
    (Leg.PREFILL, News.FAILED): (Reaction.ANSWER, Reaction.TELL_DECODE),
    (Leg.PREFILL, News.LOST): (Reaction.RETRY, Reaction.TELL_DECODE),
}


@dataclass(frozen=True, slots=True)
class Rules:
    """How the workers of a dialect behave; the defaults are pdlink's own workers."""

    untold: bool = False
    """The workers have no stop call: only closing their HTTP connection tells them that the other leg failed."""
    handover: Callable[[bytes], bytes | None] | None = None
    """If set, decode's leg starts after prefill's answer, with the parameters that this finds there; it returns None
    for an invalid answer. If not set, both legs start at once."""
    lost_statuses: frozenset[int] = frozenset({502, 503, 504})
    """Statuses after which a retry may succeed."""
    no_kv_status: int = 502
    """The status of a healthy decode worker whose KV did not come."""
    marks: int = 0
    """Marks (`pdlink._http`) of what decode says that must be changed for the client, in attempts with a prefill
    leg."""
    merge_answer: Callable[[bytes, bytes], bytes] = lambda _prefill_answer, answer: answer
    """(prefill's answer, decode's with one of the marks) -> the client's. Prefill's is empty until it is here."""
    merge_events: Callable[[bytes, bytes], bytes] = lambda _prefill_answer, events: events
    """(prefill's answer, whole events of decode's stream, some with the marks) -> the client's."""
    prefill_may_misread: bool = False
    """Prefill may have computed the prompt, and answer an error about its one token, which nobody reads: decode's
    answer decides."""
    says_kv: bool = False
    """An event of decode's stream with one of the marks may say how its KV came (`Dialect.kv_path`)."""
    awaits_prefill: bool = False
    """Decode's answer lacks a part without prefill's: the client gets nothing before that is here."""

    @property
    def reactions(self) -> Reactions:
        # A decode leg that has not started has no stop call either.
        return REACTIONS_UNTOLD if self.untold or self.handover else REACTIONS
