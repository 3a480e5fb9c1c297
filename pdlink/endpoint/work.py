"""`Work`: what other threads leave for the endpoint's thread, and how they wake it."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Cost = Callable[[str], None]
    """What a failure costs the one that caused it; called with the reason."""


class Work:
    """Commands touch sockets and run under the lock; callbacks are the worker's and run without it. Both in order."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards machines, peers and this. Held for short work that never blocks."""
        self.commands: deque[tuple[Callable[[], None], Cost | None]] = deque()
        self.callbacks: deque[Callable[[], None]] = deque()
        self.wake_fd = -1
        """Readable once the thread is to go round again."""
        self.asleep = False
        """Whether the thread waits, or is about to, and has to be woken for what was added since."""

    def open(self) -> None:
        """Raises OSError if no descriptor is left."""
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def call(self, command: Callable[[], None], cost: Cost | None = None) -> None:
        """Run in the endpoint's thread, under the lock; `cost(reason)` if it raises. From any thread."""
        with self.lock:
            self.commands.append((command, cost))
            self.wake()

    def defer(self, callback: Callable[[], None]) -> None:
        """Run in the endpoint's thread, without the lock. Under the lock."""
        self.callbacks.append(callback)
        self.wake()

    def wake(self) -> None:
        """Let the thread go round once more. Under the lock."""
        if self.asleep:
            self.asleep = False
            os.eventfd_write(self.wake_fd, 1)

    def woken(self) -> None:
        """The descriptor was readable."""
        os.eventfd_read(self.wake_fd)

    def close(self) -> None:
        """Nobody is woken any more. Safe to call twice."""
        with self.lock:
            self.asleep = False
            wake_fd, self.wake_fd = self.wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)
