"""The kernel behind a put: byte runs between any addresses, in its CPU build."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink import _cuda

NBYTES = 1 << 20


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_land_byte_for_byte_and_nothing_beside_them(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    grain = data.draw(st.sampled_from([1, 4, 16]))
    random = np.random.default_rng(seed)
    src, dst = (random.integers(0, 256, NBYTES, dtype=np.uint8) for _ in range(2))
    expected = dst.copy()
    cuts = np.unique(random.integers(0, NBYTES // grain, 2 * data.draw(st.integers(1, 30)))) * grain
    rows = []
    for start, end in zip(cuts[::2], cuts[1::2], strict=False):
        nbytes = min(int(end - start), data.draw(st.sampled_from([1, 17, 256, 5000, 40000, NBYTES])))
        source = int(random.integers(0, (NBYTES - nbytes) // grain + 1)) * grain
        rows.append((source, int(start), nbytes))
        expected[start : start + nbytes] = src[source : source + nbytes]
    if not rows:
        return
    runs = np.array(rows, dtype=np.uint64) + np.array([src.ctypes.data, dst.ctypes.data, 0], dtype=np.uint64)
    most = data.draw(st.sampled_from([1, 2, 2**31 - 1]))
    launch = _cuda.plan_runs(runs.ctypes.data, len(runs), int(runs[:, 2].max()), most)
    assert launch.grid[0] <= most
    _cuda.run_on_cpu(launch)
    assert np.array_equal(dst, expected)


def test_a_long_run_is_shared_by_many_warps() -> None:
    blocks = [_cuda.plan_runs(0, 1, nbytes).grid[0] for nbytes in (16 << 10, 16 << 20)]
    assert blocks == [1, 128]


def test_what_cannot_be_one_launch_is_refused() -> None:
    with pytest.raises(ValueError, match="too many runs"):
        _cuda.plan_runs(0, 2**30, 1 << 20)
    with pytest.raises(ValueError, match="no runs"):
        _cuda.plan_runs(0, 0, 1)
    assert _cuda.plan_runs(0, 2**20, 2**40).grid[0] > 0
