"""`Post`: one process of this host that must run. Decides when it is started, lost, and started again.

A post is away (until its next start is due), starting, or ready. Each failure in a row makes the next start later.
Nothing here waits, and nothing knows how processes are started.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from pdlink.fleet.child import ChildFailed, how_it_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.fleet.child import Restartable

log = logging.getLogger("pdlink.up")

MAX_DELAY_S = 30.0
STEADY_S = 10.0
"""Ending within this time after it was ready counts as a failed start."""
_FIRST_DELAY_S = 0.5
_TRIES = 3
"""A process that dies so often before it is ready for the first time has no chance."""


def delay_s(num_failures: int) -> float:
    return min(MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(num_failures - 1, 10)) if num_failures else 0.0


class Post:
    """Call `look` a few times a second. Its process keeps its ports."""

    def __init__(
        self,
        label: str,
        role: str,
        start: Callable[[], Restartable],
        *,
        start_timeout_s: float = math.inf,
        max_failures: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start: starts the process for the first time. start_timeout_s: longest start of a process that was ready
        before. max_failures: give up after this many failed starts in a row; None never does."""
        self.label, self.role = label, role
        self.child: Restartable | None = None
        """Over all its lives; None before the first."""
        self.away = True
        """It does not run, until its next start is due."""
        self.num_failures = 0
        """Failed starts in a row."""
        self._start, self._start_timeout_s, self._max_failures = start, start_timeout_s, max_failures
        self._clock = clock
        self._launched_s = self._again_s = 0.0
        self._ready_s: float | None = None
        self._lost_s: float | None = None
        self._num_lives = 0
        self._ever_ready = False

    @property
    def ready(self) -> bool:
        return self._ready_s is not None

    @property
    def facts(self) -> dict[str, Any]:
        """Of the present life, once it is ready; empty before."""
        return self.child.facts if self.ready and self.child is not None else {}

    @property
    def url(self) -> str:
        """Of the process, if it is ready."""
        return str(self.facts["url"]) if self.ready else ""

    @property
    def doing(self) -> str:
        return "not started" if self.away or self.child is None else self.child.doing

    @property
    def warnings(self) -> Sequence[str]:
        """Of the start of the present life."""
        return () if self.away or self.child is None else self.child.warnings

    def look(self) -> None:
        """Take in what is seen, and do what is due.

        Raises ChildFailed for a process that cannot run where it never ran, and for too many failures in a row.
        """
        now_s = self._clock()
        if self.away:
            if now_s >= self._again_s:
                self._launch(now_s)
            return
        assert self.child is not None
        try:
            self._hear(self.child, now_s)
        except OSError as error:
            self._lose(now_s, str(error))

    def _launch(self, now_s: float) -> None:
        self._num_lives += 1
        self._launched_s = now_s
        try:
            if self.child is None:
                self.child = self._start()
            else:
                self.child.again()
        except OSError as error:  # no process or descriptor left
            self._lose(now_s, f"could not be started ({error})")
        else:
            self.away = False

    def _hear(self, child: Restartable, now_s: float) -> None:
        if self._ready_s is not None:
            if child.process.poll() is not None:
                self._lose(now_s, how_it_ended(child.process.returncode))
            elif now_s - self._ready_s >= STEADY_S:
                self.num_failures = 0
            return
        try:
            ready = child.look()
        except ChildFailed as error:
            if (child.process.poll() or 0) < 0:  # by others: it may well be able to run
                self._lose(now_s, str(error).removeprefix(f"{self.label} "))
            elif self._ever_ready:
                self._lose(now_s, f"could not be started again ({error})")
            else:
                raise
            return
        if ready:
            self._ready_s, self._ever_ready = now_s, True
            if self._lost_s is not None:  # a warning, like its loss: a log that shows the one must show the other
                log.warning("%s is back after %.1f s: %s", self.label, now_s - self._lost_s, self.url)
                self._lost_s = None
        elif self._ever_ready and now_s - self._launched_s > self._start_timeout_s:
            self._lose(now_s, f"was not ready within {self._start_timeout_s:.0f} s")

    def _lose(self, now_s: float, why: str) -> None:
        if self.child is not None and not self.away:
            self.child.kill()
        steady = self._ready_s is not None and now_s - self._ready_s >= STEADY_S
        self.num_failures = 0 if steady else self.num_failures + 1
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        self.away, self._ready_s = True, None
        if not self._ever_ready and self._num_lives >= _TRIES:
            raise ChildFailed(f"{self.label} {why}")
        if self._max_failures is not None and self.num_failures >= self._max_failures:
            raise ChildFailed(f"{self.label} {why}: failure {self.num_failures} in a row (max_failed_starts)")
        wait_s = delay_s(self.num_failures)
        self._again_s = now_s + wait_s
        when = f"in {wait_s:g} s" if wait_s else "now"
        log.warning("%s %s; starting it again on the same ports %s", self.label, why, when)
