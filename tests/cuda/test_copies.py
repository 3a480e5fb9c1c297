"""Copies between device pages and pinned host memory, on the test double of the driver."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import numpy as np

from pdlink.cuda.copies import MOST_ROWS, PUT_NBYTES, Copies
from pdlink.cuda.driver import Device
from pdlink.cuda.kernels import Kernels
from pdlink.memory.buffers import Buffer
from tests.cuda.double import LentBuffer
from tests.cuda.fake import IMAGE, fake


def test_every_row_is_copied_although_a_long_one_takes_the_place_of_several(device: Device) -> None:
    """A kernel's list says a row of 12 MiB as three, so a full list has no place for the last ones."""
    long, short = 3 * PUT_NBYTES, 64
    nbytes = long + MOST_ROWS * 2 * short
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    src, dst = Buffer(nbytes), Buffer(nbytes)
    lent = [LentBuffer(device, buffer) for buffer in (src, dst)]
    try:
        src.array[:] = 7
        at = long + np.arange(MOST_ROWS - 1) * 2 * short
        rows = np.zeros((MOST_ROWS, 3), np.int64)
        rows[0] = lent[0].ptr, lent[1].ptr, long
        rows[1:, 0], rows[1:, 1], rows[1:, 2] = lent[0].ptr + at, lent[1].ptr + at, short
        with closing(Kernels(device, IMAGE)) as kernels, closing(Copies[Any](device, kernels, wake, 2)) as copies:
            copies.begin("work", rows)
            device.synchronize()
            while not list(copies.take_ended()):
                pass
        assert dst.array[:long].all()
        assert all(dst.array[start : start + short].all() for start in at)
        assert int(dst.array.astype(bool).sum()) == int(rows[:, 2].sum())
    finally:
        for each in lent:
            fake().lend(each.ptr, 0, -1)
        src.close()
        dst.close()
        os.close(wake)
