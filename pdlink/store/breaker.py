"""`Breaker`: leaves a tier alone while it fails or stalls, and lets one call try again later. No clock, no lock."""

from __future__ import annotations

_FAILURES = 3
"""In a row, before calls are kept away."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Breaker:
    def __init__(self, deadline_s: float) -> None:
        """deadline_s: a call that takes longer counts as a failure, and keeps further ones away while it lasts."""
        self._deadline_s = deadline_s
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until_s = 0.0
        self._running: dict[int, float] = {}
        """When each call under way began."""
        self._calls = 0

    def keeps_away(self, now_s: float) -> bool:
        """Whether the tier fails or stalls; until a call succeeds."""
        return self._failures >= _FAILURES or self._stalls(now_s)

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made. While calls are kept away one at a time is let through after each pause."""
        if self._stalls(now_s):
            return False
        return self._failures < _FAILURES or (now_s >= self._closed_until_s and not self._running)

    def begin(self, now_s: float) -> int:
        """A call begins; names it for `end`."""
        self._calls += 1
        self._running[self._calls] = now_s
        return self._calls

    def end(self, call: int, now_s: float, *, failed: bool) -> None:
        """failed: it raised. A miss is no failure."""
        if not failed and now_s - self._running.pop(call) <= self._deadline_s:
            self._failures, self._pause_s = 0, _FIRST_PAUSE_S
            return
        self._running.pop(call, None)
        self._failures += 1
        if self._failures >= _FAILURES:
            self._closed_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _stalls(self, now_s: float) -> bool:
        return any(now_s - began_s > self._deadline_s for began_s in self._running.values())
