"""`Lenders`: which workers' stores lend KV to others, and which of them has most of a prompt. No I/O and no clock.

A prompt that goes to a worker which lacks it is named such a store: pulled KV is a copy over the network, and is
there sooner than computed KV, as the worker's own measurements decide (`load_if_faster`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlink.api.legs import MAX_ADDRESS_CHARS

from .table import may_exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fleet import PlacementRequest
    from .table import WorkerState

LEAST_TOKENS = 256
"""That a store must have more of a prompt than the worker that computes it: a chunk of the default size."""


class KVSource(NamedTuple):
    """A store that has more of a prompt than the worker that it goes to."""

    address: str
    label: str
    """Of the worker whose store it is."""
    tokens: int
    """Of the prompt, that are expected there."""


class _Lender(NamedTuple):
    address: str
    work: WorkerState
    stays: bool

    @property
    def is_there(self) -> bool:
        return self.stays or not self.work.away


class Lenders:
    """Of one proxy, by what the workers say of their stores in their health."""

    def __init__(self) -> None:
        self.at: dict[int, _Lender] = {}
        """By `WorkerState.number`."""

    def heard(self, work: WorkerState, address: str, *, stays: bool = False) -> None:
        """What a worker says of its store; empty for one that does not lend. stays: while the worker is away, too, as
        a process of its own; any other ends with its worker."""
        if 0 < len(address) <= MAX_ADDRESS_CHARS:
            self.at[work.number] = _Lender(address, work, stays)
        elif self.at:
            self.at.pop(work.number, None)

    def forget(self, work: WorkerState) -> None:
        """This life of the worker is over."""
        self.at.pop(work.number, None)

    def source(
        self,
        request: PlacementRequest,
        to: WorkerState,
        expected: Sequence[float] | None = None,
        workers: Sequence[WorkerState] = (),
    ) -> KVSource | None:
        """The store with most of the prompt, for the worker that computes it, of a worker that may exchange KV with
        that one; None where none has `LEAST_TOKENS` more. Another with nearly as much comes before one whose worker
        is away: it may be gone, too.

        expected: what each of `workers` is expected to have, by what it was sent, too.
        """
        at = self.at
        if to.number not in at:  # without a peer port it can ask nobody
            return None
        own = at[to.number].address
        shares = [(number, tokens) for number, tokens, _ in request.held.shares] if request.held else []
        if expected is not None:
            rows: list[int] = np.flatnonzero(np.asarray(expected) >= LEAST_TOKENS).tolist()
            shares += [(workers[row].number, int(expected[row])) for row in rows]
        lenders = [(tokens, at[number]) for number, tokens in shares if number in at]
        least = LEAST_TOKENS + max((tokens for tokens, lender in lenders if lender.address == own), default=0)
        found = [
            (tokens - LEAST_TOKENS * lender.work.away, tokens, lender)
            for tokens, lender in lenders
            if tokens >= least and lender.is_there and may_exchange(lender.work.group, to.group)
        ]
        if not found:
            return None
        _, tokens, lender = max(found, key=lambda each: each[:2])
        return KVSource(lender.address, lender.work.label, tokens)
