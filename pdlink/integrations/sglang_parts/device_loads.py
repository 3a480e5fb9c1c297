"""`LoadBatch`: records on their way into the pages of the prompts that one pass computes, layer by layer.

On the CPU a layer is ready when it is copied. On a GPU it is ready when its copy is in the GPU's stream: the thread
that launches attention has its own stream wait for it (`follow`). What failed comes out at the end in both cases.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdlink.errors import TransferFailed
from pdlink.integrations.sglang_parts.hicache import plan_pages
from pdlink.store.groups import RecordPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.memory.buffers import StreamEvent
    from pdlink.store.gpu_pages import Mark, PageCopy
    from pdlink.store.groups import AnyPlan
    from pdlink.store.interface import AnyFetch
    from pdlink.store.source import Source

    Ready = Callable[[int], None]
    """Told of each layer once, in order, in any thread."""


class DeviceLoad:
    """The records of one prompt, leased until it is closed. Used by one thread."""

    def __init__(self, source: Source, fetch: AnyFetch, num_pages: int, pages: Callable[[], list[int]]) -> None:
        self._source, self._fetch, self._num_pages, self._pages = source, fetch, num_pages, pages

    def wait(self) -> None:
        """Until all records are in memory. Raises LookupError if one does not come."""
        if len(self._fetch.done.result()) < self._num_pages:
            raise LookupError("records that the store has promised did not come")

    def plan(self) -> AnyPlan:
        """After `wait`, and when the numbers of the pages can be read."""
        return plan_pages(self._source, list(enumerate(self._fetch.done.result())), self._pages())

    def close(self) -> bool:
        """Whether the records stood all the time: what was copied counts then."""
        return bool(self._fetch.close())


class LoadBatch:
    """`run` in a thread that may wait, once; `follow` in the threads that launch attention."""

    def __init__(
        self,
        source: Source,
        loads: Sequence[DeviceLoad],
        ready: StreamEvent | None,
        mark: Mark | None,
    ) -> None:
        """ready, mark: on a GPU, behind what may still use the pages; numbers of pages can be read after `ready`."""
        self._source, self._loads = source, loads
        self._ready, self._mark = ready, mark
        self._jobs: dict[int, PageCopy] = {}
        """Of a GPU, by layer: the last copy of it."""

    def run(self, ready: Ready) -> None:
        """Load all layers: when it returns they are in the pages.

        Raises LookupError for records that did not come or did not stand, TransferFailed for a GPU that has not
        copied. Nothing writes to the pages any more then, but for copies of a GPU that are `lost`.
        """
        closed = 0
        try:
            if self._ready is not None:
                self._ready.synchronize()
            for load in self._loads:
                load.wait()
            if self._source.gpu is None:
                self._copy(ready)
            else:
                self._have_copied(ready)
            stood = True
            while closed < len(self._loads):
                closed += 1
                stood &= self._loads[closed - 1].close()
            if not stood:
                raise LookupError("the store has ended while its records were copied")
        finally:
            self._source.unmark(self._mark)
            for load in self._loads[closed:]:
                load.close()

    def follow(self, layer: int) -> None:
        """On a GPU: what this thread launches from now on runs behind the copies of a layer that is ready.

        Raises CudaFailure.
        """
        job = self._jobs.get(layer)
        if job is not None and self._source.gpu is not None:
            self._source.gpu.precede(job)

    def _copy(self, ready: Ready) -> None:
        plans = [load.plan() for load in self._loads]
        for layer in range(self._source.groups[0].num_layers):
            for plan in plans:
                assert isinstance(plan, RecordPlan)
                self._source.copy(plan, layer, loading=True)
            ready(layer)

    def _have_copied(self, ready: Ready) -> None:
        plans = self._source.planned(lambda: [load.plan() for load in self._loads])
        begun = []
        for layer in range(self._source.groups[0].num_layers):
            for plan in plans:
                is_last = plan is plans[-1]
                after, self._mark = self._mark, None  # all are in one stream
                tell = partial(self._begun, layer, ready) if is_last else None
                begun.append(self._source.begin(plan, layer, loading=True, after=after, begun=tell))
        try:
            errors = [self._source.wait(one) for one in begun]
        except BaseException:
            self._source.quiet()
            raise
        if any(errors):
            raise TransferFailed(f"the GPU has not copied: {next(filter(None, errors))}")

    def _begun(self, layer: int, ready: Ready, job: PageCopy) -> None:
        self._jobs[layer] = job
        ready(layer)
