"""Fault injection: a control channel that drops, repeats and delays frames (`Node(channel=...)`), and slow links.

ZeroMQ over TCP does none of this inside one connection. The faults stand for bugs, full queues, suspended processes
and slow networks.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import random
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdlink.endpoint.channel import Channel, QueueFull
from pdlink.transport.base import BatchDone, BatchStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdlink.endpoint.channel import Arrival
    from pdlink.transport.base import Occurrence, Transport

log = logging.getLogger(__name__)

FAULTS = "LINK_FAULTS"
"""Variable of a process that has such links: a JSON object of `LinkFaults`. (Those named PDLINK_ are settings.)"""

LAYER_S = "SLOW_LAYER_S"
"""Variable of a process whose passes over prompts take so many seconds longer in each layer."""

_COPY_S = 0.05
"""A repeated frame comes up to this much later, so that others overtake it."""

_FULL_S = 0.005
"""Pause after a full queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """What a worker sends to others is lost, repeated or late."""

    seed: int = 0
    """With the worker's name it decides which frames are hit."""
    drop: float = 0.0
    """Share of control frames that are lost, below 1."""
    duplicate: float = 0.0
    """Share of control frames that are sent twice, the second time late."""
    delay_s: float = 0.0
    """Most seconds a control frame is late; the order of a connection stays."""
    link_nbytes_per_s: float = 0.0
    """KV is reported as sent no faster than this, over each transport; 0 slows nothing."""

    @property
    def of_frames(self) -> bool:
        """Whether anything is to happen to control frames."""
        return bool(self.drop or self.duplicate or self.delay_s)


def channels(faults: LinkFaults) -> Callable[[str], Channel]:
    """What `Node(channel=...)` takes: plain channels, unless something is to happen to control frames."""
    return partial(TamperedChannel, faults) if faults.of_frames else Channel


def slow_down(transports: Iterable[Transport], faults: LinkFaults) -> None:
    """Let each transport report its batches no sooner than the configured link would have carried them."""
    if faults.link_nbytes_per_s:
        for transport in transports:
            SlowLink(faults.link_nbytes_per_s).carry(transport)


class TamperedChannel(Channel):
    """A `Channel` with seeded faults of outgoing frames. Delays keep the order of a route, copies do not."""

    def __init__(self, faults: LinkFaults, identity: str) -> None:
        """Every worker draws its own faults from the seed, by the name in its identity."""
        super().__init__(identity)
        self._faults = faults
        self._chance = random.Random(f"{faults.seed}/{identity.partition('@')[0]}")
        self._held: list[tuple[float, int, str, bytes]] = []
        """Heap of (due, number, route, frame)."""
        self._num_held = 0
        self._full_until_s = 0.0
        self._last_due_s: dict[str, float] = {}
        self._broken: set[str] = set()
        """Routes on which a held frame could not be sent: the next `send` returns False."""

    def send(self, route: str, frame: bytes) -> bool:
        if route in self._broken:
            return False
        if self._chance.random() < self._faults.drop:
            log.info("chaos: a frame of %d bytes on %s is lost", len(frame), route)
            return True
        due_s = max(time.monotonic() + self._chance.random() * self._faults.delay_s, self._last_due_s.get(route, 0.0))
        if self._chance.random() < self._faults.duplicate:
            self._hold(due_s + self._chance.random() * max(_COPY_S, self._faults.delay_s), route, frame)
        if self._faults.delay_s == 0.0:
            self._flush()  # frames that found a full queue go first
            if time.monotonic() >= self._full_until_s:
                try:
                    return super().send(route, frame)
                except QueueFull:
                    self._full_until_s = time.monotonic() + _FULL_S
        self._last_due_s[route] = due_s
        self._hold(due_s, route, frame)
        return True

    def drop(self, route: str) -> None:
        """Close a connection; its held frames leave now, in order."""
        leaving = sorted(item for item in self._held if item[2] == route)
        self._held = [item for item in self._held if item[2] != route]
        heapq.heapify(self._held)
        with contextlib.suppress(QueueFull):
            for _, _, _, frame in leaving:
                super().send(route, frame)
        self._last_due_s.pop(route, None)
        self._broken.discard(route)
        super().drop(route)

    def poll(self, timeout_s: float) -> tuple[Iterable[Arrival], set[int]]:
        self._flush()
        if self._held:
            timeout_s = min(timeout_s, max(self._held[0][0], self._full_until_s) - time.monotonic())
        arrived = super().poll(timeout_s)
        self._flush()
        return arrived

    def _hold(self, due_s: float, route: str, frame: bytes) -> None:
        self._num_held += 1
        heapq.heappush(self._held, (due_s, self._num_held, route, frame))

    def _flush(self) -> None:
        while self._held and self._held[0][0] <= time.monotonic() and time.monotonic() >= self._full_until_s:
            due_s, number, route, frame = heapq.heappop(self._held)
            try:
                if not super().send(route, frame):
                    self._broken.add(route)
            except QueueFull:  # all routes wait, so held frames keep their order
                heapq.heappush(self._held, (due_s, number, route, frame))
                self._full_until_s = time.monotonic() + _FULL_S


class SlowLink:
    """Holds back reports of batches for as long as a link of `nbytes_per_s` would take.

    The bytes land earlier, but the window, *done* and the blocks wait for the report as on a slow wire. The loop's
    next turn notices due reports, so within half a heartbeat.
    """

    def __init__(self, nbytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._nbytes_per_s, self._clock = nbytes_per_s, clock
        self._free_s = 0.0
        """When the link is free again."""
        self._held: deque[tuple[float, Occurrence]] = deque()
        """(due, report), earliest first."""

    def carry(self, transport: Transport) -> None:
        """From now on this transport reports through the link, and what is held when it is closed comes at once."""
        poll, close = transport.poll, transport.close

        def close_at_once() -> None:
            close()
            self._nbytes_per_s = math.inf

        transport.poll = lambda: self.passed(poll())  # type: ignore[method-assign]
        transport.close = close_at_once  # type: ignore[method-assign]

    def passed(self, occurrences: Sequence[Occurrence]) -> list[Occurrence]:
        """Add these reports; returns the reports that are due now, in order for each peer."""
        now, out = self._clock(), []
        for item in occurrences:
            if isinstance(item, BatchDone) and item.status is BatchStatus.OK:
                self._free_s = max(self._free_s, now) + item.nbytes / self._nbytes_per_s
                self._held.append((self._free_s, item))
            else:  # failures and fences do not wait; earlier reports of the same peer go first
                out += [earlier for _, earlier in self._held if earlier.peer == item.peer]
                out.append(item)
                self._held = deque(entry for entry in self._held if entry[1].peer != item.peer)
        while self._held and (self._held[0][0] <= now or self._nbytes_per_s == math.inf):
            out.append(self._held.popleft()[1])
        return out
