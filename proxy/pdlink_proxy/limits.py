"""What one API key may ask in a minute: requests and tokens, each a bucket that fills all the time. No I/O, no clock.

A request takes its prompt and the longest answer it allows when it comes. One larger than the bucket waits for
a full one and leaves it in debt, or it could never be served.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.config.proxy import RateLimit

MAX_KEYS = 10_000
"""That are remembered; the one that was used longest ago is forgotten, and has full buckets then."""
_MINUTE_S = 60.0
_MOST_DEBT = 60.0
"""Buckets that one request can empty: a number of tokens without sense must not lock a key for years."""


@dataclass(slots=True)
class _Bucket:
    size: float
    level: float
    at_s: float

    def fill(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self.at_s) * self.size / _MINUTE_S)
        self.at_s = now

    def wait_s(self, amount: float) -> float:
        """Until so much may be taken."""
        return max(0.0, (min(amount, self.size) - self.level) * _MINUTE_S / self.size)


class RateLimits:
    """The buckets of all keys of one proxy."""

    def __init__(self, default: RateLimit, by_key: Mapping[str, RateLimit]) -> None:
        self._default, self._by_key = default, by_key
        self._buckets: OrderedDict[str, tuple[_Bucket | None, _Bucket | None]] = OrderedDict()

    def take(self, key: str, tokens: int, now: float) -> float:
        """Count a request of `tokens` against its key: 0, or the seconds after which it may come, uncounted."""
        requests, amounts = self._of(key, now)
        wanted = [(bucket, amount) for bucket, amount in ((requests, 1), (amounts, tokens)) if bucket is not None]
        for bucket, _ in wanted:
            bucket.fill(now)
        wait_s = max((bucket.wait_s(amount) for bucket, amount in wanted), default=0.0)
        if wait_s <= 1e-9:  # a rounding error is no reason to wait
            for bucket, amount in wanted:
                bucket.level -= min(amount, _MOST_DEBT * bucket.size)
            return 0.0
        return wait_s

    def _of(self, key: str, now: float) -> tuple[_Bucket | None, _Bucket | None]:
        found = self._buckets.get(key)
        if found is None:
            limit = self._by_key.get(key, self._default)
            made = [
                _Bucket(float(size), float(size), now) if size else None for size in (limit.requests, limit.tokens)
            ]
            found = self._buckets[key] = made[0], made[1]
            if len(self._buckets) > MAX_KEYS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return found
