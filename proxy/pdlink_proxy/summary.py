"""One line every few seconds under load, and none without: what a proxy's requests had."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdlink.api import kv_path

from .page.view import quantile_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .records import EndedHead, Records


class ProxySummary:
    """Of the requests that have ended since it was last asked."""

    def __init__(self, records: Records, now: Callable[[], tuple[int, int]]) -> None:
        """now: how many requests run, and wait."""
        self._records, self._now = records, now
        self._seen = records.num_ended

    def take(self, span_s: float) -> str:
        """Empty if none has ended."""
        count = self._records.num_ended - self._seen
        self._seen = self._records.num_ended
        if not count:
            return ""
        newest, (running, queued) = self._records.heads(count), self._now()
        return f"{count / span_s:.1f} requests/s; {_of(newest)}; running {running}, queued {queued}"


def _of(records: Sequence[EndedHead]) -> str:
    ttft = sorted(record.ttft_s for record in records if record.ttft_s is not None)
    parts = []
    if ttft:
        parts.append(f"TTFT p50 {quantile_ms(ttft, 0.5):.0f} ms, p95 {quantile_ms(ttft, 0.95):.0f} ms")
    answered = [kv_path.path_of(record.kv) for record in records if record.outcome in ("ok", "broken")]
    if answered:
        parts.append("KV " + ", ".join(f"{path} {count}" for path, count in Counter(answered).most_common()))
    errors = Counter(record.outcome for record in records if record.outcome not in ("ok", "client_left"))
    named = ", ".join(f"{outcome} {count}" for outcome, count in errors.most_common())
    parts.append(f"errors {errors.total()}" + (f" ({named})" if named else ""))
    return "; ".join(parts)
