"""Copies between device pages and pinned host memory, on the test double of the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from pdlink.cuda.copies import MOST_PAIRS, RUN_NBYTES, Copies
from pdlink.cuda.driver import Device
from pdlink.cuda.kernels import Kernels
from pdlink.memory.buffers import Buffer
from tests.cuda.double import LentBuffer
from tests.cuda.fake import IMAGE, fake


@contextmanager
def lent_buffers(device: Device, *nbytes: int) -> Iterator[tuple[Buffer, Buffer, list[LentBuffer], int]]:
    """A source and a destination that the GPU reaches, and an eventfd to ring."""
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    src, dst = (Buffer(each) for each in nbytes)
    lent = [LentBuffer(device, buffer) for buffer in (src, dst)]
    try:
        yield src, dst, lent, wake
    finally:
        for each in lent:
            fake().lend(each.ptr, 0, -1)
        src.close()
        dst.close()
        os.close(wake)


def test_every_row_is_copied_although_a_long_one_takes_the_place_of_several(device: Device) -> None:
    """A kernel's list says a run of 12 MiB as three, so a full list has no place for the last ones."""
    long, short = 3 * RUN_NBYTES, 64
    nbytes = long + MOST_PAIRS * 2 * short
    with lent_buffers(device, nbytes, nbytes) as (src, dst, lent, wake):
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


HOSTILE = np.arange(1, 500)
NEIGHBOURS = np.random.default_rng(1).geometric(0.35, 60) * 32768
LENGTHS: dict[str, tuple[Any, int]] = {
    "a peer's, each another": (HOSTILE, 0),
    "joined blocks": (NEIGHBOURS, 1),
    "joined blocks and what is left of a run": (np.append(NEIGHBOURS, 32768 - 2000), 2),
    "what is left of two": (np.concatenate(([1234], NEIGHBOURS, [32768 - 2000])), 3),
}


@pytest.mark.parametrize(("lengths", "most"), LENGTHS.values(), ids=LENGTHS.keys())
def test_runs_of_many_lengths_take_few_launches_or_the_copy_engine(device: Device, lengths: Any, most: int) -> None:
    at = np.cumsum(lengths) - lengths
    nbytes = int(lengths.sum())
    with lent_buffers(device, nbytes, nbytes + 64 * len(at)) as (src, dst, lent, wake):
        src.array[:] = np.random.default_rng(2).integers(0, 256, len(src.array), np.uint8)
        to = at + 64 * np.arange(len(at))
        runs = np.stack([lent[0].ptr + at, lent[1].ptr + to, lengths], axis=1).astype(np.int64)
        with closing(Kernels(device, IMAGE)) as kernels, closing(Copies[Any](device, kernels, wake, 2)) as copies:
            fake().take_log()
            copies.begin("work", runs)
            device.synchronize()
            assert list(copies.take_ended()) == ["work"]
        calls = [call for call, _ in fake().take_log()]
        assert calls.count("cuLaunchKernel") <= most
        assert ("cuMemcpyBatchAsync_v2" in calls) == (most == 0)
        for begin, end, nbytes in zip(at.tolist(), to.tolist(), lengths.tolist(), strict=True):
            assert np.array_equal(dst.array[end : end + nbytes], src.array[begin : begin + nbytes])
