"""A staged lane for tests that speak of runs: each list of them goes as plans between blocks of a suitable size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part, RunList
from pdlink.kv.plan import Plan, bind, template
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, Transport
from pdlink.transport.staging.wire import Invitation
from pdlink_bench.carried import Carried, CarriedInvitation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdlink.kv.plan import IntArray
    from pdlink.memory.buffers import AnyBuffer
    from pdlink.transport.staged import StagedTransport

_MOST_BITS = 12
"""Blocks of 4 KiB, which fit every slot."""


class AllOpen:
    """In place of `OpenBlocks`: of overlaid groups, all blocks of which are open to everybody invited."""

    def __init__(self, _groups: KVGroups) -> None:
        pass

    def require(self, _peer: int, _group: int, blocks: IntArray) -> IntArray:
        return blocks

    def open(self, *_: object) -> None:
        pass

    def close(self, _peer: int, _blocks: object) -> IntArray:
        return np.empty(0, np.int64)


def _paged(region: int, offset: int, size: int, count: int) -> KVLayout:
    return KVLayout("uint8", 1, max(1, count), 1, size, (LayerLayout((Part(region, offset),), size, size, size),))


def _groups(sizes: Sequence[int]) -> KVGroups:
    """Of each region in blocks of 1 byte, of 2, and so on."""
    return KVGroups(
        tuple(
            _paged(region, 0, 1 << bits, nbytes >> bits) if nbytes >> bits else _paged(region, 0, 1, 1)
            for region, nbytes in enumerate(sizes)
            for bits in range(_MOST_BITS + 1)
        )
    )


class ByRuns(Carried):
    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        cast("Any", inner)._open_blocks = AllOpen
        self._sizes: list[int] = []
        self._there: dict[str, tuple[tuple[int, ...], KVGroups]] = {}
        self._parts: dict[int, set[int]] = {}
        """Batches that are not done of each that was submitted here, by the ticket of the first one."""
        self._first: dict[int, int] = {}
        self._done: dict[int, list[BatchDone]] = {}

    def register(self, buffer: AnyBuffer) -> int:
        self._sizes.append(buffer.nbytes)
        return super().register(buffer)

    def invite(self, peer: str) -> bytes:
        inner = cast("StagedTransport", self.inner)
        if self._sizes:
            inner._to_guard = _groups(self._sizes) if inner._stager is not None and not inner._received.made else None
        return super().invite(peer)

    def connect(self, peer: str, invitation: bytes) -> None:
        super().connect(peer, invitation)
        inner = msgspec.msgpack.decode(invitation, type=CarriedInvitation).inner
        regions = msgspec.msgpack.decode(inner, type=Invitation).regions
        self._there[peer] = regions, _groups(regions)

    def submit_plan(
        self, peer: str, plan: Plan, layers: range, timeout_s: float, after: Sequence[tuple[int, int]] = ()
    ) -> int:
        return Transport.submit_plan(self, peer, plan, layers, timeout_s, after)

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        there, groups = self._there.get(peer, ((), None))
        if groups is not None:
            for one in lists:
                _require(one, self._sizes, there)
        plans = [] if groups is None else [plan for one in lists for plan in _plans(one, groups)]
        nothing = _paged(0, 0, 1, 1)
        with self._lock:
            tickets = [
                super(ByRuns, self).submit_plan(peer, plan, range(1), timeout_s)
                for plan in plans or [bind(template(nothing, nothing), [], [], 0, 0)]
            ]
            self._parts[tickets[0]] = {*tickets}
            self._first.update(dict.fromkeys(tickets, tickets[0]))
            self._done[tickets[0]] = []
            return tickets[0]

    def poll(self) -> list[Occurrence]:
        with self._lock:
            found: list[Occurrence] = []
            for one in super().poll():
                if not isinstance(one, BatchDone):
                    found.append(one)
                    continue
                first = self._first.pop(one.ticket)
                self._done[first].append(one)
                self._parts[first].discard(one.ticket)
                if not self._parts[first]:
                    found.append(_whole(first, self._done.pop(first)))
            return found


def _whole(ticket: int, parts: list[BatchDone]) -> BatchDone:
    worst = next((one for one in parts if one.status is not BatchStatus.OK), parts[-1])
    return msgspec.structs.replace(
        worst,
        ticket=ticket,
        nbytes=sum(one.nbytes for one in parts),
        submitted_s=min(one.submitted_s for one in parts),
        done_s=max(one.done_s for one in parts),
    )


def _require(one: RunList, here: Sequence[int], there: Sequence[int]) -> None:
    sides = (one.src_region, here, one.src_base), (one.dst_region, there, one.dst_base)
    for column, (region, sizes, base) in enumerate(sides):
        if not 0 <= region < len(sizes):
            raise ValueError(f"no region {region}")
        at, nbytes = one.runs[:, column], one.runs[:, 2]
        room = sizes[region] - base
        if ((at < -base) | (nbytes < 0) | (at > room) | (nbytes > room - np.minimum(at, room))).any():
            raise ValueError(f"a run is outside region {region} of {sizes[region]} bytes")


def _plans(one: RunList, groups: KVGroups) -> Iterator[Plan]:
    runs = one.runs[one.runs[:, 2] > 0] + (one.src_base, one.dst_base, 0)
    while len(runs):  # a plan names a block once
        mine = _firsts(runs[:, 1])
        yield from _plans_of(one.src_region, one.dst_region * (_MOST_BITS + 1), runs[mine], groups)
        runs = runs[~mine]


def _plans_of(src_region: int, first_group: int, runs: Any, groups: KVGroups) -> Iterator[Plan]:
    src, dst, nbytes = runs.T
    begin = int(src.min())
    together = int(np.bitwise_or.reduce((src - begin) | dst | nbytes)) | 1 << _MOST_BITS
    bits = (together & -together).bit_length() - 1
    counts = nbytes >> bits
    steps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    of, to = (np.repeat(at >> bits, counts) + steps for at in (src - begin, dst))
    pages = _paged(src_region, begin, 1 << bits, int(of.max()) + 1)
    shape = template(pages, groups.layouts[first_group + bits], first_group + bits)
    while len(to):
        mine = _firsts(to)
        yield bind(shape, of[mine], to[mine], 0, int(mine.sum()))
        of, to = of[~mine], to[~mine]


def _firsts(numbers: Any) -> Any:
    """Which ones are named for the first time."""
    found = np.zeros(len(numbers), np.bool_)
    found[np.unique(numbers, return_index=True)[1]] = True
    return found
