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


SUM_KINDS = _copy.sum_kinds()


def summed_slowly(data: bytes) -> tuple[int, int]:
    """As `csrc/copy/sums.h` says, word by word."""
    firsts = [0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1]
    firsts += [0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179]
    data += bytes(-len(data) % 64)
    product = plain = 0
    for at in range(0, len(data), 8):
        line, lane = at // 64, at % 64 // 8
        word = int.from_bytes(data[at : at + 8], "little")
        keyed = word ^ (firsts[lane] + line * 0x9E3779B97F4A7C15) % 2**64
        product += (keyed & 0xFFFFFFFF) * (keyed >> 32) * firsts[lane]
        plain += word * firsts[lane]
    return product % 2**64, plain % 2**64


@pytest.mark.parametrize("kind", ["", *SUM_KINDS])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 128, 4096, 5000])
def test_sums_are_what_their_header_file_says(kind: str, nbytes: int) -> None:
    data = random_bytes(nbytes)[3 : 3 + nbytes]
    assert _copy.sum_bytes(data, kind) == summed_slowly(data.tobytes())


@pytest.mark.parametrize("kind", SUM_KINDS)
@pytest.mark.parametrize("into_records", [True, False])
@pytest.mark.parametrize("shift", [0, 32])
def test_copies_in_any_order_and_number_give_the_sums_of_the_whole(kind: str, into_records: bool, shift: int) -> None:
    """Of two records, of which each is copied in two calls."""
    rng = np.random.default_rng(7)
    records, pages = random_bytes(1), random_bytes(2)
    starts = np.array([128, 32768], dtype=np.int64)
    lines = np.array([[0, 2], [2, 7], [7, 8], [8, 40], [40, 41]]) * 64
    runs = [
        np.stack([rng.permutation(5) * 4096 + shift, lines[:, 0] + at, lines[:, 1] - lines[:, 0]], 1) for at in starts
    ]
    if not into_records:
        runs = [of_one[:, [1, 0, 2]] for of_one in runs]
    sums = np.zeros((2, 2), dtype=np.uint64)
    dst, src = (records, pages) if into_records else (pages, records)
    expected = dst.copy()
    for part in ([3, 0], [4, 1, 2]):
        mine = np.concatenate([of_one[part] for of_one in runs])
        _copy.memcpy_runs(expected, src, mine)
        ends = np.array([len(part), 2 * len(part)], dtype=np.int64)
        _copy.nt_runs_summed(dst, src, mine, ends, starts, sums, into_records, kind)
    assert np.array_equal(dst, expected)
    for start, of_record in zip(starts.tolist(), sums.tolist(), strict=True):
        assert tuple(of_record) == _copy.sum_bytes(records[start : start + 41 * 64])


def test_a_changed_bit_a_moved_line_and_bytes_of_another_time_change_the_sums() -> None:
    data, rng = random_bytes(3), np.random.default_rng(4)
    right = _copy.sum_bytes(data)
    for at in rng.integers(0, len(data), 200):
        bit = 1 << int(rng.integers(8))
        data[at] ^= bit
        product, plain = _copy.sum_bytes(data)
        assert plain != right[1], f"bit {bit} of byte {at}"
        data[at] ^= bit
    for nbytes in (64, 4096):
        pages = data.reshape(-1, nbytes).copy()
        pages[[1, 9]] = pages[[9, 1]]
        assert _copy.sum_bytes(pages.reshape(-1)) != right, "what moved has the same plain sum"
    data[4096:8192] = 0
    assert _copy.sum_bytes(data) != right


@pytest.mark.parametrize(
    ("run", "ends", "starts", "problem"),
    [
        ([0, SIZE_NBYTES, 64], [1], [0], "outside"),
        ([0, 64, 63], [1], [0], "whole lines"),
        ([0, 32, 64], [1], [0], "whole lines"),
        ([0, 64, 64], [1], [128], "whole lines"),
        ([0, 0, 64], [2], [0], "ascend"),
        ([0, 0, 64], [0], [0], "ascend"),
        ([0, 0, 64], [1], [0, 0], "different numbers"),
    ],
)
def test_runs_that_have_no_sums_are_refused_before_any_is_copied(
    run: list[int], ends: list[int], starts: list[int], problem: str
) -> None:
    src, dst, sums = random_bytes(0), random_bytes(1), np.zeros((1, 2), dtype=np.uint64)
    runs, behind, first = np.array([run], np.int64), np.array(ends, np.int64), np.array(starts, np.int64)
    with pytest.raises(ValueError, match=problem):
        _copy.nt_runs_summed(dst, src, runs, behind, first, sums, True)
    assert np.array_equal(dst, random_bytes(1))
    assert not sums.any()
