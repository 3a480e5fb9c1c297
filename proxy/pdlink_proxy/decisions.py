"""Why each of the last requests went where it went."""

from __future__ import annotations

from collections import deque

import msgspec

MAX_DECISIONS = 1000


class Decision(msgspec.Struct, frozen=True):
    """What was decided about one attempt, and what was known then."""

    request_id: str
    at_s: float
    """Unix time."""
    why: str
    """What the attempt is made for (`Why`)."""
    verdict: str
    """placed, waits or refused."""
    reason: str
    """Why it waits or is refused, or why decode works alone."""
    tokens: int
    """Of the prompt, perhaps estimated."""
    waited_s: float
    """Since the request came."""
    prefill: str | None = None
    """The worker's label."""
    decode: str | None = None
    prefill_load: float | None = None
    """Tokens it had to do before."""
    decode_load: float | None = None
    cached_tokens: int = 0
    """Of the prompt, expected at the prefill worker."""


class Decisions(deque[Decision]):
    """The newest of them; older ones are dropped."""

    def __init__(self) -> None:
        super().__init__(maxlen=MAX_DECISIONS)

    def of(self, request_id: str | None) -> list[Decision]:
        """Those about one request, or all; oldest first."""
        return [each for each in self if request_id in (None, each.request_id)]
