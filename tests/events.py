"""Events of no GPU, reached when the test says so, and what tells of them."""

from __future__ import annotations

import contextlib
import os
import threading

from pdlink.memory.buffers import Buffer
from tests.waiting import WAIT_S


class HeldEvent:
    """As `pdlink.memory.buffers.StreamEvent`."""

    handle = 0

    def __init__(self, stream: int = 0) -> None:
        self.stream = stream
        self.failure = ""
        self.num_records = 0
        self._over = threading.Event()
        self._bells: list[EventBells] = []

    def reach(self, failure: str = "") -> None:
        self.failure = self.failure or failure
        self._over.set()
        for bells in self._bells:
            bells.ring()

    def record(self) -> None:
        self.num_records += 1

    def reached(self) -> bool:
        if self._over.is_set() and self.failure:
            raise RuntimeError(self.failure)
        return self._over.is_set()

    def synchronize(self) -> None:
        assert self._over.wait(WAIT_S)
        self.reached()

    def ring(self, bells: EventBells) -> None:
        self._bells.append(bells)
        if self._over.is_set():
            bells.ring()


class Reached(HeldEvent):
    """Its work is done."""

    def __init__(self) -> None:
        super().__init__()
        self._over.set()


class EventBells:
    """As `pdlink.cuda.bells.Bells`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._fd

    def ring_after(self, event: HeldEvent) -> None:
        event.ring(self)

    def ring(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Gpu:
    """Hands out events, and lets them be reached."""

    def __init__(self) -> None:
        self.events: list[HeldEvent] = []
        self.stream = 0
        """Of the events that are made from now on."""

    def make_event(self) -> HeldEvent:
        self.events.append(HeldEvent(self.stream))
        return self.events[-1]

    def reach(self, *, failure: str = "") -> None:
        for event in self.events:
            event.reach(failure)


class DeviceLike(Buffer):
    """Host memory that says it is a GPU's, for a transport that does not mind."""

    kind = "cuda"  # type: ignore[assignment]

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.gpu = Gpu()

    def make_event(self) -> HeldEvent:  # type: ignore[override]
        return self.gpu.make_event()

    def make_bells(self) -> EventBells:
        return EventBells()
