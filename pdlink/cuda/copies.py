"""`Copies`: between device pages and pinned host memory, one way, by a kernel or by the copy engine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from pdlink import _cuda
from pdlink.cuda.driver import CudaFailure, CudaUnavailable
from pdlink.cuda.launches import SLOT_NBYTES, Launches
from pdlink.cuda.strided import PAIR_NBYTES, StridedPlan
from pdlink.kv.layout import RunList

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdlink.cuda.driver import Device
    from pdlink.cuda.kernels import Kernels
    from pdlink.kv.layout import RunArray
    from pdlink.kv.plan import Plan

Work = TypeVar("Work")

ENGINE_RUN_NBYTES: Final = 256 << 10
"""Until it is measured (`ways.py`): runs of this mean length or longer go to the copy engine, which leaves the
multiprocessors to the model; shorter ones to a kernel, because each run is a command of the engine's. Reasoned, not
measured: no GPU was at hand."""
MOST_PAIRS: Final = SLOT_NBYTES // PAIR_NBYTES
"""Runs, or units of a `StridedPlan`, of one `begin`: a kernel's list of them lies in one slot."""
RUN_NBYTES: Final = 4 << 20
"""A kernel's list says a longer run as several (`kMaxRunNbytes` of `csrc/common/runs.h`)."""

MOST_LAUNCHES: Final = 32
"""For one `begin`, each of runs of one length. Records of a tier with more lengths go to the copy engine."""

_WORLD: Final = [(0, 2**63 - 1)]
"""Every address as one region: the runs were checked before."""


class Copies(Launches[Work]):
    """One direction: a stream with launches in flight, used with the lock of its owner held."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels | None,
        wake: int,
        num_slots: int,
        engine_run_nbytes: int = ENGINE_RUN_NBYTES,
    ) -> None:
        """engine_run_nbytes: runs of this mean length or longer go to the copy engine."""
        super().__init__(device, kernels, wake, num_slots)
        self._has_kernels, self._engine_run_nbytes = kernels is not None, engine_run_nbytes

    def wants_pairs(self, run_nbytes: int) -> bool:
        """Whether a kernel copies what would be runs of `run_nbytes`: it is best said by `StridedPlan`."""
        return self._has_kernels and run_nbytes < self._engine_run_nbytes

    def begin_plan(
        self, work: Work, plan: Plan, src: Sequence[tuple[int, int]], dst: Sequence[tuple[int, int]]
    ) -> None:
        """Copy all layers of a plan of up to `2 * MOST_PAIRS` units.

        src, dst: address and bytes of the regions of each side. `has_room` is true. Raises CudaFailure, and
        ValueError for what is outside of its region.
        """
        if self.wants_pairs(plan.template.run_nbytes()):
            unit_tokens, layers = plan.template.unit_tokens, [layer.strided for layer in plan.template.layers]
            skip, num_tokens = plan.start % unit_tokens, plan.end - plan.start
            self.launch(work, _cuda.Moves.of_plan(plan.pairs, unit_tokens, skip, num_tokens, layers, src, dst))
            return
        self.copy(
            work,
            np.concatenate(
                [
                    one.runs + (src[one.src_region][0] + one.src_base, dst[one.dst_region][0] + one.dst_base, 0)
                    for one in plan.run_lists(0, len(plan.template.layers))
                ]
            ),
        )

    def begin(self, work: Work, plan: RunArray | StridedPlan) -> None:
        """Copy up to `MOST_PAIRS` runs of source address, destination address, nbytes, or as many units.

        `has_room` is true. Raises CudaFailure.
        """
        if isinstance(plan, StridedPlan):
            self.launch(work, plan.moves())
        elif (
            not self._has_kernels
            or int(plan[:, 2].sum()) >= self._engine_run_nbytes * len(plan)
            or int((-(-plan[:, 2] // RUN_NBYTES)).sum()) > MOST_PAIRS
        ):
            self.copy(work, plan)
        else:
            moves = _cuda.Moves([RunList(0, 0, 0, 0, np.ascontiguousarray(plan))], _WORLD, _WORLD)
            if moves.num_launches > MOST_LAUNCHES:
                self.copy(work, plan)
            else:
                self.launch(work, moves)


@contextlib.contextmanager
def kernels_if_any(device: Device, image: bytes | None) -> Iterator[Kernels | None]:
    """The kernels on an open device; None in a build without them, or for a GPU older than they are."""
    from pdlink.cuda.kernels import Kernels

    try:
        kernels = Kernels(device, image)
    except (CudaUnavailable, CudaFailure):
        yield None
        return
    with contextlib.closing(kernels):
        yield kernels
