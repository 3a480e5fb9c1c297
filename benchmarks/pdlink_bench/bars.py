"""What the fastest link must reach: ratios of two lanes of one run, each with what bounds it from above.

A ratio is that of speeds, as the median of the rounds' ratios. `at_best` is the same ratio for a copy or loop that
does nothing else with the same runs; where that is below what is required, nobody can reach it on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .workload import BLOCK_16_TO_128, DEFAULT, NHD_TO_HND

if TYPE_CHECKING:
    from .measure import Measured
    from .rounds import RoundResults

CEILING = "ceiling"


@dataclass(frozen=True, slots=True)
class Figure:
    lane: str
    name: str = "whole"
    case: str = DEFAULT

    def find(self, results: RoundResults) -> Measured | None:
        case = results.cases.get(self.case)
        if case is None:
            return None
        return case.ceiling if self.lane == CEILING else case.transports.get(self.lane)


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    required: float
    ours: Figure
    theirs: Figure
    bounds: tuple[Figure, ...]
    """Whose speed ours cannot exceed; the fastest of them counts."""


SOCKETS, PUTS = Figure("bare-sockets"), Figure("bare-put-shm")
STORES = Figure(CEILING, "nt")

BARS: tuple[Bar, ...] = (
    Bar("mapped by layer to nixl-shm whole", 3.5, Figure("mapped", "layers"), Figure("nixl-shm"), (STORES,)),
    Bar("mapped to non-temporal stores", 0.90, Figure("mapped"), STORES, (STORES,)),
    Bar("ucx-shm to bare puts", 0.95, Figure("ucx-shm"), PUTS, (PUTS,)),
    Bar("tcp to nixl-tcp", 2.5, Figure("tcp"), Figure("nixl-tcp"), (SOCKETS,)),
    Bar("tcp to ucx-tcp", 1.5, Figure("tcp"), Figure("ucx-tcp"), (SOCKETS,)),
    Bar("tcp to bare sockets", 0.90, Figure("tcp"), SOCKETS, (SOCKETS,)),
    *(
        Bar(
            f"mapped, {case}, to same layout",
            0.60,
            Figure("mapped", case=case),
            Figure("mapped"),
            (Figure(CEILING, "memcpy", case), Figure(CEILING, "nt", case)),
        )
        for case in (NHD_TO_HND, BLOCK_16_TO_128)
    ),
)


@dataclass(frozen=True, slots=True)
class BarVerdict:
    what: str
    required: float
    ratio: float | None
    """None: not measured in this run."""
    at_best: float | None

    @property
    def met(self) -> bool:
        return self.ratio is not None and self.ratio >= self.required


def judge(results: RoundResults) -> list[BarVerdict]:
    return [
        BarVerdict(
            bar.what,
            bar.required,
            _ratio(bar.ours, bar.theirs, results),
            max(filter(None, (_ratio(bound, bar.theirs, results) for bound in bar.bounds)), default=None),
        )
        for bar in BARS
    ]


def _ratio(ours: Figure, theirs: Figure, results: RoundResults) -> float | None:
    """Of speeds: the times' the other way round. All cases of a bar move the same number of bytes."""
    measured, other = ours.find(results), theirs.find(results)
    return None if measured is None or other is None else other.share(theirs.name, measured, ours.name)
