"""Kernel launches on one stream: begun with a slot and inside a gate, and seen to end in the order they began.

A slot is pinned memory for a launch's list of runs, and an event. Their number bounds what is in flight, and what has
to be waited for when a peer is closed. A host function behind the oldest launch in flight, on a stream of its own,
makes an eventfd readable.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdlink import _cuda
from pdlink.cuda.buffers import PinnedBuffer
from pdlink.cuda.driver import CudaFailure, CudaUnavailable, Event, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.transport.gpu_batches import Batch, Peer, PeerMemory

NUM_SLOTS: Final = 32
"""A push of as many layers waits for none of them."""
SLOT_NBYTES: Final = 256 << 10
"""Room for 10,922 runs: a layer of 2,048 tokens takes 256 in blocks of 16, and 32,768 where every head goes alone."""

_ABANDONED: list[list[_Slot]] = []
"""Kept to the end of the process: a kernel that nobody hears of may still read them."""


class _Slot:
    def __init__(self, device: Device) -> None:
        self._list = PinnedBuffer(device, SLOT_NBYTES, name="pdlink-runs")
        self.place = (self._list.ptr, self._list.device_ptr, self._list.nbytes)
        """The list's address here and for kernels, and its size."""
        try:
            self.event = Event(device)
        except BaseException:
            self._list.close()
            raise

    def close(self) -> None:
        self._list.close()
        self.event.close()


@dataclass(eq=False)
class Launch:
    peer: Peer
    batch: Batch
    memory: PeerMemory
    slot: _Slot | None
    """None for a batch of no bytes, which is done when its turn has come."""
    last: bool
    """Of its batch."""


class Launches:
    """Used with the copier's lock held."""

    def __init__(self, device: Device, kernels: Kernels, wake: int) -> None:
        """wake: the eventfd to ring. Raises CudaFailure, CudaUnavailable."""
        self._device, self._wake = device, wake
        self.in_flight: deque[Launch] = deque()
        self._bell_is_set = False
        self._all_slots: list[_Slot] = []
        with contextlib.ExitStack() as made:
            self._stream = Stream(device)
            made.callback(self._stream.close)
            self._bell = Stream(device)
            made.callback(self._bell.close)
            for _ in range(NUM_SLOTS):
                self._all_slots.append(_Slot(device))
                made.callback(self._all_slots[-1].close)
            self._slots = list(self._all_slots)
            handles = (device.context, kernels.function("pdlink_runs"), self._stream.handle, self._bell.handle)
            try:
                self._launcher = _cuda.Launcher(device.driver.path, *handles)
            except RuntimeError as error:
                raise CudaUnavailable(str(error)) from None
            made.pop_all()

    @property
    def has_room(self) -> bool:
        return bool(self._slots)

    def begin(self, peer: Peer, batch: Batch, memory: PeerMemory, slice_nbytes: int) -> bool:
        """Launch the next slice of a batch; False if the gate is shut. Raises CudaFailure: the context is dead."""
        slot, answer = None, ("", 0)
        if not batch.rows.empty:
            if not memory.gate.enter():
                return False
            slot = self._slots.pop()
            answer = self._launcher.put(batch.rows, slice_nbytes, *slot.place, slot.event.handle)
            if answer[0] not in ("", "cuEventRecord"):  # nothing is on its way
                memory.gate.leave()
                self._check(answer)
        batch.launched = batch.rows.empty
        memory.in_flight += 1
        self.in_flight.append(Launch(peer, batch, memory, slot, last=batch.launched))
        self._check(answer)
        return True

    def take_ended(self) -> Iterator[Launch]:
        """Launches that have run and left their gates. Raises CudaFailure."""
        while self.in_flight:
            launch = self.in_flight[0]
            if launch.slot is not None and not launch.slot.event.done():
                return
            self.in_flight.popleft()
            if launch.slot is not None:
                self._slots.append(launch.slot)
                launch.memory.gate.leave()
            launch.memory.in_flight -= 1
            yield launch

    def ring_at_end(self) -> None:
        """Have the oldest launch in flight ring when it has run. Raises CudaFailure."""
        slot = next((launch.slot for launch in self.in_flight if launch.slot is not None), None)
        if slot is not None and not self._bell_is_set:
            self._check(self._launcher.ring_after(slot.event.handle, self._wake))
            self._bell_is_set = True

    def rung(self) -> None:
        """The eventfd was read: the next launch sets the bell again."""
        self._bell_is_set = False

    def abandon(self) -> None:
        """Leave what a kernel may still use as it is."""
        _ABANDONED.append(self._all_slots)

    def close(self) -> None:
        """After the last one has ended."""
        with contextlib.suppress(CudaFailure):  # of a dead context: nothing of it can be freed, or is left
            self._stream.synchronize()
            self._bell.synchronize()  # the last host function may not have rung yet
            for slot in self._all_slots:
                slot.close()
            self._bell.close()
            self._stream.close()

    def _check(self, answer: tuple[str, int]) -> None:
        call, number = answer
        if number:
            raise self._device.driver.failure(call, number)
