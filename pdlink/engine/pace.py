"""`Pace`: how fast prompts are computed here, by the last passes over nothing else. No I/O and no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.engine.scheduler import PassWork

COLD_PASSES = 8
"""Not counted: the first ones compile, allocate and load (dynamo#12430 learned from those)."""
_FADE = 0.99
"""Weight of a pass, relative to the next one: some 100 count."""


class Pace:
    """Of one engine. `passed` is of its thread; `prefill_of` may be called from any."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._tokens = self._seconds = 0.0
        """Weighted sums."""

    def passed(self, batch: Sequence[PassWork], seconds: float) -> None:
        """A forward pass over this batch has taken so long."""
        if any(work.start >= work.sequence.num_prompt for work in batch):
            return
        self._num_passes += 1
        if self._num_passes > COLD_PASSES:
            self._tokens = _FADE * self._tokens + sum(work.end - work.start for work in batch)
            self._seconds = _FADE * self._seconds + seconds

    def prefill_of(self, tokens: int) -> float:
        """Seconds for so many tokens of prompts; 0 until passes have been counted."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0
