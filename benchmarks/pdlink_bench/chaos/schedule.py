"""The schedule of faults: a pure function of the seed, to repeat a run with a finding.

The seed repeats faults, order, targets and times exactly, but not the state of the machine at these times.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PROXY = "proxy"
LOAD = "load"
"""Target of clients' faults."""


class Kind(enum.Enum):
    KILL = "kill"
    """SIGKILL, then a restart on the same ports."""
    TERM = "term"
    """SIGTERM: drain and end, then a restart on the same ports."""
    STOP = "stop"
    """SIGSTOP for a while, then SIGCONT: alive but silent, then back with old state."""
    BURST = "burst"
    FULL = "full"
    """More long requests than the blocks allow: pools run full, and requests wait for each other."""
    LOST = "lost"
    """Control messages are lost. This kind and the next ones last for the whole run."""
    DUPLICATED = "duplicated"
    LATE = "late"
    SLOW = "slow"
    """KV crosses as over a slow link."""


_MIX = {Kind.KILL: 5, Kind.STOP: 3, Kind.TERM: 1, Kind.BURST: 1, Kind.FULL: 1}
"""Momentary kinds, with their relative frequency."""
MOMENTARY = tuple(kind for kind in Kind if kind in _MIX)

_STOP_S = (0.5, 20.0)
"""From less than the tolerance of silence to much more than every deadline about peers."""
_PROXY_STOP_S = (0.5, 3.0)
"""A stopped proxy answers nobody, so its stops stay below the clients' deadline."""
_PROXY_SHARE = 0.1
"""Most faults hit workers: a killed proxy ends every running request, and hides the workers' faults."""
_BURST = (30, 90)
_FULL = (16, 32)


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """Since the start of the fault phase."""
    kind: Kind
    target: str
    """Label of a process, or `LOAD`."""
    for_s: float = 0.0
    count: int = 0
    """Requests of a BURST, or of a FULL."""

    def __str__(self) -> str:
        detail = f" for {self.for_s:.1f} s" if self.for_s else f" of {self.count} requests" if self.count else ""
        return f"{self.at_s:6.1f} s  {self.kind.value} {self.target}{detail}"


def schedule(
    seed: int, duration_s: float, every_s: float, workers: Sequence[str], kinds: Sequence[Kind] = MOMENTARY
) -> tuple[Fault, ...]:
    """The faults of one run, by time: one in every `every_s`, at a random moment of it.

    workers: labels in a fixed order. kinds: what may happen; each keeps its share. Faults that go on
    for the whole run are not in it.
    """
    chance = random.Random(f"schedule/{seed}")
    kinds = [kind for kind in kinds if kind in _MIX]
    if not kinds:
        return ()
    faults = []
    for index in range(int(duration_s / every_s)):
        at_s = (index + chance.random()) * every_s
        kind = chance.choices(list(kinds), [_MIX[kind] for kind in kinds])[0]
        target = PROXY if chance.random() < _PROXY_SHARE else chance.choice(list(workers))
        length = chance.random()
        if kind in (Kind.BURST, Kind.FULL):
            low, high = _BURST if kind is Kind.BURST else _FULL
            faults.append(Fault(at_s, kind, LOAD, count=low + int(length * (high - low))))
        elif kind is Kind.STOP:
            short, long = _PROXY_STOP_S if target == PROXY else _STOP_S
            faults.append(Fault(at_s, kind, target, for_s=short * (long / short) ** length))  # as likely as long ones
        else:
            faults.append(Fault(at_s, kind, target))
    return tuple(faults)
