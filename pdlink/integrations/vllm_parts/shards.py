"""Several shards of one rank as if they were one: told together, done when all are.

A shard is a part of the KV heads with an endpoint of its own. Shard s of a prefill server sends to shard s of a
decode server, whichever ranks hold them; so servers with different numbers of ranks need no more than the same number
of shards, and the protocol between two shards knows nothing of it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdlink.integrations.vllm_parts.layout import UnsupportedCache
from pdlink.integrations.vllm_parts.worker import Results

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdlink.integrations.vllm_parts.requests import StepPlan
    from pdlink.integrations.vllm_parts.worker import WorkerHalf


def of_rank(rank: int, num_ranks: int, num_shards: int) -> range:
    """The shards that a rank holds. Raises UnsupportedCache if they cannot be dealt out evenly."""
    each, left = divmod(num_shards, num_ranks)
    if left or not each:
        raise UnsupportedCache(f"{num_shards} shards cannot be dealt out to {num_ranks} ranks")
    return range(rank * each, (rank + 1) * each)


class Shards:
    """The halves of one rank's shards behind the interface of one."""

    def __init__(self, halves: Sequence[WorkerHalf]) -> None:
        self._halves = halves
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()

    def withdraw(self, plan: StepPlan) -> None:
        for half in self._halves:
            half.withdraw(plan)

    def begin(self, plan: StepPlan) -> None:
        for half in self._halves:
            half.begin(plan)

    def layer_saved(self, name: str) -> None:
        for half in self._halves:
            half.layer_saved(name)

    def end(self) -> None:
        for half in self._halves:
            half.end()

    def pause(self, timeout_s: float) -> None:
        for half in self._halves:
            half.pause(timeout_s / len(self._halves))

    def results(self, over: Collection[str]) -> Results:
        """What has ended on every shard. A receive has failed if it has on one of them."""
        merged = Results()
        for half in self._halves:
            results = half.results(over)
            self._sent.update(results.sent)
            self._received.update(results.received)
            self._failed |= results.failed
            merged.failed_blocks |= results.failed_blocks
            merged.reasons = results.reasons | merged.reasons
        for counts, done in ((self._sent, merged.sent), (self._received, merged.received)):
            done.update(request_id for request_id, count in counts.items() if count == len(self._halves))
            for request_id in done:
                del counts[request_id]
        merged.failed = self._failed & merged.received
        self._failed -= merged.failed
        return merged
