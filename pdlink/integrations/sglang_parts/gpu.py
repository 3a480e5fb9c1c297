"""What has to be over on a GPU before pages are read or offered. Knows no object of SGLang's.

SGLang plans in one thread and on one stream and computes on another, a step ahead. So

- a layer that a hook reports is pushed behind an event of the stream that the hook was called on (`later`);
- a chunk that is sent while the step before may still write it comes with an event of SGLang's (`behind`);
- pages that decode gives to a request may still be written by the last step of another one, on a stream that this
  backend does not see: they are offered when the device has done all that was launched (`after_all`).

None of it waits in the scheduler's thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pdlink import threads
from pdlink.errors import PdlinkError
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdlink.integrations.sglang_parts.rooms import PrefillRooms

    Act = Callable[[], None]
    Failed = Callable[[Reason], None]

log = logging.getLogger(__name__)

_STOP_S: Final = 5.0


class GpuOrder:
    """Of one rank. Every method may be called from any thread."""

    def __init__(self, later: Callable[[Act, Failed], None], synchronize: Callable[[], None], index: int) -> None:
        """later: `Node.when_written`. synchronize: of the rank's GPU, whose number is `index`."""
        self.later = later
        """Act in another thread when what this thread has launched on its current stream has run."""
        self._synchronize, self._index = synchronize, index
        self._waiting: queue.SimpleQueue[tuple[Act, Failed] | None] = queue.SimpleQueue()
        self._died = ""
        self._thread = threads.guarded("pdlink-sglang-gpu", self._run, self._fail)
        self._thread.start()

    @contextlib.contextmanager
    def behind(self, event: Any) -> Iterator[None]:
        """What is reported inside follows this event of torch's, too, if there is one."""
        if event is None:
            yield
            return
        import torch

        side = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        side.wait_event(event)
        with torch.cuda.stream(side):
            yield

    def after_all(self, act: Act, failed: Failed) -> None:
        """The same as `later` of all that this process has launched on the device."""
        self._waiting.put((act, failed))
        if self._died:
            self._fail(self._died)

    def close(self) -> None:
        """What waits by then does not happen. Safe to call twice."""
        self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        """One wait for all that have come by then: there may be many rooms in a step."""
        while (first := self._waiting.get()) is not None:
            waiting = [first]
            while not self._waiting.empty():
                one = self._waiting.get()
                if one is None:
                    return
                waiting.append(one)
            why = ""
            try:
                self._synchronize()
            except Exception as error:
                why = str(error)
                if not isinstance(error, PdlinkError):
                    log.exception("the GPU could not be waited for")
                    why = f"{type(error).__name__}: {error}"
            for act, failed in waiting:
                try:
                    failed(Reason(Code.GPU_FAILED, why)) if why else act()
                except Exception as error:
                    log.exception("what waited for the GPU has failed")
                    if not why:
                        failed(Reason(Code.GPU_FAILED, f"{type(error).__name__}: {error}"))

    def _fail(self, why: str) -> None:
        """What waits, and what will."""
        self._died = why
        with contextlib.suppress(queue.Empty):
            while True:
                if (one := self._waiting.get_nowait()) is not None:
                    one[1](Reason(Code.GPU_FAILED, why))


def to_host(numbers: Any) -> Any:
    """The numbers of a tensor on a GPU, in a tensor of the host that is filled behind what this thread has launched.

    To read them here would wait for the pass before.
    """
    import torch

    return torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)


class WrittenPages:
    """Pages of one room that a forward pass completes, whose numbers are still on their way from the GPU."""

    def __init__(self, rooms: PrefillRooms, room: int, first: int, pages: Any, end: int) -> None:
        """first: page, counted behind decode's prefix, that `pages` begins with. pages: numbers in the pool, a tensor
        of the host that is filled by what this thread has launched. end: page that the pass completes them up to."""
        self._rooms, self._room, self._first, self._end = rooms, room, first, end
        self._pages = pages
        self._transfer_ids = rooms.transfer_ids(room)

    def written(self, gpu: GpuOrder, layer: int) -> None:
        """This thread has launched what writes them in one layer."""
        gpu.later(partial(self._report, layer), self._failed)

    def _report(self, layer: int) -> None:
        """The room may be another request's by now: then none of these transfers is in it."""
        self._rooms.extend(self._room, self._first, self._pages.tolist(), only=self._transfer_ids)
        self._rooms.written(self._room, layer, self._end, only=self._transfer_ids)

    def _failed(self, reason: Reason) -> None:
        self._rooms.end(self._room, reason)
