"""On a GPU a layer is reported before it is written: the host has only launched the kernels that will write it.

So what is to follow the writing waits, in a thread of its own and asleep, for an event recorded behind it. What then
happens holds for every transport, whether a kernel, UCX or a network card reads the bytes: none of them needs to know
the engine's stream. The forward pass never waits; it pays for one hop between threads per layer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.memory.buffers import Event


class LayerOrder:
    """One per node of device memory. `when_written` may be called from any thread."""

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._spare: list[Event] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pdlink-layer-order")

    def when_written(self, act: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Act in the other thread as soon as all that this thread has launched by now has run; in order.

        failed(reason): instead, if what was launched has failed.
        """
        try:
            event = self._spare.pop()
        except IndexError:
            event = self._make_event()
        event.record()
        self._thread.submit(self._act, event, act, failed)

    def close(self) -> None:
        """End the thread; what waits by then does not happen. Safe to call twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _act(self, event: Event, act: Callable[[], None], failed: Callable[[str], None]) -> None:
        try:
            event.synchronize()
        except RuntimeError as error:
            failed(f"what writes the layers has failed: {error}")
            return
        self._spare.append(event)
        act()
