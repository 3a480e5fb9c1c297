"""`GpuPages`: copies between an engine's pages on a GPU and a store's arena, made by the GPU.

One stream for each direction, so that a load does not wait for stores. The engine's thread gives a *mark* with each
copy: an event in the stream that it computes on. The copy's stream waits for the mark, so a layer is read when the
kernels that write it have run, and blocks are written when nobody uses them any more. No thread of the engine waits:
it records the mark, and before it reads a layer that is still on its way it has its own stream wait (`precede`).

A copy is over when the event behind it has been reached. Only then is its caller told (`then`), who commits slots and
gives blocks back; `settled` says it of all that was begun before. Copies of one direction end in the order in which
they were begun. What does not fit into the launches in flight waits in line here.

After a failure in the GPU nobody knows which copies have ended. Their callers are not told: slots and blocks stay
theirs until this process ends, because a copy may still write to them. All others hear that nothing was copied.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from pdlink import threads
from pdlink.cuda.copies import MOST_PAIRS, Copies, kernels_if_any
from pdlink.cuda.driver import CudaEvent, CudaFailure, CudaStream
from pdlink.cuda.steps import PinnedSteps
from pdlink.cuda.strided import Paged, StridedPlan
from pdlink.cuda.ways import Ways, ways_of
from pdlink.errors import ConfigError
from pdlink.store.arena import STEP_NBYTES
from pdlink.store.extents import ALIGNMENT_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdlink.cuda.buffers import DeviceMemory
    from pdlink.kv.layout import KVLayout, RunArray
    from pdlink.kv.plan import IntArray, Template
    from pdlink.memory.buffers import Bytes
    from pdlink.store.groups import PairPlan

log = logging.getLogger(__name__)

Mark: TypeAlias = CudaEvent
"""Stands for what was launched before it."""
Then: TypeAlias = "Callable[[str], None]"
"""What went wrong, or ""."""
_NUM_SLOTS: Final = 16
"""Copies in flight each way, which is a layer of several requests; each takes 256 KiB of pinned memory."""
_LOOK_S: Final = 0.25
"""Poll interval of copies in flight: after a failure no host function runs."""
_ABANDONED: Final[list[object]] = []
"""Memory that a copy may still use, until the process ends."""


@dataclass(eq=False)
class PageCopy:
    """A copy, or a part of one that has many runs; of no runs it only ends behind those before it."""

    plan: RunArray | StridedPlan
    after: CudaEvent | None = None
    then: Then | None = None
    begun: Callable[[PageCopy], None] | None = None
    """Told when it is in its stream."""
    is_over: bool = False


@dataclass(eq=False)
class _Direction:
    copies: Copies[PageCopy]
    line: deque[PageCopy] = field(default_factory=deque)
    """Not begun."""

    @property
    def is_idle(self) -> bool:
        return not self.line and not self.copies.in_flight


class GpuPages:
    """Any thread may call. What it tells is told in a thread of its own, with no lock held."""

    def __init__(
        self,
        buffers: Sequence[DeviceMemory],
        *,
        image: bytes | None = None,
        ways: Ways | None = None,
        step_nbytes: int = STEP_NBYTES,
    ) -> None:
        """buffers: of one open device, by region index; they outlive this. image: of the kernels; None: our own.

        ways: measured once for this process if None, which takes some hundredths of a second.
        step_nbytes: of the arena's memory.
        Raises ConfigError for buffers of two devices, CudaFailure, CudaUnavailable, OSError.
        """
        if len({buffer.device.index for buffer in buffers}) > 1:
            raise ConfigError(
                "tiers: got a KV cache on several GPUs; expected one for each worker; start one for each"
            )
        self._device, self._compute_stream = buffers[0].device, buffers[0].compute_stream
        self._bases = np.array([buffer.ptr for buffer in buffers], np.int64)
        self._step_nbytes = step_nbytes
        self._lock = threading.Lock()
        self._spare: list[CudaEvent] = []
        self._events: list[CudaEvent] = []
        self._joint: CudaStream | None = None
        """Where marks of several streams meet."""
        self._arena: PinnedSteps | None = None
        self._old_arenas: list[PinnedSteps] = []
        """Of stores that have ended; closed when no copy is under way."""
        self._broken = ""
        self.lost = False
        """Whether copies were under way when the GPU failed."""
        self._closing = False
        self._complained = False
        with contextlib.ExitStack() as made:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._wake)
            kernels = made.enter_context(kernels_if_any(self._device, image))
            self.ways = ways_of(self._device, kernels) if ways is None else ways
            stores: Copies[PageCopy] = Copies(self._device, kernels, self._wake, _NUM_SLOTS, self.ways.to_host_nbytes)
            made.callback(stores.close)
            loads: Copies[PageCopy] = Copies(
                self._device, kernels, self._wake, _NUM_SLOTS, self.ways.to_device_nbytes
            )
            made.callback(loads.close)
            self._opened = made.pop_all()
        self._stores, self._loads = _Direction(stores), _Direction(loads)
        self._directions = (self._stores, self._loads)
        self._thread = threads.guarded("pdlink-store-gpu", self._run, self._died)
        self._thread.start()
        for row in self.ways.table:
            log.debug("copies of %s: %s", self._device.name, row)

    # --- The engine's thread

    def mark(self, *streams: int) -> CudaEvent:
        """Stands for what this thread has launched by now, and for what these streams have been given.

        For one `copy`, or `unmark`. Raises CudaFailure.
        """
        with self._lock:
            event = self._unused()
            if not streams:
                event.record(self._compute_stream())
                return event
            if self._joint is None:
                self._joint = CudaStream(self._device)
            for stream in (self._compute_stream(), *streams):
                event.record(stream)
                self._device.wait(self._joint.handle, event)
            event.record(self._joint)
        return event

    def _unused(self) -> CudaEvent:
        if self._spare:
            return self._spare.pop()
        self._events.append(CudaEvent(self._device))
        return self._events[-1]

    def unmark(self, mark: CudaEvent) -> None:
        """It is not needed."""
        with self._lock:
            self._spare.append(mark)

    def precede(self, job: PageCopy) -> None:
        """What this thread launches from now on runs behind this copy, which has begun. Raises CudaFailure."""
        with self._lock:
            if job.is_over:
                return
            for direction in self._directions:
                for launch in direction.copies.in_flight:
                    if launch.work is job:
                        direction.copies.precede(self._compute_stream(), launch)

    def follow_stores(self) -> None:
        """What this thread launches from now on runs behind the stores that have begun. Raises CudaFailure."""
        with self._lock:
            stores = self._stores.copies
            last = next((launch for launch in reversed(stores.in_flight) if launch.slot is not None), None)
            if last is not None:  # they are in one stream
                stores.precede(self._compute_stream(), last)

    # --- The store's copier

    def when_stores_begun(self, then: Callable[[], None]) -> None:
        """Call it when all stores so far are in their stream; now, if they are, or if the GPU has failed."""
        with self._lock:
            waits = bool(self._stores.line) and not self._broken
            if waits:
                self._stores.line.append(PageCopy(np.zeros((0, 3), np.int64), begun=lambda _: then()))
        if not waits:
            then()

    def wants_pairs(self, template: Template, *, loading: bool) -> bool:
        """Whether a kernel makes copies by this template, so that they are said by pairs of blocks (`PairPlan`).

        Not of a recurrent state: its runs are long.
        """
        copies = (self._loads if loading else self._stores).copies
        return not template.src.state and copies.wants_pairs(template.run_nbytes())

    def copy_pairs(
        self,
        plan: PairPlan,
        layer: int,
        arena: Bytes,
        *,
        loading: bool,
        after: CudaEvent | None,
        then: Then,
        begun: Callable[[PageCopy], None] | None = None,
    ) -> PageCopy:
        """`copy` of one layer, which one kernel makes in pinned memory for up to `MOST_PAIRS` units."""
        return self._copy(
            lambda: self._strided(plan, layer, arena, loading=loading), loading, after=after, then=then, begun=begun
        )

    def one_base(self, arena: Bytes, offsets: IntArray, nbytes: int) -> bool:
        """Whether the GPU finds these ranges of the arena at addresses of one base, which `copy_pairs` takes.

        Pins them. False, too, if that fails: `copy` tells its caller then.
        """
        try:
            return self._pinned(arena).one_base(offsets, nbytes) is not None
        except CudaFailure:
            return False

    def pin_ahead(self, arena: Bytes, nbytes: int) -> None:
        """Pin the whole steps among these first bytes, which have memory, so that no copy waits for it.

        By any thread, which it takes some milliseconds a step. Nothing, if it fails: `copy` tells its caller then.
        """
        with self._lock:
            if self._closing or self._broken:
                return
        try:
            self._pinned(arena).pin(nbytes)
        except CudaFailure as failure:
            log.debug("the store's memory is not pinned ahead of need: %s", failure)

    def copy(
        self,
        lists: Iterable[tuple[int, RunArray]],
        arena: Bytes,
        *,
        loading: bool,
        after: CudaEvent | None,
        then: Then,
        begun: Callable[[PageCopy], None] | None = None,
    ) -> PageCopy:
        """Copy between regions and the arena, behind the mark `after`, and say when that is over.

        lists: region, and runs [n, 3] of source offset, destination offset, nbytes. begun: told in any thread, with
        the result, when the copy is in its stream, so that `precede` holds. By one thread.
        """
        return self._copy(
            lambda: self._parts(lists, arena, loading=loading), loading, after=after, then=then, begun=begun
        )

    def _copy(
        self,
        make: Callable[[], Sequence[RunArray | StridedPlan]],
        loading: bool,
        *,
        after: CudaEvent | None,
        then: Then,
        begun: Callable[[PageCopy], None] | None,
    ) -> PageCopy:
        parts: Sequence[RunArray | StridedPlan] | None
        try:
            parts = make()
        except CudaFailure as failure:  # no memory to pin: what was begun is as it was
            if not self._complained:
                self._complained = True
                log.warning("KV is not stored or loaded where the store's memory cannot be pinned: %s", failure)
            parts = None
        last = PageCopy(np.zeros((0, 3), np.int64), then=then, begun=begun)
        direction = self._loads if loading else self._stores
        with self._lock:
            reason = self._broken or ("it is closed" if self._closing else "")
            if reason and after is not None:
                self._spare.append(after)
            elif parts is None:
                reason = reason or "failed"
                if after is not None:  # other layers of the same request come behind it
                    direction.line.append(PageCopy(last.plan, after))
            elif not reason:
                jobs = [PageCopy(plan) for plan in parts or [last.plan]]
                jobs[0].after = after
                jobs[-1].then, jobs[-1].begun = then, begun
                last = jobs[-1]
                direction.line += jobs
            told = self._begin(direction)
            self._kick()
        if reason:
            then(reason)
        _tell(told)
        return last

    def settled(self, then: Callable[[], None]) -> None:
        """Call it when all copies begun before are over: now, if they are; never, if they were `lost`."""
        with self._lock:
            if self.lost:
                return
            busy = [direction for direction in self._directions if not direction.is_idle]
            left = len(busy)

            def one(_: str) -> None:
                nonlocal left
                left -= 1  # told by one thread
                if left == 0:
                    then()

            told = []
            for direction in busy:
                direction.line.append(PageCopy(np.zeros((0, 3), np.int64), then=one))
                told += self._begin(direction)
            if busy:
                self._kick()
        _tell(told)
        if not busy:
            then()

    def close(self, timeout_s: float = 10.0) -> None:
        """After `settled`. Copies that are not over in time keep their memory until the end. Safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._kick()
        self._thread.join(timeout_s)
        if self._thread.is_alive() or self.lost or not all(direction.is_idle for direction in self._directions):
            for direction in self._directions:
                direction.copies.abandon()
            _ABANDONED.append(self)
            return
        with contextlib.suppress(CudaFailure):  # of a dead context: nothing of it can be freed, or is left
            for arena in [*self._old_arenas, *([self._arena] if self._arena is not None else [])]:
                arena.close()
            for event in self._events:
                event.close()
            if self._joint is not None:
                self._joint.close()
        self._opened.close()

    # --- Under the lock

    def _begin(self, direction: _Direction) -> list[PageCopy]:
        """Launch queued jobs while slots are free. Returns the jobs launched."""
        begun: list[PageCopy] = []
        while direction.line and (direction.copies.has_room or not len(direction.line[0].plan)):
            job = direction.line[0]
            before = len(direction.copies.in_flight)
            try:
                if job.after is not None:
                    direction.copies.follow(job.after)
                    self._spare.append(job.after)
                    job.after = None
                if len(job.plan):
                    direction.copies.begin(job, job.plan)
                else:
                    direction.copies.note(job)
            except CudaFailure as failure:
                if len(direction.copies.in_flight) > before:
                    direction.line.popleft()
                self._break(str(failure))
                break
            begun.append(direction.line.popleft())
        return begun

    def _break(self, reason: str) -> None:
        if not self._broken:
            log.error("KV of this GPU is not stored or loaded any more: %s", reason)
        self._broken = self._broken or reason
        for direction in self._directions:
            self.lost = self.lost or bool(direction.copies.in_flight)
            for launch in direction.copies.in_flight:
                launch.work.then = None
            direction.copies.in_flight.clear()

    def _kick(self) -> None:
        os.eventfd_write(self._wake, 1)

    # --- The thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while True:
            with self._lock:
                over, told, failed = self._look()
                in_flight = any(direction.copies.in_flight for direction in self._directions)
                if self._closing and not (in_flight or over):
                    return
            _tell(told)
            for job in over:
                if job.then is not None:
                    job.then("")
            for job in failed:
                if job.then is not None:
                    job.then(self._broken)
            if over or failed:
                continue
            if poll.poll(_LOOK_S * 1000 if in_flight else None):
                os.eventfd_read(self._wake)
                with self._lock:
                    for direction in self._directions:
                        direction.copies.rung()

    def _died(self, why: str) -> None:
        """What waits fails; copies that were under way are lost, as of a GPU that has failed."""
        with self._lock:
            self._break(why)
            failed = self._give_up()
        for job in failed:
            if job.then is not None:
                job.then(why)

    def _give_up(self) -> list[PageCopy]:
        """What will not be copied. Under the lock."""
        failed: list[PageCopy] = []
        for direction in self._directions if self._broken else ():
            failed += [job for job in direction.line if not self.lost or len(job.plan)]
            direction.line.clear()
        return failed

    def _look(self) -> tuple[list[PageCopy], list[PageCopy], list[PageCopy]]:
        """What is over, what has begun, and what will not."""
        over: list[PageCopy] = []
        told: list[PageCopy] = []
        try:
            for direction in self._directions:
                for job in direction.copies.take_ended():
                    job.is_over = True
                    over.append(job)
                told += self._begin(direction)
                direction.copies.ring_at_end()
            if self._old_arenas and all(direction.is_idle for direction in self._directions):
                old, self._old_arenas = self._old_arenas, []
                for arena in old:
                    arena.close()
        except CudaFailure as failure:
            self._break(str(failure))
        return over, told, self._give_up()

    # --- Small things

    def _parts(self, lists: Iterable[tuple[int, RunArray]], arena: Bytes, *, loading: bool) -> list[RunArray]:
        """Runs between addresses of the GPU, as many as one launch takes. Raises CudaFailure."""
        pinned = self._pinned(arena)
        here, there = (1, 0) if loading else (0, 1)
        runs_at = []
        for region, runs in lists:
            placed = pinned.placed(runs[runs[:, 2] > 0], there)
            placed[:, here] += self._bases[region]
            runs_at.append(placed)
        whole = np.concatenate(runs_at) if runs_at else np.zeros((0, 3), np.int64)
        return [whole[at : at + MOST_PAIRS] for at in range(0, len(whole), MOST_PAIRS)]

    def _strided(self, plan: PairPlan, layer: int, arena: Bytes, *, loading: bool) -> list[StridedPlan]:
        """One launch each. Parts that do not lie a constant distance apart on both sides go alone."""
        of, to = plan.template.src, plan.template.dst
        pages, record = (to, of) if loading else (of, to)
        base = self._pinned(arena).one_base(np.array([plan.begin]), 1)
        assert base is not None
        page_parts = [int(self._bases[part.region]) + part.offset for part in pages.layers[layer].parts]
        record_parts = [base + part.offset for part in record.layers[layer].parts]
        steps = {
            (page_parts[i + 1] - at, record_parts[i + 1] - record_parts[i]) for i, at in enumerate(page_parts[:-1])
        }
        num_parts = len(page_parts) if len(steps) < 2 else 1
        page_step, record_step = steps.pop() if num_parts > 1 else (0, 0)
        copies = []
        for index in range(0, len(page_parts), num_parts):
            page = _paged(pages, layer, page_parts[index], page_step, pages.num_blocks * pages.block_tokens)
            kept = _paged(record, layer, record_parts[index], record_step, 1 << 62)
            kept = kept._replace(block_stride=ALIGNMENT_NBYTES)
            sides = (kept, page) if loading else (page, kept)
            tokens = plan.template.unit_tokens, plan.skip, plan.num_tokens
            whole = StridedPlan(*sides, num_parts, of.num_heads, of.head_nbytes, *tokens, plan.pairs)
            copies += whole.cut(MOST_PAIRS)
        return copies

    def _pinned(self, arena: Bytes) -> PinnedSteps:
        with self._lock:
            if self._arena is None or self._arena.memory.ctypes.data != arena.ctypes.data:
                if self._arena is not None:
                    self._old_arenas.append(self._arena)
                self._arena = PinnedSteps(self._device, arena, self._step_nbytes)
            return self._arena


def _paged(layout: KVLayout, layer: int, base: int, part_stride: int, num_slots: int) -> Paged:
    shape = layout.layers[layer]
    strides = shape.block_stride, shape.token_stride, shape.head_stride
    return Paged(base, part_stride, *strides, layout.block_tokens, num_slots)


def _tell(begun: Iterable[PageCopy]) -> None:
    for job in begun:
        if job.begun is not None:
            job.begun(job)
