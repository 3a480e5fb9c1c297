"""How tests wait: for an event, never for a time. The bound is for what does not come: nothing takes that long."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

WAIT_S = 60.0
"""Of every wait, also on a machine with many times more to do than it has cores. Below the test's own time limit."""


def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for something that another thread or process does."""
    deadline_s, pause_s = time.monotonic() + timeout_s, 0.001
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s until {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def readable(*fds: int, timeout_s: float = 0.0) -> bool:
    """Whether one of these is readable within that time. `select` itself takes no descriptor above 1,023."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
