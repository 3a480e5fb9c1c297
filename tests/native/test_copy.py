"""The stores against a slow reference, for every kind this CPU can run."""

from __future__ import annotations

import numpy as np
import pytest

from pdlink import _copy

KINDS = _copy.store_kinds()
SIZE_NBYTES = 1 << 16


def random_bytes(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, SIZE_NBYTES, dtype=np.uint8)


def test_the_portable_stores_are_always_there_and_last() -> None:
    assert KINDS[-1] == "portable"
    assert len(set(KINDS)) == len(KINDS)


@pytest.mark.parametrize("kind", ["", *KINDS])
@pytest.mark.parametrize("seed", range(3))
def test_any_length_at_any_alignment_is_copied_and_nothing_around_it(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    src = random_bytes(seed)
    lengths = [*range(70), 127, 128, 129, 255, 256, 257, 1000, 2047, 2048, 2049, 4096, 5000]
    for nbytes in lengths:
        src_at, dst_at = rng.integers(0, 4096 + 64, 2)
        dst = random_bytes(seed + 100)
        expected = dst.copy()
        expected[dst_at : dst_at + nbytes] = src[src_at : src_at + nbytes]
        _copy.nt_runs(dst, src, np.array([[src_at, dst_at, nbytes]], dtype=np.int64), kind)
        assert np.array_equal(dst, expected), f"{nbytes} bytes from {src_at} to {dst_at}"


def test_memcpy_and_non_temporal_stores_copy_many_runs_alike() -> None:
    src = random_bytes(0)
    order = np.random.default_rng(1).permutation(SIZE_NBYTES // 128)
    runs = np.stack([order * 128, np.arange(len(order)) * 128, np.full(len(order), 77)], axis=1).astype(np.int64)
    by_memcpy, by_stores = random_bytes(2), random_bytes(2)
    _copy.memcpy_runs(by_memcpy, src, runs)
    _copy.nt_runs(by_stores, src, runs)
    expected = random_bytes(2)
    for src_at, dst_at, nbytes in runs.tolist():
        expected[dst_at : dst_at + nbytes] = src[src_at : src_at + nbytes]
    assert np.array_equal(by_memcpy, expected)
    assert np.array_equal(by_stores, expected)


@pytest.mark.parametrize(
    "run",
    [[0, SIZE_NBYTES, 1], [SIZE_NBYTES - 1, 0, 2], [-1, 0, 1], [0, -1, 1], [0, 0, -1], [0, 2**63 - 1, 2**63 - 1]],
)
def test_a_run_outside_is_refused_before_any_is_copied(run: list[int]) -> None:
    src, dst = random_bytes(0), random_bytes(1)
    runs = np.array([[0, 0, 100], run], dtype=np.int64)
    for copy in (_copy.memcpy_runs, _copy.nt_runs):
        with pytest.raises(ValueError, match="run 1"):
            copy(dst, src, runs)
    assert np.array_equal(dst, random_bytes(1))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="mmx"):
        _copy.nt_runs(random_bytes(0), random_bytes(1), np.empty((0, 3), dtype=np.int64), "mmx")
