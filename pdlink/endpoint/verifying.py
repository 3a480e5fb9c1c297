"""`Verifier`: computes and compares checksums of KV, in a thread of its own.

A gigabyte takes 0.25 s; neither the endpoint's thread nor its lock may wait for that.
"""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from pdlink.protocol.messages import Checksum
from pdlink.protocol.states import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.kv.groups import KVGroups
    from pdlink.memory.checksums import Checksums
    from pdlink.protocol.actions import Push
    from pdlink.protocol.messages import Done
    from pdlink.protocol.receiving import Receiving
    from pdlink.reasons import Reason

T = TypeVar("T")

_SAMPLED = 8
"""With `verify: sample`, one push in this many is verified."""


class Verifier:
    """One thread, started with the first job. A push or transfer has one job at most."""

    def __init__(
        self,
        checksums: Checksums,
        groups: KVGroups,
        call: Callable[[Callable[[], None], Callable[[Reason], None]], None],
    ) -> None:
        """checksums: reads this worker's KV. call(command, cost): see `Endpoint.call`."""
        self._checksums, self._groups, self._call = checksums, groups, call
        self._executor: ThreadPoolExecutor | None = None
        self._closing = threading.Event()

    @property
    def closing(self) -> bool:
        """Whether jobs must give up: the memory they read will be unmapped."""
        return self._closing.is_set()

    def wants(self, push: Push) -> bool:
        """Whether the receiver asked for a checksum of this push."""
        verify = push.offer.verify
        if verify != "sample":
            return verify == "all"
        return (push.push_id + zlib.crc32(push.offer.transfer_id.encode())) % _SAMPLED == 0

    def compute(self, push: Push, then: Callable[[list[Checksum]], None], cost: Callable[[Reason], None]) -> None:
        """Compute the checksums of a landed push, one a layer, from its source blocks, which must not change before.

        Calls `then(checksums)` or `cost(reason)` in the endpoint's thread, under its lock.
        """
        start, end = push.start, push.end
        blocks = push.blocks[self._groups.layouts[push.group].blocks_of(start, end)]

        def checksums() -> list[Checksum]:
            of = self._checksums.of
            return [Checksum(layer, start, end, of(layer, blocks, start, end)) for layer in push.layers]

        self._submit(checksums, then, cost)

    def compare(self, machine: Receiving, done: Done, then: Callable[[str], None]) -> None:
        """Compare the landed bytes with the sender's checksums; calls `then(mismatch)` as `compute`, empty if equal.

        If the transfer ends meanwhile, its blocks may hold anything, and the result is not used.
        """
        self._submit(lambda: self._mismatch(machine, done), then, lambda reason: then(reason.words))

    def close(self) -> None:
        """Drop waiting jobs, and return when the running one has ended."""
        self._closing.set()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], T], then: Callable[[T], None], cost: Callable[[Reason], None]) -> None:
        if self.closing:
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "pdlink-verifying")

        def ended(future: Future[T]) -> None:
            if not future.cancelled():
                self._call(lambda: then(future.result()), cost)

        self._executor.submit(work).add_done_callback(ended)

    def _mismatch(self, machine: Receiving, done: Done) -> str:
        """In the verifier's thread, without the lock."""
        offered = machine.offered
        assert offered is not None
        groups, num_covered = self._groups, 0
        needed = groups.needed(offered.start, offered.end)
        ranges = [needed[group] for group in groups.group_of]
        num_tokens = sum(last - first for first, last in ranges)
        for checksum in done.checksums:
            if machine.state is not ReceiverState.OFFERED or self.closing:
                return "ended while it was verified"
            layer, start, end = checksum.layer, checksum.start, checksum.end
            where = f"checksum of layer {layer}, tokens [{start}, {end})"
            if not (0 <= layer < len(ranges) and ranges[layer][0] <= start < end <= ranges[layer][1]):
                return f"{where}, which were not offered"
            group = groups.group_of[layer]
            block_tokens = groups.layouts[group].block_tokens
            blocks = offered.blocks[group][start // block_tokens - ranges[layer][0] // block_tokens :]
            if self._checksums.of(layer, blocks, start, end) != checksum.xxh3:
                return f"{where} differs"
            num_covered += end - start
        if offered.verify == "all" and num_covered != num_tokens:
            return f"checksums: got {num_covered} tokens; {num_tokens} were offered"
        return ""
