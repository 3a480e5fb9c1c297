"""Work of a GPU on one stream, kernels or copy engine: begun with a slot, and seen to end in the order it began.

A slot is pinned memory for the list of a part of a batch, as much of the GPU's (`csrc/cuda/launcher.h`), and an
event. Their number bounds what is in flight, and what has to be waited for when a peer is closed. A host
function behind the oldest launch in flight, on a stream of its own, makes an eventfd readable.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from pdlink import _cuda
from pdlink.cuda.buffers import DeviceBuffer, PinnedBuffer
from pdlink.cuda.driver import CudaEvent, CudaFailure, CudaStream, CudaUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.kv.layout import RunArray

Work = TypeVar("Work")

NUM_SLOTS: Final = 32
"""A push of 32 layers waits for no slot."""
SLOT_NBYTES: Final = 256 << 10
"""Room for 32,768 pairs of a plan: 524,288 tokens in blocks of 16. A run takes as much as two."""

_ABANDONED: list[object] = []
"""Kept until the process ends: a kernel whose end is not reported may still read them."""


@dataclass(frozen=True)
class _Slot:
    event: CudaEvent
    native: tuple[int, int, int, int, int]
    """For `_cuda`."""


@dataclass(eq=False)
class LaunchedWork(Generic[Work]):
    work: Work
    """What it is to its caller."""
    slot: _Slot | None
    """None for work of no bytes, which is done when its turn has come."""


class Launches(Generic[Work]):
    """Used with the lock of its owner held."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels | None,
        wake: int,
        num_slots: int = NUM_SLOTS,
        gpu_share: float = 1.0,
    ) -> None:
        """kernels: None where there are none; then only `copy` can be used. wake: the eventfd to ring. gpu_share: of
        the threads that the GPU runs at a time, the most that a launch takes.

        Raises CudaFailure, CudaUnavailable.
        """
        self._device, self._wake = device, wake
        self.in_flight: deque[LaunchedWork[Work]] = deque()
        self._bell_is_set = False
        self._all_slots: list[_Slot] = []
        with contextlib.ExitStack() as made:
            self._stream = CudaStream(device)
            made.callback(self._stream.close)
            self._bell = CudaStream(device)
            made.callback(self._bell.close)
            self._memory = PinnedBuffer(device, num_slots * SLOT_NBYTES) if kernels is not None else None
            """Of all slots: one descriptor."""
            if self._memory is not None:
                made.callback(self._memory.close)
            self._lists = _lists(device, num_slots) if kernels is not None else None
            if self._lists is not None:
                made.callback(self._lists.close)
            for number in range(num_slots):
                event = CudaEvent(device)
                made.callback(event.close)
                self._all_slots.append(_Slot(event, self._place(number, event)))
            self._slots = list(self._all_slots)
            named = [] if kernels is None else [(name, kernels.function(name)) for name in _cuda.kernel_names()]
            try:
                most = max(1, int(gpu_share * device.num_threads / _cuda.THREADS))
                self._launcher = _cuda.KernelLauncher(device.driver.path, device.context, named, most)
            except RuntimeError as error:
                raise CudaUnavailable(str(error)) from None
            made.pop_all()

    def _place(self, number: int, event: CudaEvent) -> tuple[int, int, int, int, int]:
        if self._memory is None:
            return 0, 0, 0, 0, event.handle
        at = number * SLOT_NBYTES
        copy = 0 if self._lists is None else self._lists.ptr + at
        return self._memory.ptr + at, self._memory.device_ptr + at, SLOT_NBYTES, copy, event.handle

    @property
    def launcher(self) -> _cuda.KernelLauncher:
        """For one who launches natively, with `slots`."""
        return self._launcher

    @property
    def slots(self) -> list[tuple[int, int, int, int, int]]:
        return [slot.native for slot in self._all_slots]

    @property
    def streams(self) -> tuple[int, int]:
        """Of the work, and of the bell."""
        return self._stream.handle, self._bell.handle

    @property
    def has_room(self) -> bool:
        return bool(self._slots)

    def is_in_flight(self, work: Work) -> bool:
        """Whether it may be on its way, also after its launch has failed."""
        return any(launch.work is work for launch in self.in_flight)

    def follow(self, event: CudaEvent) -> None:
        """What is begun from now on runs behind what `event` stands for now. Raises CudaFailure."""
        self._device.wait(self._stream.handle, event)

    def precede(self, stream: int, launch: LaunchedWork[Work]) -> None:
        """What is given to `stream` from now on runs behind this one, which is in flight. Raises CudaFailure."""
        if launch.slot is not None:
            self._device.wait(stream, launch.slot.event)

    def launch(self, work: Work, moves: _cuda.Moves) -> None:
        """Launch kernels for `moves`, whose list fits into `SLOT_NBYTES`; `has_room` is true, and there are kernels.

        Raises CudaFailure: the context is dead. `work` is in flight then if a kernel was launched.
        """
        slot = self._slots.pop()
        call, number, begun = self._launcher.launch(moves, slot.native, self._stream.handle)
        if begun:
            self.in_flight.append(LaunchedWork(work, slot))
        self._check(call, number)

    def copy(self, work: Work, runs: RunArray) -> None:
        """Give these runs to the copy engine; `has_room` is true. Raises CudaFailure as `launch` does."""
        slot = self._slots.pop()
        self.in_flight.append(LaunchedWork(work, slot))  # some of them may be on their way when one fails
        self._device.copy_runs(runs, self._stream.handle)
        slot.event.record(self._stream)

    def note(self, work: Work) -> None:
        """Work of no bytes: it ends when all before it has ended."""
        self.in_flight.append(LaunchedWork(work, None))

    def take_ended(self) -> Iterator[Work]:
        """What has run. Raises CudaFailure."""
        while self.in_flight:
            launch = self.in_flight[0]
            if launch.slot is not None and not launch.slot.event.done():
                return
            self.in_flight.popleft()
            if launch.slot is not None:
                self._slots.append(launch.slot)
            yield launch.work

    def ring_at_end(self) -> None:
        """Have the oldest launch in flight ring when it has run. Raises CudaFailure."""
        slot = next((launch.slot for launch in self.in_flight if launch.slot is not None), None)
        if slot is not None and not self._bell_is_set:
            call, number = self._launcher.ring_after(slot.event.handle, self._wake, self._bell.handle)
            self._check(call, number)
            self._bell_is_set = True

    def rung(self) -> None:
        """The eventfd was read: the next launch sets the bell again."""
        self._bell_is_set = False

    def abandon(self) -> None:
        """Leave what a kernel may still use as it is."""
        _ABANDONED.extend((self._memory, self._all_slots))

    def close(self) -> None:
        """After the last one has ended."""
        with contextlib.suppress(CudaFailure):  # of a dead context: nothing of it can be freed, or is left
            self._stream.synchronize()
            self._bell.synchronize()  # the last host function may not have rung yet
            for slot in self._all_slots:
                slot.event.close()
            if self._memory is not None:
                self._memory.close()
                self._memory = None  # its mapping holds a descriptor, which is not to wait for the collector
            if self._lists is not None:
                self._lists.close()
            self._bell.close()
            self._stream.close()

    def _check(self, call: str, number: int) -> None:
        if number:
            raise self._device.driver.failure(call, number)


def _lists(device: Device, num_slots: int) -> DeviceBuffer | None:
    """Memory of the GPU for the lists of these slots; None where there is none left. Raises CudaFailure."""
    try:
        return DeviceBuffer(device, num_slots * SLOT_NBYTES)
    except CudaFailure as failure:
        if failure.name != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        return None
