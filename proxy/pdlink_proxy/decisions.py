"""Why each of the last requests went where it went, and what came of it."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import msgspec

from pdlink.observe.sources import Sourced  # noqa: TC001  (msgspec reads the annotation at run time)

MAX_TOLD = 4000


class Considered(msgspec.Struct, frozen=True):
    """Workers that a policy chose from."""

    policy: str
    scores: list[tuple[str, float]]
    """Labels and scores of the best, lowest first: what the policy weighs (for `cost` tokens of a mean worker until
    the first token), or the tokens that the worker has to do."""
    of: int
    """How many there were."""


class Decision(msgspec.Struct, frozen=True):
    """What was decided about one request, and what was known then. Made when somebody reads it (`decision`)."""

    request_id: str
    at_s: float
    """Unix time."""
    why: str
    """What the attempt is made for (`Why`)."""
    verdict: str
    """waits, refused, placed; failed, of a leg; ended."""
    reason: str
    """Why it waits, is refused or failed, or why decode works alone; how it ended."""
    tokens: int
    """Of the prompt, perhaps estimated."""
    waited_s: float
    """Since the request came: when this was."""
    prefill: str | None = None
    """The worker's label."""
    decode: str | None = None
    prefill_load: float | None = None
    """Tokens it had to do before."""
    decode_load: float | None = None
    cached_tokens: int = 0
    """Of the prompt, expected at the prefill worker."""
    considered: dict[str, Considered] = {}
    """By leg, of a decision that was sampled and had a choice."""
    source: str = ""
    """How many tokens of the prompt another worker's store is expected to have, and which, if that is more."""
    session: str = ""
    """Which turn of which session it is, and whether it is where the last one was."""


Decided: TypeAlias = tuple[Any, ...]
"""What `Decision` is made of, but for the request. Each makes some and hardly any is read; 17 named arguments take
2 us."""


def decision(request_id: str, said: Decided) -> Decision:
    plain = (msgspec.msgpack.decode(each) if isinstance(each, msgspec.Raw) else each for each in said)
    fields = dict(zip(Decision.__struct_fields__, (request_id, *plain), strict=False))
    return msgspec.convert(fields, Decision)


class Told(msgspec.Struct, frozen=True):
    """What a leg's answer said of where the KV of its prompt came from."""

    request_id: str
    worker: str
    """Its label."""
    said: Sourced


class ToldLately(deque[Told]):
    """The newest; older ones are dropped."""

    def __init__(self) -> None:
        super().__init__(maxlen=MAX_TOLD)

    def of(self, request_id: str) -> list[Told]:
        """Oldest first."""
        return [each for each in self if each.request_id == request_id]
