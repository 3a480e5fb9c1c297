"""`LoadBatch`: records on their way into the pages of the prompts that one pass computes, layer by layer.

Each prompt is a load as an engine of ours has it (`store/loading.py`): its first pages are copied while others are
read. On the CPU a layer is ready when it is copied. On a GPU it is ready when its copy is in the GPU's stream: the
thread that launches attention has its own stream wait for it (`follow`). What failed comes out at the end in both
cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.store.groups import Blocks
from pdlink.store.loading import GroupLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.memory.buffers import StreamEvent
    from pdlink.store.gpu_pages import Mark
    from pdlink.store.interface import AnyFetch
    from pdlink.store.source import Source

    Ready = Callable[[int], None]
    """Told of each layer once, in order, in any thread."""


_LOOK_S = 0.25
"""A GPU that has failed says nothing of copies under way."""


class DeviceLoad:
    """The records of one prompt, on their way into memory, and leased there. Used by one thread."""

    def __init__(self, source: Source, fetch: AnyFetch, num_pages: int, pages: Callable[[], list[int]]) -> None:
        self._source, self._fetch, self._num_pages, self._pages = source, fetch, num_pages, pages

    def begin(self, after: Mark | None) -> GroupLoad:
        """When the numbers of the pages can be read. It closes this. after: as of `GroupLoad`."""
        group = self._source.groups[0]
        blocks = Blocks(tuple(self._pages()), 0)
        end = self._num_pages * group.chunk_tokens
        return GroupLoad(self._source, group, self._fetch, 0, 0, end, blocks, after=after, confirms=False)

    def close(self) -> None:
        self._fetch.finish()
        self._fetch.close()


class LoadBatch:
    """`run` in a thread that may wait, once; `follow` in the threads that launch attention."""

    def __init__(
        self,
        source: Source,
        loads: Sequence[DeviceLoad],
        ready: StreamEvent | None,
        marks: Sequence[Mark | None],
    ) -> None:
        """ready, marks: on a GPU, behind what may still use the pages, a mark for each load; numbers of pages can be
        read after `ready`."""
        self._source, self._ready = source, ready
        self._waiting = list(zip(loads, marks, strict=True))
        self._begun: list[GroupLoad] = []

    def run(self, ready: Ready) -> None:
        """Load all layers: when it returns they are in the pages.

        Raises LookupError for records that did not come or did not stand, TransferFailed for a GPU that has not
        copied. Nothing writes to the pages any more then, but for copies of a GPU that are `lost`.
        """
        try:
            if self._ready is not None:
                self._ready.synchronize()
            while self._waiting:
                load, mark = self._waiting[0]
                self._begun.append(load.begin(mark))
                del self._waiting[0]
            num_layers, layer = self._source.groups[0].num_layers, 0
            while layer < num_layers and self._has_begun(layer):
                ready(layer)
                layer += 1
        finally:
            self._end()
        if error := next((begun.copy_error for begun in self._begun if begun.copy_error), ""):
            raise TransferFailed(f"the GPU has not copied: {error}")
        if not all(begun.is_whole for begun in self._begun):
            raise LookupError("records that the store has promised did not come, or did not stand")

    def _has_begun(self, layer: int) -> bool:
        """Wait until a layer is ready; False if it will not be."""
        waiting = list(self._begun)
        while waiting:
            try:
                waiting[-1].wait_begun(layer, _LOOK_S)
                waiting.pop()
            except DeadlineExceeded:
                if self._source.lost:
                    return False
            except TransferFailed:
                for begun in self._begun:
                    begun.cancel()
                return False
        return True

    def _end(self) -> None:
        """Wait until nothing writes to the pages any more. Raises TransferFailed if nobody can know that."""
        for load, mark in self._waiting:
            self._source.unmark(mark)
            load.close()
        for begun in self._begun:
            self._source.wait(begun.done)

    def follow(self, layer: int) -> None:
        """On a GPU: what this thread launches from now on runs behind the copies of a layer that is ready.

        Raises CudaFailure.
        """
        for begun in self._begun:
            begun.precede(layer)
