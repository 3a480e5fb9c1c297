"""Copies of a GPU that a caller waits for: `LayerCopies`, and `GpuCopying`, what calls of `Cache` copy with them.

The copies of a call of `Cache` follow what its thread has launched by the time of the call, on its current stream. A
call returns, and a step is made, when its copies are over: what is launched then, on any stream, finds the KV in the
pages.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pdlink.cuda.driver import CudaFailure
from pdlink.errors import TransferFailed
from pdlink.store.copying import Copying

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.cuda.driver import CudaEvent
    from pdlink.store.blocks import AnyPlan
    from pdlink.store.copying import Chunks
    from pdlink.store.gpu_pages import Job
    from pdlink.store.source import StoreSource
    from pdlink.store.span import Span

T = TypeVar("T")

_LOOK_S = 0.25
"""A GPU that has failed says nothing of copies under way."""


class LayerCopies:
    """Copies of layers by a source whose pages are on a GPU. Usable from any thread but the copier's."""

    def __init__(self, source: StoreSource) -> None:
        self._source = source

    @property
    def lost(self) -> bool:
        """Whether copies were under way when the GPU failed."""
        return self._source.gpu is not None and self._source.gpu.lost

    def planned(self, plan: Callable[[], T]) -> T:
        """What `plan` returns, called by the copier's thread, which pins the arena."""
        return self._source.copier.submit(plan).result()

    def begin(
        self,
        plan: AnyPlan,
        layer: int,
        *,
        loading: bool,
        after: CudaEvent | None,
        begun: Callable[[Job], None] | None = None,
    ) -> Future[str]:
        """One layer, behind the mark `after`: "" when it is over, or why it is not copied.

        begun: told in any thread when the copy is in its stream.
        """
        over: Future[str] = Future()
        if not self._source.copier.put(partial(self._move, plan, layer, over, after, begun, loading=loading)):
            over.set_result("the cache is closed")
        return over

    def _move(
        self,
        plan: AnyPlan,
        layer: int,
        over: Future[str],
        after: CudaEvent | None,
        begun: Callable[[Job], None] | None,
        *,
        loading: bool,
    ) -> None:
        try:
            self._source.move(plan, layer, loading=loading, after=after, then=over.set_result, begun=begun)
        except Exception as error:  # noqa: BLE001 - raised where the future is read
            over.set_exception(error)

    def wait(self, copy: Future[str]) -> str:
        """Raises TransferFailed if nobody can know any more whether it is over."""
        while True:
            try:
                return copy.result(_LOOK_S)
            except TimeoutError:
                if self.lost and not copy.done():
                    raise TransferFailed(
                        "the GPU has failed with copies under way; end this process, which may still "
                        "write to these blocks"
                    ) from None

    def quiet(self) -> bool:
        """Wait until nothing touches blocks and slots any more; False if nobody can know that."""
        over = threading.Event()
        self._source.when_settled(over.set)
        while not over.wait(_LOOK_S):
            if self.lost:
                return False
        return True


class GpuCopying(Copying):
    """Slots of copies that a failed GPU may still make are given to nobody; the calls raise TransferFailed."""

    def __init__(self, source: StoreSource, lease_s: float) -> None:
        super().__init__(source, lease_s)
        self._gpu = LayerCopies(source)

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
        return self._gpu.begin(plan, layer, loading=loading, after=mark)

    def _plan(self, mine: Span, slots: Chunks, *, loading: bool) -> AnyPlan:
        begin, end = self._tokens(mine, slots)
        return self._gpu.planned(partial(self._source.plan_move, slots, mine.blocks, begin, end, loading=loading))

    def _wait(self, copy: Future[str]) -> str:
        return self._gpu.wait(copy)

    def _quiet(self) -> bool:
        return self._gpu.quiet()
