"""On a GPU "layer written" is true later than it is said: the host has only launched what will write it.

So the listener is not told by the forward pass but by a thread that waits, asleep, for an event recorded behind the
layer's writes. What it hears then holds for every transport, whether a kernel, UCX or a network card reads the bytes:
none of them needs to know the engine's stream. The forward pass never waits; what it costs is one hop between
threads per layer. After `flush`, which comes before anything is said about the end of the pass, all was told.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Event(Protocol):
    """What is needed of `torch.cuda.Event`."""

    def record(self) -> None:
        """Behind what this thread has launched on its current stream."""

    def synchronize(self) -> None:
        """Wait for it without the GIL. Raises RuntimeError if what it stands for has failed."""


class LayerOrder:
    """One per engine; `tell_when_written` and `flush` belong to the engine's thread."""

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._spare: list[Event] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pdlink-layer-order")
        self._untold: list[Future[None]] = []

    def tell_when_written(self, tell: Callable[[], None]) -> None:
        """Call `tell` in the other thread as soon as everything launched by now has run; in order."""
        event = self._spare.pop() if self._spare else self._make_event()
        event.record()
        self._untold.append(self._thread.submit(self._tell, event, tell))

    def flush(self, timeout_s: float) -> None:
        """Return when all has been told. Raises what waiting or telling raised, TimeoutError after the time."""
        untold, self._untold = self._untold, []
        for one in untold:
            one.result(timeout_s)

    def close(self) -> None:
        """End the thread; what is not told by then is not told. Safe to call twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _tell(self, event: Event, tell: Callable[[], None]) -> None:
        event.synchronize()
        tell()
        self._spare.append(event)
