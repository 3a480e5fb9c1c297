"""Copies between device pages and pinned host memory, on the test double of the driver."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import numpy as np

from pdlink.cuda.copies import MOST_PAIRS, RUN_NBYTES, Copies
from pdlink.cuda.driver import Device
from pdlink.cuda.kernels import Kernels
from pdlink.memory.buffers import Buffer
from tests.cuda.double import LentBuffer
from tests.cuda.fake import IMAGE, fake


def test_every_row_is_copied_although_a_long_one_takes_the_place_of_several(device: Device) -> None:
    """A kernel's list says a run of 12 MiB as three, so a full list has no place for the last ones."""
    long, short = 3 * RUN_NBYTES, 64
    nbytes = long + MOST_PAIRS * 2 * short
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    src, dst = Buffer(nbytes), Buffer(nbytes)
    lent = [LentBuffer(device, buffer) for buffer in (src, dst)]
    try:
        src.array[:] = 7
        at = long + np.arange(MOST_PAIRS - 1) * 2 * short
        runs = np.zeros((MOST_PAIRS, 3), np.int64)
        runs[0] = lent[0].ptr, lent[1].ptr, long
        runs[1:, 0], runs[1:, 1], runs[1:, 2] = lent[0].ptr + at, lent[1].ptr + at, short
        with closing(Kernels(device, IMAGE)) as kernels, closing(Copies[Any](device, kernels, wake, 2)) as copies:
            copies.begin("work", runs)
            device.synchronize()
            while not list(copies.take_ended()):
                pass
        assert dst.array[:long].all()
        assert all(dst.array[start : start + short].all() for start in at)
        assert int(dst.array.astype(bool).sum()) == int(runs[:, 2].sum())
    finally:
        for each in lent:
            fake().lend(each.ptr, 0, -1)
        src.close()
        dst.close()
        os.close(wake)
