"""`Load`: KV on its way from the store into the blocks of one request, layer by layer, in all groups of layers.

Chunks are copied while later ones are read from a tier, all but the last one that is wanted. When that has come, it
is copied layer by layer, and each layer is there after the copy of one chunk.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.events import KVCopied, emit
from pdlink.reasons import ABORTED
from pdlink.store.groups import RecordPlan
from pdlink.store.record import holds, said_sums
from pdlink.store.worth import COPY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.cuda.driver import CudaEvent
    from pdlink.memory.buffers import Bytes
    from pdlink.reasons import Reason
    from pdlink.store.gpu_pages import PageCopy
    from pdlink.store.groups import AnyPlan, Blocks, RecordGroup
    from pdlink.store.interface import AnyFetch
    from pdlink.store.record import Sums
    from pdlink.store.slots import Slot
    from pdlink.store.source import Source


_EARLY_PARTS = 16
"""Of what is wanted: what is copied at once while the rest is read. A copy takes Python's time from who reads."""


def worth_a_copy(num_came: int, num_missing: int, num_wanted: int) -> bool:
    """Whether to copy so many chunks while others are read: fewer towards the end, so that little is left to copy
    when the last one has come."""
    return num_came >= min(num_wanted // _EARLY_PARTS, (num_missing + 1) // 2)


class Load:
    """KV on its way from the store into blocks. Layers are counted through all groups, in their order."""

    def __init__(self, begin: int, end: int, loads: Sequence[GroupLoad]) -> None:
        self.began_s = time.monotonic()
        self._begin, self._end, self._loads = begin, end, loads
        self.done: Future[int] = Future()
        """Tokens before this one are in the blocks, for all layers: `begin`, if nothing of use is. Set in any thread,
        when nothing touches the blocks any more."""
        when_all([load.done for load in loads], self._settled)

    def has_layer(self, layer: int) -> bool:
        """Whether `layer` is in the blocks. The last one is when all of it counts: a lease may end meanwhile."""
        return self._group_of(layer)[0].has_layer(self._group_of(layer)[1])

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """On a GPU by the thread that launches what reads the layer, which is then behind it in the GPU's order."""
        load, index = self._group_of(layer)
        load.wait_layer(index, timeout_s)

    def cancel(self, reason: Reason = ABORTED) -> None:
        for load in self._loads:
            load.cancel()

    def _group_of(self, layer: int) -> tuple[GroupLoad, int]:
        for load in self._loads:
            if layer < load.num_layers:
                return load, layer
            layer -= load.num_layers
        raise IndexError(layer)

    def _settled(self) -> None:
        ends, keeps_all = [self._end], True
        for load in self._loads:
            ends.append(self._end if load.is_whole else load.done.result() * load.group.layout.position_tokens)
            keeps_all = keeps_all and load.group.layout.keeps_all
        end = max(self._begin, min(ends))
        self.done.set_result(end if end == self._end or keeps_all else self._begin)


class GroupLoad:
    """The layers of one group. Counts in positions."""

    def __init__(
        self,
        source: Source,
        group: RecordGroup,
        fetch: AnyFetch,
        first: int,
        begin: int,
        end: int,
        blocks: Blocks,
        *,
        landed: Callable[[int, int], None] | None = None,
        records: Sequence[tuple[int, int]] = (),
        after: CudaEvent | None = None,
        confirms: bool = True,
    ) -> None:
        """Begin to load positions [begin, end). first: number of the first chunk of `fetch`.

        landed: as of `Prompt.load`. records: (place, bytes) of what is fetched; none if that was measured before.
        after: a mark of kernels that may still use the blocks, by default one of now. confirms: the last layer is
        there when all of it counts; else, on a GPU, when its copy has begun, and the caller looks at `is_whole`
        before what it computed counts.
        """
        self._source, self.group, self._fetch, self._first = source, group, fetch, first
        self._begin, self._end, self._blocks, self._tell = begin, end, blocks, landed
        self._records, self._confirms, self._began_s = records, confirms, time.monotonic()
        self.num_layers = group.num_layers
        self.done: Future[int] = Future()
        """Positions before this one are in the blocks, for all layers; what was wanted from there on does not come.

        Set in any thread, when nothing touches the blocks any more."""
        self._landed = threading.Condition()
        self._num_landed = 0
        self._jobs: dict[int, PageCopy] = {}
        """Copies of a GPU that are in its stream, by layer."""
        self._num_copied = 0
        self._num_early, self._early_s = 0, 0.0
        """Leading chunks that were copied while others were read, and how long that took. By the copier's thread."""
        self.copy_error = ""
        """Why a GPU has not copied what had come."""
        self._after = source.mark() if after is None else after
        self._failed = False
        self._cancelled = False
        self._wrong: list[Slot] = []
        source.pool.share(blocks.numbers)
        fetch.when_more(self._come)
        if not fetch.done.done() and fetch.leading():
            self._come()
        fetch.done.add_done_callback(self._fetched)

    def has_layer(self, layer: int) -> bool:
        """As `Load.has_layer`."""
        if self._failed:
            raise TransferFailed(f"the store has lost a part of tokens [{self._begin}, {self._end})")
        return layer < self._num_landed

    @property
    def is_whole(self) -> bool:
        """Once it is done: whether all that was wanted is in the blocks."""
        return not self._failed

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """As `Load.wait_layer`."""
        self.wait_begun(layer, timeout_s)
        self.precede(layer)

    def wait_begun(self, layer: int, timeout_s: float | None = None) -> None:
        """Until the layer is in the blocks, or on a GPU its copy has begun. For a thread that launches nothing that
        reads it."""
        with self._landed:
            if not self._landed.wait_for(
                lambda: self._failed or layer < self._num_landed or layer in self._jobs, timeout_s
            ):
                raise DeadlineExceeded(f"layer {layer} is not here after {timeout_s} s")
            if self._failed or layer < self._num_landed:
                self.has_layer(layer)

    def precede(self, layer: int) -> None:
        """On a GPU: what this thread launches from now on runs behind the copy of a layer that has begun."""
        job = self._jobs.get(layer)
        if job is not None and self._source.gpu is not None:
            self._source.gpu.precede(job)

    def cancel(self) -> None:
        self._cancelled = True
        self._fetch.finish()

    def _come(self) -> None:
        """In any thread: further chunks are in the arena."""
        self._source.copier.put(self._copy_early)

    def _fetched(self, _: object) -> None:
        fetched_s = time.monotonic()
        if not self._source.copier.put(partial(self._copy, fetched_s)):
            self._cancelled = True  # the source is closed: nothing is copied any more
            self._copy(fetched_s)

    def _copy_early(self) -> None:
        """In the copier's thread, while chunks are read: copy the chunks that have come, but for the last one."""
        if self._cancelled or self._wrong or self._fetch.done.done():
            return
        began_s, chunks = time.monotonic(), self.group.chunks_of(self._begin, self._end)
        first = max(0, chunks.start - self._first) + self._num_early
        further = enumerate(self._fetch.leading(first), self._first + first)
        came = [(chunk, slot) for chunk, slot in further if chunk < chunks.stop - 1]
        if not worth_a_copy(len(came), len(chunks) - self._num_early - len(came), len(chunks)):
            return
        came = self._until(came, [self._holds(*one) for one in came])
        if came:
            plan = self._source.plan(self.group, came, self._blocks, self._begin, self._end, loading=True)
            if self._source.gpu is None:
                right = [self._copy_layer(plan, layer, came) for layer in range(self.num_layers)]
                came = self._until(came, [all(of_chunk) for of_chunk in zip(*right, strict=True)])
            else:
                for layer in range(self.num_layers):
                    after, self._after = self._after, None
                    self._source.move(plan, layer, loading=True, after=after, then=self._early_came)
        self._num_early += len(came)
        self._early_s += time.monotonic() - began_s

    def _copy(self, fetched_s: float) -> None:
        """In the copier's thread, when all chunks are in the arena or will not come: since `fetched_s`."""
        if self._source.gpu is not None:
            self._have_copied(fetched_s)
            return
        end = self._begin
        try:
            slots = self._fetch.done.result()
            copied_end = self._copy_layers(slots)
            self._measure(len(slots), fetched_s, time.monotonic())
            if self._fetch.close(self._wrong) and copied_end > end:
                self._land(self.num_layers - 1, copied_end)
                end = copied_end
        finally:
            self._finish(end)

    def _finish(self, end: int) -> None:
        """Nothing touches the blocks any more. The request is told whatever raises: it waits."""
        try:
            try:
                self._fetch.close()
            finally:
                self._source.give_back(self._blocks.numbers)
        finally:
            with self._landed:
                self._failed = end < self._end
                self._landed.notify_all()
            self.done.set_result(end)

    # --- The copier's thread, where a GPU copies. The store has checked the records: `fetch.unchecked` is empty

    def _have_copied(self, fetched_s: float) -> None:
        num_came, end = 0, self._begin
        try:
            slots = self._fetch.done.result()
            num_came, end = len(slots), self._begin_layers(slots)
        finally:
            self._source.unmark(self._after)
            self._source.settle(partial(self._settled, num_came, fetched_s, end))

    def _begin_layers(self, slots: Sequence[Slot]) -> int:
        """The end of what will be in the blocks."""
        source, group = self._source, self.group
        numbered = self._numbered(slots)
        if self._cancelled or not numbered:
            return self._begin
        end, rest = self._end_of(numbered), numbered[self._num_early :]
        if not rest:
            self._num_copied = self.num_layers
            return end
        plan = source.plan(group, rest, self._blocks, self._begin, end, loading=True)
        last = self.num_layers - 1
        for layer in range(last + 1):
            if self._cancelled:
                return self._begin
            follows = (layer < last or not self._confirms) and end == self._end
            after, self._after = self._after, None
            begun = partial(self._is_begun, layer) if follows else None
            come = partial(self._came, layer, end)
            source.move(plan, layer, loading=True, after=after, then=come, begun=begun)
        return end

    def _is_begun(self, layer: int, job: PageCopy) -> None:
        """In any thread. What reads the layer can run behind the copy now."""
        with self._landed:
            self._jobs[layer] = job
            self._landed.notify_all()

    def _early_came(self, error: str) -> None:
        self.copy_error = self.copy_error or error

    def _came(self, layer: int, end: int, error: str) -> None:
        self.copy_error = self.copy_error or error
        self._num_copied += not self.copy_error
        if self._num_copied == layer + 1 < self.num_layers:
            self._land(layer, end)

    def _settled(self, num_came: int, fetched_s: float, end: int) -> None:
        num_layers, landed_end = self.num_layers, self._begin
        try:
            whole = self._num_copied == num_layers and not self.copy_error
            self._measure(num_came if whole else 0, fetched_s, time.monotonic())
            if self._fetch.close() and whole and end > landed_end:
                self._land(num_layers - 1, end)
                landed_end = end
        finally:
            self._finish(landed_end)

    def _measure(self, came: int, fetched_s: float, now_s: float) -> None:
        """came: chunks that were there at `fetched_s`, and are in the blocks `now_s`."""
        if came:
            nbytes, took_s = came * self.group.shape.payload_nbytes, self._early_s + now_s - fetched_s
            emit(KVCopied(direction="load", nbytes=nbytes, took_s=took_s))
        if self._cancelled:
            return
        if came:
            self._source.speeds[COPY].measured(came * self.group.shape.nbytes, now_s - fetched_s, now_s)
        self._source.brought(self._records, came, fetched_s - self._began_s)

    def _copy_layers(self, slots: Sequence[Slot]) -> int:
        """Copy these leading chunks, and compare the sums of chunks nobody has; the end of what is in the blocks.

        A chunk that is not what was put ends the prefix before the layer is said to be there.
        """
        numbered = self._numbered(slots)
        early = numbered[: self._num_early]
        rest = [] if self._wrong else numbered[self._num_early :]
        rest = self._until(rest, [self._holds(*one) for one in rest])
        plan = None
        for layer in range(self.num_layers):
            if self._cancelled or not (early or rest):
                return self._begin
            if rest:
                plan = plan or self.group.plan(rest, self._blocks, self._begin, self._end, loading=True)
                right = self._copy_layer(plan, layer, rest)
                if not all(right):
                    plan, rest = None, self._until(rest, right)
            if layer + 1 < self.num_layers and (early or rest):
                self._land(layer, self._end_of(early + rest))
        return self._end_of(early + rest)

    def _copy_layer(self, plan: AnyPlan, layer: int, numbered: list[tuple[int, Slot]]) -> list[bool]:
        """Copy a layer of these chunks by the CPU; of each whether it is what was put."""
        assert isinstance(plan, RecordPlan)
        sums = None
        if any(slot.key in self._fetch.unchecked for _, slot in numbered):
            sums = np.zeros((len(numbered), 2), np.uint64)
        self._source.copy(plan, layer, loading=True, sums=sums)
        if sums is None:
            return [True] * len(numbered)
        return [self._is_right(*one, layer, of_it) for one, of_it in zip(numbered, sums, strict=True)]

    def _end_of(self, numbered: list[tuple[int, Slot]]) -> int:
        """Where the wanted positions of these leading chunks end."""
        return min(self._end, (numbered[-1][0] + 1) * self.group.chunk_tokens) if numbered else self._begin

    def _numbered(self, slots: Sequence[Slot]) -> list[tuple[int, Slot]]:
        """The ones that hold what is wanted, with the numbers of their chunks."""
        chunks = self.group.chunks_of(self._begin, self._end)
        return [(chunk, slot) for chunk, slot in enumerate(slots, self._first) if chunk in chunks]

    def _until(self, numbered: list[tuple[int, Slot]], right: list[bool]) -> list[tuple[int, Slot]]:
        """Those before the first that is not right, which is noted."""
        if all(right):
            return numbered
        first = right.index(False)
        self._wrong.append(numbered[first][1])
        return numbered[:first]

    def _record(self, slot: Slot) -> Bytes:
        return self._source.store.array[slot.offset : slot.offset + slot.nbytes]

    def _is_whole(self, chunk: int) -> bool:
        """Whether all of it is copied, so that copying can compare."""
        chunk_tokens = self.group.chunk_tokens
        return self._begin <= chunk * chunk_tokens and (chunk + 1) * chunk_tokens <= self._end

    def _holds(self, chunk: int, slot: Slot) -> bool:
        """False for a record that is wrong, where copying a part of it would not show that."""
        if slot.key not in self._fetch.unchecked or self._is_whole(chunk):
            return True
        return holds(self._record(slot), self.group.shape)

    def _is_right(self, chunk: int, slot: Slot, layer: int, sums: Sums) -> bool:
        """Whether a layer that was copied with these sums is what was put."""
        if slot.key not in self._fetch.unchecked or not self._is_whole(chunk):
            return True
        return np.array_equal(said_sums(self._record(slot), self.group.shape)[layer], sums)

    def _land(self, layer: int, end: int) -> None:
        if self._tell is not None:
            self._tell(layer, end)
        if end == self._end:
            with self._landed:
                self._num_landed = layer + 1
                self._landed.notify_all()


def when_all(futures: Sequence[Future[Any]], call: Callable[[], None]) -> None:
    """Once, when the last of them is done, in its thread; now, if there are none."""
    lock = threading.Lock()
    missing = len(futures)

    def one_less(_: object) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last:
            call()

    for future in futures:
        future.add_done_callback(one_less)
    if not futures:
        call()
