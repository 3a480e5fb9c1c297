"""Where the KV of prompts may lie, judged by where prompts were sent: an approximation that asks no worker."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ..fleet import PlacementRequest, WorkerState

MAX_KEYS = 500_000
"""Of all workers: about 100 MB."""
MAX_WORKER_KEYS = 8192
"""Of one: 2 million tokens."""


class PrefixIndex:
    """The keys sent to each worker, the least recent forgotten first.

    Keys are noted suffix first, so the beginning of a prompt is always newer than what follows it: a worker that has
    a key has all before it, and the longest match is found by halving.
    """

    def __init__(self, max_keys: int = MAX_KEYS, max_worker_keys: int = MAX_WORKER_KEYS) -> None:
        self._max_keys, self._max_worker_keys = max_keys, max_worker_keys
        self._of: dict[str, OrderedDict[Hashable, None]] = {}
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def cached_tokens(self, request: PlacementRequest, workers: Sequence[WorkerState]) -> list[int]:
        """Tokens of the prompt that each of the workers may hold."""
        keys, per_key, num_tokens, of = request.keys, request.key_tokens, request.num_tokens, self._of
        if not keys:
            return [0] * len(workers)
        first, found = keys[0], []
        for worker in workers:
            held = of.get(worker.key)
            if not held or first not in held:
                found.append(0)
                continue
            least, most = 1, len(keys)
            while least < most:
                middle = (least + most + 1) // 2
                if keys[middle - 1] in held:
                    least = middle
                else:
                    most = middle - 1
            found.append(min(least * per_key, num_tokens))
        return found

    def note(self, request: PlacementRequest, worker: WorkerState) -> None:
        """The worker is sent the prompt. Nothing is noted of one that was never looked up."""
        if request.chain is None:
            return
        held = self._of.setdefault(worker.key, OrderedDict())
        before = len(held)
        for key in reversed(request.keys):
            held[key] = None
            held.move_to_end(key)
        most = self._max_worker_keys
        if worker.pool_tokens is not None:  # it has forgotten what does not fit
            most = min(most, worker.pool_tokens // request.key_tokens)
        while len(held) > most:
            held.popitem(last=False)
        self._num_keys += len(held) - before
        while self._num_keys > self._max_keys:
            self._shrink()

    def _shrink(self) -> None:
        """Halve the share of the worker that has most."""
        held = max(self._of.values(), key=len)
        num = (len(held) + 1) // 2
        for _ in range(num):
            held.popitem(last=False)
        self._num_keys -= num

    def forget(self, key: str) -> None:
        self._num_keys -= len(self._of.pop(key, ()))
