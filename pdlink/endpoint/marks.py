"""`Marks`: what has been launched on a GPU, and what follows when it has run.

On a GPU a layer is reported before it is written: the host has only launched the kernels that will write it. And a
block is free before the last kernel that writes it has run: one that zeroes it, or a step scheduled ahead. A `Mark`
is an event behind all of that. A transport may let the GPU wait for that of a layer which is reported now
(`Transport.submit_plan`); whatever else is to follow one waits here. The driver is called without the endpoint's
lock, by the thread that makes a mark and by the endpoint's.

What waits for a mark of one stream does not wait for those of others.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.errors import PdlinkError
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.endpoint.work import Work
    from pdlink.memory.buffers import StreamBells, StreamEvent

    Act = Callable[[], None]
    Failed = Callable[[Reason], None]

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often marks are looked at although nothing rings: after a fault of the GPU nothing does."""


class Mark:
    """What its thread had launched, on the stream that was its current one then."""

    __slots__ = ("_spare", "event", "number")

    def __init__(self, event: StreamEvent, number: int, spare: list[StreamEvent]) -> None:
        """number: grows from mark to mark. spare: takes the event when nobody has the mark any more."""
        self.event, self.number, self._spare = event, number, spare

    def __del__(self) -> None:
        self._spare.append(self.event)


@dataclass(slots=True, eq=False)
class _Waiting:
    marks: list[Mark]
    act: Act
    failed: Failed


class Marks:
    """One per node of device memory. `mark` and `when_reached` from any thread, the rest from the endpoint's."""

    def __init__(self, make_event: Callable[[], StreamEvent], bells: StreamBells) -> None:
        """bells: closed here."""
        self._make_event, self._bells = make_event, bells
        self._spare: list[StreamEvent] = []
        self._numbers = itertools.count()
        self._work: Work | None = None
        self.new: deque[_Waiting] = deque()
        """Not looked at yet."""
        self._waiting: list[_Waiting] = []
        self._rings: dict[int, int] = {}
        """By stream: number of the mark that a bell was last set behind."""

    def open(self, work: Work) -> int:
        """work: of the endpoint whose thread is to `look`. Returns a descriptor that is readable when it should."""
        self._work = work
        return self._bells.fileno()

    def mark(self) -> Mark:
        """Behind all that this thread has launched on its current stream by now. Raises what the GPU's library does,
        RuntimeError for a GPU that has failed."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = self._make_event()
        event.record()
        return Mark(event, next(self._numbers), self._spare)

    def when_reached(self, marks: Sequence[Mark], act: Act, failed: Failed) -> None:
        """Act in the endpoint's thread, without its lock, when all of these are reached.

        failed(reason): instead, if what they stand for has failed; also if `act` raises, of which nobody else hears.
        """
        work = self._work
        assert work is not None
        with work.lock:
            self.new.append(_Waiting(list(marks), act, failed))
            work.wake()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting or self.new)

    def hush(self) -> None:
        """The descriptor was readable."""
        self._bells.hush()

    def look(self) -> None:
        """Act for the marks that are reached, and have the others ring."""
        while self.new:
            self._waiting.append(self.new.popleft())
        late: dict[int, Mark] = {}
        still = []
        for waiting in self._waiting:
            try:
                waiting.marks = [mark for mark in waiting.marks if not _is_reached(mark, late)]
            except (RuntimeError, PdlinkError) as error:
                _fail(waiting, Reason(Code.GPU_FAILED, f"what writes the layers has failed: {error}"))
                continue
            if waiting.marks:
                still.append(waiting)
            else:
                _do(waiting)
        self._waiting = still
        for stream, mark in late.items():
            if self._rings.get(stream) != mark.number:
                self._rings[stream] = mark.number
                try:
                    self._bells.ring_after(mark.event)
                except PdlinkError as error:  # `LOOK_S` is left
                    log.warning("the GPU cannot be asked to ring: %s", error)
        if not late:
            self._rings.clear()

    def close(self) -> None:
        """What waits by then does not happen. Safe to call twice."""
        self._bells.close()


def _is_reached(mark: Mark, late: dict[int, Mark]) -> bool:
    """late: by stream, the first mark known not to be reached; those behind it are not asked for."""
    before = late.get(mark.event.stream)
    if before is not None and before.number <= mark.number:
        return False
    if mark.event.reached():
        return True
    late[mark.event.stream] = mark
    return False


def _do(waiting: _Waiting) -> None:
    try:
        waiting.act()
    except Exception as error:  # noqa: BLE001  whatever the caller would have been raised
        log.exception("what follows a launched layer has failed")
        words = f"what was reported of its layers cannot be handled: {type(error).__name__}: {error}"
        _fail(waiting, Reason(Code.HANDLING_FAILED, words))


def _fail(waiting: _Waiting, reason: Reason) -> None:
    try:
        waiting.failed(reason)
    except Exception:
        log.exception("a failure behind a launched layer could not be told: %s", reason)
