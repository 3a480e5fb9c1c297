"""How many requests may be tried again: enough for workers that die, too few to double the load where all fail.

The idea is Finagle's: https://twitter.github.io/finagle/docs/com/twitter/finagle/service/RetryBudget.html
"""

from __future__ import annotations

RATIO = 0.2
"""Retries that a request earns."""
PER_S = 10.0
"""Retries that a second earns, for proxies with few requests."""
MOST = 200.0
"""Retries that can be saved up: when a worker dies, all its requests are tried again at once."""


class RetryBudget:
    """Of all requests of one proxy. No clock."""

    def __init__(self) -> None:
        self.num_new = 0
        """Requests that came since the last retry. Each request counts itself."""
        self._saved = MOST
        self._spent_s: float | None = None

    def spend(self, now: float) -> bool:
        """Whether a request may be tried again now."""
        self._saved, self.num_new = min(MOST, self._saved + RATIO * self.num_new), 0
        if self._spent_s is not None:
            self._saved = min(MOST, self._saved + PER_S * (now - self._spent_s))
        self._spent_s = now
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
