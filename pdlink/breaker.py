"""`Breaker`: leaves alone what fails or stalls, and lets one call try again later. No clock, no lock."""

from __future__ import annotations

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Breaker:
    def __init__(self, deadline_s: float, *, failures: int = 3) -> None:
        """deadline_s: a call that takes longer counts as a failure, and keeps further ones away while it lasts.
        failures: in a row, before calls are kept away."""
        self._deadline_s, self._limit = deadline_s, failures
        self.failures = 0
        """In a row, until now."""
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until_s = 0.0
        self._running: dict[int, float] = {}
        """When each call under way began."""
        self._calls = 0
        self._old_calls = 0
        """Calls that had begun when it was last closed: they may go on for long, and prove nothing anew."""

    def keeps_away(self, now_s: float) -> bool:
        """Whether it fails or stalls; until a call succeeds."""
        return self.failures >= self._limit or (bool(self._running) and self.stalls(now_s))

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made. While calls are kept away one at a time is let through after each pause."""
        if self._running and self.stalls(now_s):
            return False
        return self.failures < self._limit or (now_s >= self._closed_until_s and not self._probes())

    def stalls(self, now_s: float) -> bool:
        """Whether a call under way takes too long."""
        for began_s in self._running.values():
            return now_s - began_s > self._deadline_s  # the oldest is first
        return False

    def begin(self, now_s: float) -> int:
        """A call begins; names it for `end`."""
        self._calls += 1
        self._running[self._calls] = now_s
        return self._calls

    def end(self, call: int, now_s: float, *, failed: bool) -> None:
        """failed: it raised. A miss is no failure."""
        began_s = self._running.pop(call, now_s)
        if not failed and now_s - began_s <= self._deadline_s:
            self.failures, self._pause_s = 0, _FIRST_PAUSE_S
            return
        self.failures += 1
        if self.failures >= self._limit:
            self._closed_until_s, self._old_calls = now_s + self._pause_s, self._calls
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def drop(self, call: int) -> None:
        """A call is over and proves nothing: it was not waited for. Nothing if it has ended."""
        self._running.pop(call, None)

    def _probes(self) -> bool:
        """Whether a call finds out now: the newest is last."""
        return next(reversed(self._running), 0) > self._old_calls
