"""What the workers of a pool have to do, in workers: 3.2 is the work of three and a bit. No I/O and no clock.

Prefill: what came in, which is the share of time that went into computing prompts and what the queue has grown by.
The queue as such says how long there were too few workers: to weigh it turns workers for what is over soon, and back.
Decode: the share of the KV that requests hold or, if that is more, the share of the batch at which a token takes as
long as promised; requests that wait for room count like requests that have it, up to as many.

All is of a window, so that one long prompt moves nobody. A promise that a single request cannot keep is not looked
at: more workers would not mend it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..dialects import Health
    from ..dialects.base import Curves

Side = Literal["prefill", "decode"]
Group = tuple[str, str, str]
"""Model, cell and fingerprint: KV moves within one, so a worker can replace another of its group only."""


class Seen(NamedTuple):
    """A worker at one look."""

    url: str
    side: Side
    """That it serves now."""
    group: Group
    settled: bool
    """It is well and gets requests: not on its way in, out, or to the other role."""
    can_turn: bool
    health: Health
    heard_s: float
    """When that was said."""


@dataclass(slots=True)
class Window:
    """Of one life of one worker, that serves one role."""

    first: tuple[float, float] | None = None
    """Of `prefill_s`, and when that was said; `last` likewise."""
    last: tuple[float, float] = (0.0, 0.0)
    queue_s: list[float] = field(default_factory=list)
    """Of prompts, in seconds of this worker; one for each look, as below."""
    kept: list[float] = field(default_factory=list)
    """Share of what it can have running, as above."""
    running: list[int] = field(default_factory=list)

    def look(self, seen: Seen, token_s: float, slope_s: float) -> None:
        """token_s: promised between two tokens. slope_s: for a token of a prompt, where the worker has no curve."""
        said = seen.health
        if said.prefill_s is not None:
            self.last = said.prefill_s, seen.heard_s
            self.first = self.first or self.last
        curves = said.curves
        self.queue_s.append(_prefill_s(said.queue_tokens or 0, curves, slope_s))
        self.kept.append(_kept(said, curves, token_s))
        self.running.append(said.running or 0)

    def prefill(self) -> float:
        """Workers' worth of prefill that came in."""
        if self.first is None or not self.queue_s or (seconds := self.last[1] - self.first[1]) <= 0:
            return 0.0
        return max(0.0, self.last[0] - self.first[0] + self.queue_s[-1] - self.queue_s[0]) / seconds

    def left(self) -> tuple[float, float]:
        """What it has to finish before it can turn: prompts, and answers."""
        return (self.queue_s[-1], self.kept[-1]) if self.kept else (0.0, 0.0)

    def decode(self) -> float:
        """Workers' worth of decode."""
        return _mean(self.kept)


def slope_of(seen: Iterable[Seen]) -> float:
    """Seconds for a token of a prompt, of the median worker; 0 if none has measured it."""
    known = [
        each.health.curves.prefill[1]
        for each in seen
        if each.health.curves is not None and each.health.curves.prefill
    ]
    return median(known) if known else 0.0


def _prefill_s(tokens: int, curves: Curves | None, slope_s: float) -> float:
    if curves is None or curves.prefill is None:
        return tokens * slope_s
    start_s, each_s, _ = curves.prefill  # the third term belongs to single prompts, of unknown lengths
    return start_s + tokens * each_s if tokens else 0.0


def _kept(said: Health, curves: Curves | None, token_s: float) -> float:
    running, waiting = said.running or 0, said.waiting or 0
    capacity = (said.num_blocks or 0) * (said.block_tokens or 0)
    used = said.kv_used_tokens or 0
    share = used / capacity if capacity else 0.0
    if curves is not None and curves.decode is not None and running:
        start_s, each_s, token_of_context_s = curves.decode
        step_s = each_s + token_of_context_s * used / running
        if start_s + step_s < token_s:
            share = max(share, running * step_s / (token_s - start_s))
    return share * (1 + min(1.0, waiting / running)) if running else share + min(1, waiting)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
