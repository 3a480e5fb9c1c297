"""The ratio of prefill to decode workers without a simulation: rates of one worker each, from means over the traffic.

A decode step costs by the context that it reads, and long answers have more steps: so the mean context is weighted
by the tokens of the answers. (On a trace whose p99 is seven times its mean, the plain mean is far off.) Waiting is
not in it: the simulation says how much of this rate is usable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from .curves import Curves
    from .traffic import Seconds, Tokens


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Requests a second, each of them of a worker that is always busy."""

    prefill_per_s: float
    """The smaller one of computing and of sending."""
    decode_per_s: float
    link_per_s: float
    """KV of prompts that the link of one prefill worker sends."""
    compute_per_s: float
    """Prompts that one prefill worker computes."""
    batch: float
    """Sequences of a decode step: the most that keep the time per token and fit into the memory."""
    batch_limit: str
    """`time per token`, `memory` or `max_running`."""
    context: float
    """Tokens, weighted by the tokens of the answers."""

    def rate(self, num_prefill: int, num_decode: int) -> float:
        """Requests a second that such a fleet serves at most."""
        return min(num_prefill * self.prefill_per_s, num_decode * self.decode_per_s)

    def num_prefill(self, workers: int) -> float:
        """Of so many workers, as a fraction."""
        total = self.prefill_per_s + self.decode_per_s
        return workers * self.decode_per_s / total if total else workers / 2

    def split(self, workers: int) -> tuple[int, int]:
        """Prefill and decode workers with the highest rate; of equal ones those with more decode workers."""
        num = max(range(1, workers), key=lambda each: (self.rate(each, workers - each), -each))
        return num, workers - num

    def workers(self, per_s: float) -> float:
        """For so many requests a second, if none ever waited."""
        if not self.decode_per_s:
            return math.inf
        return per_s / self.prefill_per_s + per_s / self.decode_per_s

    @property
    def link_loses(self) -> bool:
        """The link takes longer for the KV of the prompts than prefill for computing them."""
        return self.link_per_s < self.compute_per_s


def closed_form(
    curves: Curves, prompt: Tokens, answer: Tokens, cached: Tokens | None, per_token_s: float
) -> ClosedForm:
    """cached: of each prompt, at prefill already. per_token_s: the promise."""
    prefill_s = prefill_times(curves, prompt, cached)
    compute_per_s = 1 / float(prefill_s.mean())
    link_per_s = 1 / (float(prompt.mean()) * curves.transfer_s)
    steps = np.maximum(answer - 1, 0).astype(np.float64)
    if not steps.sum():
        return ClosedForm(
            min(compute_per_s, link_per_s), math.inf, link_per_s, compute_per_s, 0.0, "max_running", 0.0
        )
    context = float(((prompt + answer / 2) * steps).sum() / steps.sum())
    need = np.minimum(prompt + answer, curves.pool_tokens)
    idle_s = float((need * prefill_s).mean())  # memory times seconds before the first step
    held = float((need * steps).mean())

    def step_s(batch: float) -> float:
        return curves.decode_step_s(batch, batch * context)

    limits = {
        "max_running": float(curves.max_running),
        "time per token": (per_token_s - curves.step_s) / max(1e-300, curves.sequence_s + curves.context_s * context),
        "memory": _largest(
            lambda batch: (
                batch / (step_s(batch) * steps.mean()) * (idle_s + step_s(batch) * held) <= curves.pool_tokens
            ),
            curves.max_running,
        ),
    }
    limit = min(limits, key=lambda each: limits[each])
    batch = max(0.0, limits[limit])
    decode_per_s = batch / step_s(batch) / float(steps.mean())
    return ClosedForm(min(compute_per_s, link_per_s), decode_per_s, link_per_s, compute_per_s, batch, limit, context)


def prefill_times(curves: Curves, prompt: Tokens, cached: Tokens | None) -> Seconds:
    """Of each prompt alone."""
    before = np.zeros_like(prompt) if cached is None else cached
    new = np.maximum(1, prompt - before)
    passes = -(-new // curves.max_batched_tokens)
    times: Seconds = passes * curves.prompt_s + curves.token_s * new + curves.attention_s * new * (prompt - new / 2)
    return times


def _largest(fits: Callable[[float], bool], most: float) -> float:
    """The largest batch up to `most` that fits."""
    low, high = 0.0, float(most)
    if fits(high):
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
