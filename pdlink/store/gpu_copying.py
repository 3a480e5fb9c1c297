"""`GpuCopying`: what calls of `Cache` copy where its pages are on a GPU.

The copies follow what the calling thread has launched by the time of the call, on its current stream. A call returns,
and a step is made, when its copies are over: what is launched then, on any stream, finds the KV in the pages.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from pdlink.cuda.driver import CudaFailure
from pdlink.errors import TransferFailed
from pdlink.store.copying import Copying

if TYPE_CHECKING:
    from pdlink.cuda.driver import Event
    from pdlink.store.blocks import AnyPlan
    from pdlink.store.copying import Chunks
    from pdlink.store.span import Span

_LOOK_S = 0.25
"""A GPU that has failed says nothing of copies under way."""


class GpuCopying(Copying):
    """Slots of copies that a failed GPU may still make are given to nobody; the calls raise TransferFailed."""

    def _copy(self, mine: Span, slots: Chunks, *, loading: bool) -> bool:
        if not slots:
            return True
        plan = self._plan(mine, slots, loading=loading)
        try:
            copies = [self._begin(plan, layer, loading=loading) for layer in range(len(self._layout.layers))]
            errors = [self._wait(copy) for copy in copies]
        except BaseException:
            self._quiet()  # others may be under way
            raise
        return not any(errors)

    def _begin(self, plan: AnyPlan, layer: int, *, loading: bool) -> Future[str]:
        try:  # of a load all copies are in one stream, and the first follows what may still use the blocks
            mark = None if loading and layer else self._source.mark()
        except CudaFailure as failure:
            raise TransferFailed(f"the GPU has failed: {failure}") from None
        over: Future[str] = Future()
        if not self._source.copier.put(partial(self._move, plan, layer, over, mark, loading=loading)):
            over.set_result("the cache is closed")
        return over

    def _move(self, plan: AnyPlan, layer: int, over: Future[str], mark: Event | None, *, loading: bool) -> None:
        try:
            self._source.move(plan, layer, loading=loading, after=mark, then=over.set_result)
        except Exception as error:  # noqa: BLE001 - raised where the future is read
            over.set_exception(error)

    def _plan(self, mine: Span, slots: Chunks, *, loading: bool) -> AnyPlan:
        """In the copier's thread, which pins the arena."""
        begin, end = self._tokens(mine, slots)
        planned = partial(self._source.plan_move, slots, mine.blocks, begin, end, loading=loading)
        return self._source.copier.submit(planned).result()

    def _wait(self, copy: Future[str]) -> str:
        while True:
            try:
                return copy.result(_LOOK_S)
            except TimeoutError:
                if self._lost() and not copy.done():
                    raise TransferFailed(
                        "the GPU has failed with copies under way; limit none; end this process, which may still "
                        "write to these blocks"
                    ) from None

    def _quiet(self) -> bool:
        over = threading.Event()
        self._source.when_settled(over.set)
        while not over.wait(_LOOK_S):
            if self._lost():
                return False
        return True

    def _lost(self) -> bool:
        return self._source.gpu is not None and self._source.gpu.lost
