"""What the flow knows of one attempt: its legs, and what they have said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .sse import EventBuffer

if TYPE_CHECKING:
    from .steps import Leg


@dataclass(slots=True)
class LegState:
    worker: str
    since_s: float
    """Its last sign of life; its deadline counts from here."""
    running: bool = True
    ended_well: bool = False
    spoke: bool = False
    """Its first data event or whole answer is here."""
    events: EventBuffer = field(default_factory=EventBuffer)


class AttemptState(NamedTuple):
    number: int
    legs: dict[Leg, LegState]
    decode: str
    """Decode's worker."""
    prefill_answer: bytes
    prefill_spoke_s: float | None
