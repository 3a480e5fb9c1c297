"""What peers and anchors have in common: a `Transport` over something that is not pdlink's.

Being transports they share processes, buffers, plans and the check of every byte with ours. Whatever they can prepare
for a batch is prepared once per list of runs and kept, and so happens in the rounds that do not count.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pdlink.errors import TransportFailure
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, Transport

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pdlink.kv.layout import RunArray, RunList
    from pdlink.memory.buffers import AnyBuffer


class ForeignTransport(Transport):
    """One buffer, one peer, and no promises but the first: a batch is OK when its bytes lie at the destination."""

    asynchronous: ClassVar[bool] = False
    """Whether `submit` returns before the bytes have landed."""

    def __init__(self) -> None:
        self._buffer: AnyBuffer | None = None
        self._prepared: dict[Hashable, tuple[int, Any]] = {}
        self._occurrences: list[Occurrence] = []
        self._next_ticket = 0

    @property
    def buffer(self) -> AnyBuffer:
        if self._buffer is None:
            raise TransportFailure(f"{self.name} has no buffer")
        return self._buffer

    def register(self, buffer: AnyBuffer) -> int:
        if self._buffer is not None:
            raise TransportFailure(f"{self.name} takes one buffer here")
        self._buffer = buffer
        return 0

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        # The arrays of runs stay in the sender's plan, so their addresses are theirs alone.
        key = tuple((one.src_base, one.dst_base, one.runs.ctypes.data, len(one.runs)) for one in lists)
        if key not in self._prepared:
            runs = np.concatenate([one.runs + (one.src_base, one.dst_base, 0) for one in lists])
            self._prepared[key] = int(runs[:, 2].sum()), self.prepare(runs)
        self._next_ticket += 1
        self.push(self._next_ticket, peer, *self._prepared[key], timeout_s)
        return self._next_ticket

    @abstractmethod
    def prepare(self, runs: RunArray) -> Any:
        """Whatever makes later pushes of these runs cheap."""

    @abstractmethod
    def push(self, ticket: int, peer: str, nbytes: int, prepared: Any, timeout_s: float) -> None:
        """Start a batch, or do all of it, and see to it that `done` gets called."""

    def done(self, ticket: int, peer: str, nbytes: int, started_s: float) -> None:
        self._occurrences.append(
            BatchDone(ticket, peer, BatchStatus.OK, nbytes, submitted_s=started_s, done_s=time.monotonic())
        )

    def poll(self) -> list[Occurrence]:
        found, self._occurrences = self._occurrences, []
        return found

    def close_peer(self, peer: str) -> None:
        """Nothing: the process ends with the benchmark."""
