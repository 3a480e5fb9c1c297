"""Restarts dead processes, with a pause that grows with each failure; the others go on serving.

Nothing here waits: the caller polls each `Keeper` a few times a second.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import TYPE_CHECKING, Any, Protocol

from pdlink.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("pdlink.up")

_FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
STEADY_S = 10.0
"""Ending within this time after it was ready counts as a failed start."""


class ChildFailed(LocalError):
    """A process of `pdlink up` ended before it was ready; the message has its last words."""

    code = "child_failed"


class Kept(Protocol):
    """A process that can be restarted."""

    label: str
    process: Any
    """subprocess.Popen of its present life."""

    def look(self) -> bool:
        """Whether it is ready. Raises ChildFailed if it has ended or failed."""
        ...

    def again(self) -> None:
        """Start it again, on the same ports."""
        ...

    def kill(self) -> None: ...


def how_it_ended(status: int) -> str:
    """An exit status in words: "was killed by SIGKILL"."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def delay_s(num_failures: int) -> float:
    return min(MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(num_failures - 1, 10)) if num_failures else 0.0


class Keeper:
    """Keeps one process running; it is ready at the beginning."""

    def __init__(
        self,
        child: Kept,
        timeout_s: float,
        max_failures: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """timeout_s: longest start. max_failures: raise after this many in a row; None never does."""
        self.child = child
        self._timeout_s, self._max_failures, self._clock = timeout_s, max_failures, clock
        self._num_failures = 0
        self._ready_s: float | None = clock()
        """Time of its readiness; None while it is not ready."""
        self._lost_s = 0.0
        self._start_at_s: float | None = None
        """Time of the next start; None if none is due."""
        self._deadline_s = 0.0

    def look(self) -> None:
        """Check the process, and restart it if due. Raises ChildFailed after `max_failures`."""
        now_s = self._clock()
        if self._start_at_s is not None:
            if now_s >= self._start_at_s:
                self._start(now_s)
        elif self._ready_s is None:
            self._await(now_s)
        elif self.child.process.poll() is not None:
            steady = now_s - self._ready_s >= STEADY_S
            self._ready_s, self._lost_s = None, now_s
            self._num_failures = 0 if steady else self._num_failures + 1
            self._later(now_s, how_it_ended(self.child.process.returncode))

    def _start(self, now_s: float) -> None:
        self._start_at_s, self._deadline_s = None, now_s + self._timeout_s
        try:
            self.child.again()
        except OSError as error:  # no process or descriptor left
            self._failed(now_s, str(error))

    def _await(self, now_s: float) -> None:
        try:
            ready = self.child.look()
            if not ready and now_s > self._deadline_s:
                raise ChildFailed(f"it was not ready within {self._timeout_s:.0f} s")
        except (LocalError, OSError) as error:
            self._failed(now_s, str(error))
            return
        if ready:
            self._ready_s = now_s
            # A warning, like its loss: a log that shows the one must show the other.
            log.warning("%s is back after %.1f s", self.child.label, now_s - self._lost_s)

    def _failed(self, now_s: float, reason: str) -> None:
        self.child.kill()
        self._num_failures += 1
        self._later(now_s, f"could not be started again ({reason})")

    def _later(self, now_s: float, what: str) -> None:
        if self._max_failures is not None and self._num_failures >= self._max_failures:
            raise ChildFailed(f"{self.child.label} {what}: failure {self._num_failures} in a row (max_failed_starts)")
        wait_s = delay_s(self._num_failures)
        self._start_at_s = now_s + wait_s
        when = f"in {wait_s:g} s" if wait_s else "now"
        log.warning("%s %s; starting it again on the same ports %s", self.child.label, what, when)
