"""The last transfers of a worker: when each layer was written, and when its push flew and landed; and of prompts
where their KV came from. `pdlink.observe.trace` makes a picture of it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
import time
from collections import OrderedDict, deque
from pathlib import Path

import msgspec

from pdlink.events import Event, LayerLanded, LayerWritten, PromptSourced, TransferEnded
from pdlink.observe.series import Busy
from pdlink.observe.sources import Sourced, sourced

MAX_PROMPTS = 4000
_MAX_ID_CHARS = 256

_TransferEvent = LayerWritten | LayerLanded | TransferEnded


class EndedTransfer(msgspec.Struct, frozen=True):
    """What became of one transfer. Every time is a duration on this host's clock."""

    transfer_id: str
    side: str
    peer: str
    lane: str
    state: str
    reason: str
    nbytes: int
    ended_s_ago: float
    life_s: float
    layers: int
    """Of which a part has landed."""
    moving_s: float
    """While something of it was in flight; 0 on the receiver."""
    exposed_s: float
    """The part of it after the last layer was written: what prefill did not hide."""


class KeptTransfer(msgspec.Struct, frozen=True):
    """What is known of one transfer."""

    transfer_id: str
    written: list[LayerWritten] = []
    """Of the sender, as `landed`."""
    landed: list[LayerLanded] = []
    ended: TransferEnded | None = None
    """None while it goes on."""

    @property
    def peer(self) -> str:
        """Known when it has ended."""
        return self.ended.peer if self.ended else ""

    @property
    def span_s(self) -> tuple[float, float]:
        """From its begin, or its first event that is known, to its end or its last one."""
        begins = [each.at_s for each in self.written] + [each.asked_s for each in self.landed]
        ends = [each.at_s for each in (*self.written, *self.landed)]
        if self.ended is not None:
            begins.append(self.ended.started_s)
            ends.append(self.ended.at_s)
        return min(begins), max(ends)


class Dump(msgspec.Struct, frozen=True):
    """All that a timeline keeps, as GET /pdlink/events answers it."""

    name: str
    """Of the worker."""
    clock: str
    """Workers of one value share a clock; see `clock`."""
    now_s: float
    """On that clock, as all times here."""
    transfers: list[KeptTransfer] = []
    """Oldest first; each has an event at least."""
    prompts: list[PromptSourced] = []


class Timeline:
    """Keeps the events of the last `capacity` transfers, and where the KV of `MAX_PROMPTS` prompts came from.

    Pass the instance to `pdlink.events.listen`.
    """

    def __init__(self, name: str, capacity: int = 64) -> None:
        self._name, self._capacity = name, capacity
        self._lock = threading.Lock()
        self._transfers: OrderedDict[str, list[_TransferEvent]] = OrderedDict()
        self._callers: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """The caller's id and the leg, by the engine's id."""
        self._prompts: deque[tuple[PromptSourced, str, Sourced | None]] = deque(maxlen=MAX_PROMPTS)
        """With the caller's id, and what is told to who asks by it."""

    def named(self, request_id: str, caller_id: str, leg: str) -> None:
        """A request of this engine's id begins, which its caller calls `caller_id`."""
        if 0 < len(caller_id) <= _MAX_ID_CHARS:
            with self._lock:
                self._callers[request_id] = caller_id, leg
                if len(self._callers) > MAX_PROMPTS:
                    self._callers.popitem(last=False)

    def __call__(self, event: Event) -> None:
        if isinstance(event, PromptSourced):
            with self._lock:
                caller_id, leg = self._callers.get(event.request_id, ("", ""))
                self._prompts.append((event, caller_id, sourced(event, leg) if caller_id else None))
        if not isinstance(event, _TransferEvent):
            return
        with self._lock:
            if event.transfer_id not in self._transfers:
                self._transfers[event.transfer_id] = []
                if len(self._transfers) > self._capacity:
                    self._transfers.popitem(last=False)
            self._transfers[event.transfer_id].append(event)

    def ended(self, most: int) -> list[EndedTransfer]:
        """Up to so many transfers that have ended, the newest first."""
        with self._lock:
            transfers = [list(events) for events in reversed(self._transfers.values())]
        return list(itertools.islice((found for events in transfers if (found := _ended(events))), most))

    def sources(self, caller_id: str) -> list[Sourced]:
        """Of the prompts of a caller's request, oldest first."""
        with self._lock:
            return [told for _, known, told in self._prompts if known == caller_id and told is not None]

    def dump(self) -> Dump:
        """All of it, for `pdlink.observe.trace`."""
        with self._lock:
            prompts = [event for event, _, _ in self._prompts][-self._capacity :]
            transfers = [(name, list(events)) for name, events in self._transfers.items()]
        return Dump(
            name=self._name,
            clock=clock(),
            now_s=time.monotonic(),
            transfers=[_kept(name, events) for name, events in transfers],
            prompts=prompts,
        )


@functools.cache
def clock() -> str:
    """Names this process's monotonic clock: that of one boot of one kernel, and of one time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel without them
        namespace = ""
    return hashlib.blake2b(f"{boot}/{namespace}".encode(), digest_size=8).hexdigest()


def _kept(transfer_id: str, events: list[_TransferEvent]) -> KeptTransfer:
    return KeptTransfer(
        transfer_id=transfer_id,
        written=[event for event in events if isinstance(event, LayerWritten)],
        landed=[event for event in events if isinstance(event, LayerLanded)],
        ended=next((event for event in events if isinstance(event, TransferEnded)), None),
    )


def _ended(events: list[_TransferEvent]) -> EndedTransfer | None:
    end = next((event for event in events if isinstance(event, TransferEnded)), None)
    if end is None:
        return None
    landed = [event for event in events if isinstance(event, LayerLanded)]
    busy = Busy()
    for event in sorted(landed, key=lambda event: event.at_s):
        busy.add(event.submitted_s, event.at_s)
    return EndedTransfer(
        transfer_id=end.transfer_id,
        side=end.side,
        peer=end.peer,
        lane=end.transport,
        state=end.state,
        reason=end.reason,
        nbytes=end.nbytes,
        ended_s_ago=time.monotonic() - end.at_s,
        life_s=end.at_s - end.started_s,
        layers=len({event.layer for event in landed}),
        moving_s=busy.total_s,
        exposed_s=end.exposed_s or 0.0,
    )
