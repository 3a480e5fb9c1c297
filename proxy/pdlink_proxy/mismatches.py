"""Prefill and decode workers of one model whose KV is not of use to each other, by what they say of it.

Placement never pairs them (`WorkerState.group`). What an operator must hear is which ones, and what differs: in a
rolling update some differ on purpose, and a worker without any counterpart is a mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.protocol.handshake import differing

from .worker import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .worker import Worker

MAX_SHOWN = 16
"""Pairs of kinds, not of workers."""


class _Kind(NamedTuple):
    """What workers of one side have in common."""

    model: str
    cell: str
    fingerprint: str


class Mismatch(NamedTuple):
    """Two kinds of workers, or a kind that has no counterpart at all."""

    factor: str
    prefill: str
    """Name of one of the prefill workers."""
    num_prefill: int
    decode: str
    num_decode: int
    stranded: str
    """`prefill` or `decode` if those fit nobody, both where it is so of either; else empty."""

    def describe(self) -> dict[str, Any]:
        """For GET /health."""
        return self._asdict()

    def __str__(self) -> str:
        ours, theirs = f"{self.num_prefill} prefill ({self.prefill})", f"{self.num_decode} decode ({self.decode})"
        return f"workers do not fit together: {ours} and {theirs} differ in {self.factor}"


def mismatched(prefills: Iterable[Worker], decodes: Iterable[Worker]) -> list[Mismatch]:
    """Kinds that do not fit, of healthy workers that say what their KV is; kinds that fit nobody come first."""
    ours, theirs = _kinds(prefills), _kinds(decodes)
    pairs = [(one, other) for one in ours for other in theirs if one.model == other.model and _near(one, other)]
    fit = {kind for pair in pairs if pair[0].fingerprint == pair[1].fingerprint for kind in pair}
    found = []
    for one, other in pairs:
        if one.fingerprint == other.fingerprint:
            continue
        alone = [side for side, kind in (("prefill", one), ("decode", other)) if kind not in fit]
        factor = differing(one.fingerprint, other.fingerprint)
        found.append(
            Mismatch(
                factor,
                ours[one][0].name,
                num_prefill=len(ours[one]),
                decode=theirs[other][0].name,
                num_decode=len(theirs[other]),
                stranded=" and ".join(alone),
            )
        )
    found.sort(key=lambda mismatch: not mismatch.stranded)
    return found[:MAX_SHOWN]


def _near(one: _Kind, other: _Kind) -> bool:
    return one.cell == other.cell or not one.cell or not other.cell


def _kinds(workers: Iterable[Worker]) -> dict[_Kind, Sequence[Worker]]:
    found: dict[_Kind, list[Worker]] = {}
    for worker in workers:
        said = worker.health
        if worker.state is State.OK and said is not None and said.fingerprint and not worker.plain:
            found.setdefault(_Kind(said.model, worker.cell, said.fingerprint), []).append(worker)
    return dict(found)
