"""`Work`: commands and callbacks for the endpoint's thread, from any thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.reasons import Reason

    Cost = Callable[[Reason], None]
    """Called with the reason if the command raises."""


class Work:
    """Commands touch sockets and run under the lock; callbacks are the worker's and run without it. Both are FIFO."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards machines, peers and this object. Held for short work that never blocks."""
        self.commands: deque[tuple[Callable[[], None], Cost | None]] = deque()
        self.callbacks: deque[Callable[[], None]] = deque()
        self.wake_fd = -1
        """An eventfd, readable after a wake-up until the thread reads it."""
        self.asleep = False
        """Whether the thread waits, or is about to: new work must wake it."""

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
        if self.asleep:
            self.wake()

    def wake(self) -> None:
        """Make the thread run one more turn. Under the lock."""
        if self.asleep:
            self.asleep = False
            os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        """End wake-ups. Safe to call twice."""
        with self.lock:
            self.asleep = False
            wake_fd, self.wake_fd = self.wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)
