"""`Blocks`, `RecordPlan`: what copies between an engine's pages and records are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from pdlink.kv.plan import Plan

    Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A part of a request's block table."""

    numbers: tuple[int, ...]
    begin: int
    """The token that the first one holds, perhaps not as its first."""

    def holding(self, token: int, block_tokens: int) -> tuple[int, ...]:
        """From the block on that holds `token`."""
        return self.numbers[token // block_tokens - self.begin // block_tokens :]


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """Copies between blocks and some records, whose runs follow each other."""

    plan: Plan
    starts: Numbers
    """Where each record begins in the arena."""
    ends: tuple[Numbers, ...]
    """Per class of the plan's template: behind the last run of each record."""

    def ends_of(self, layer: int) -> Numbers:
        return self.ends[self.plan.template.layers[layer].class_index]
