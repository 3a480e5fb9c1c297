"""Every byte of every run arrives where it should, and nothing else changes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdlink.kv.layout import RunList
from tests.conformance.transports.side import PATIENCE_S, Side, join, run_list, runs_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.kv.layout import RunArray

POOL_NBYTES = 2 << 20


def pair(make_side: Callable[[], Side], *, num_buffers: int = 1) -> tuple[Side, Side]:
    writer, owner = make_side(), make_side()
    for index in range(num_buffers):
        writer.add_buffer(POOL_NBYTES, seed=2 * index)
        owner.add_buffer(POOL_NBYTES, seed=2 * index + 1)
    join(writer, owner)
    return writer, owner


def expect(writer: Side, owner: Side, lists: list[RunList]) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """What the owner's buffers must hold afterwards, made run by run."""
    expected = [buffer.array.copy() for buffer in owner.buffers]
    sources = [buffer.array for buffer in writer.buffers]  # once: of a GPU's memory it is a copy
    for one in lists:
        for src, dst, nbytes in one.runs.tolist():
            src, dst = src + one.src_base, dst + one.dst_base
            expected[one.dst_region][dst : dst + nbytes] = sources[one.src_region][src : src + nbytes]
    return expected


def scattered(seed: int, page_nbytes: int, num_runs: int, *, odd: bool, nbytes: int = POOL_NBYTES) -> RunArray:
    """Runs between shuffled pages of `nbytes` bytes; `odd` ones begin and end anywhere inside their page."""
    rng = np.random.default_rng(seed)
    num_pages = nbytes // page_nbytes
    src = rng.permutation(num_pages)[:num_runs] * page_nbytes
    dst = rng.permutation(num_pages)[:num_runs] * page_nbytes
    lengths = np.full(len(src), page_nbytes)
    if odd:
        lengths = rng.integers(0, page_nbytes // 2, len(src))
        src = src + rng.integers(0, page_nbytes // 2, len(src))
        dst = dst + rng.integers(0, page_nbytes // 2, len(src))
    return np.stack([src, dst, lengths], axis=1).astype(np.int64)


def deliver(writer: Side, owner: Side, lists: list[RunList]) -> None:
    expected = expect(writer, owner, lists)
    ticket = writer.submit("owner", *lists)
    assert writer.wait_batch(ticket) == "ok"
    for buffer, bytes_expected in zip(owner.buffers, expected, strict=True):
        np.testing.assert_array_equal(buffer.array, bytes_expected)
    assert writer.done(ticket)[0].nbytes == sum(one.nbytes for one in lists)


@pytest.mark.parametrize("odd", [False, True], ids=["whole pages", "partial pages"])
@pytest.mark.parametrize("page_nbytes", [512, 4096, 32768])
def test_scattered_pages_arrive_and_nothing_else_changes(
    make_side: Callable[[], Side], page_nbytes: int, odd: bool
) -> None:
    writer, owner = pair(make_side)
    runs = scattered(page_nbytes, page_nbytes, 40, odd=odd)
    deliver(writer, owner, [RunList(0, 0, 0, 0, runs)])


def test_ten_thousand_small_runs_are_one_batch(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    deliver(writer, owner, [RunList(0, 0, 0, 0, scattered(3, 128, 10_000, odd=True))])


@pytest.mark.parametrize("seed", range(2))
def test_short_and_long_runs_share_a_batch(make_side: Callable[[], Side], seed: int) -> None:
    """Short ones may be packed on their way, the others not; neighbours on one side only are joined there."""
    writer, owner = pair(make_side, num_buffers=2)
    rng = np.random.default_rng(seed)
    lists = []
    for region in range(2):
        lengths = np.concatenate([rng.integers(1, 400, 1500), rng.integers(4000, 70_000, 20)])
        rng.shuffle(lengths)
        src = rng.integers(0, POOL_NBYTES - lengths)
        dst = np.cumsum(lengths + rng.integers(0, 2, len(lengths))) - lengths
        order = rng.permutation(len(lengths)) if seed else np.arange(len(lengths))
        runs = np.stack([src, dst, lengths], axis=1)[order].astype(np.int64)
        lists.append(RunList(region, 0, 1 - region, 7, runs))
    deliver(writer, owner, lists)


def test_regions_are_numbered_in_the_order_of_their_registration(make_side: Callable[[], Side]) -> None:
    side = make_side()
    assert [side.add_buffer(4096, seed=number) for number in range(3)] == [0, 1, 2]


def test_one_batch_spans_several_regions(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side, num_buffers=3)
    lists = [
        RunList(0, 0, 2, 0, scattered(4, 4096, 20, odd=True)),
        RunList(2, 0, 0, 0, scattered(5, 4096, 20, odd=False)),
        RunList(1, 4096, 1, 512, scattered(6, 4096, 20, odd=True, nbytes=POOL_NBYTES // 2)),
    ]
    deliver(writer, owner, lists)


def test_a_run_longer_than_any_range_arrives(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    deliver(writer, owner, [run_list([[3, 70_001, POOL_NBYTES - 100_003]])])


def test_the_first_and_the_last_byte_of_a_region_can_be_written(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    deliver(writer, owner, [run_list([[POOL_NBYTES - 1, 0, 1], [0, POOL_NBYTES - 1, 1]])])


def test_an_empty_batch_completes(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    deliver(writer, owner, [])
    deliver(writer, owner, [run_list([])])
    deliver(writer, owner, [run_list([[5, 5, 0]])])


def test_runs_belong_to_the_caller_again_after_submit(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    runs = scattered(7, 4096, 400, odd=False)
    lists = [RunList(0, 0, 0, 0, runs)]
    expected = expect(writer, owner, lists)
    ticket = writer.submit("owner", *lists)
    runs[:, 1] = 0
    assert writer.wait_batch(ticket) == "ok"
    np.testing.assert_array_equal(owner.buffers[0].array, expected[0])


OUTSIDE = {
    "destination beyond the end": RunList(0, 0, 0, 0, runs_array([[0, POOL_NBYTES - 10, 11]])),
    "source beyond the end": RunList(0, 0, 0, 0, runs_array([[POOL_NBYTES - 10, 0, 11]])),
    "destination base beyond the end": RunList(0, 0, 0, POOL_NBYTES, runs_array([[0, 0, 1]])),
    "negative destination": RunList(0, 0, 0, 0, runs_array([[0, -1, 4]])),
    "negative source": RunList(0, 0, 0, 0, runs_array([[-1, 0, 4]])),
    "negative length": RunList(0, 0, 0, 0, runs_array([[100, 100, -50]])),
    "overflow of offset and length": RunList(0, 0, 0, 0, runs_array([[0, 2**63 - 1, 2**63 - 1]])),
    "overflow of base and offset": RunList(0, 0, 0, 2**63 - 1, runs_array([[0, 2**63 - 1, 4]])),
    "no such source region": run_list([[0, 0, 4]], src_region=1),
    "no such destination region": run_list([[0, 0, 4]], dst_region=1),
    "negative region": run_list([[0, 0, 4]], dst_region=-1),
}


def test_a_run_outside_a_region_is_refused_before_anything_is_written(
    make_side: Callable[[], Side], subtests: pytest.Subtests
) -> None:
    writer, owner = pair(make_side)
    before = owner.snapshot()
    inside = run_list([[0, 0, 4096]])
    for what, outside in OUTSIDE.items():
        with subtests.test(what), pytest.raises(ValueError, match="region"):
            writer.submit("owner", inside, outside)
    # A later batch is in order behind the refused ones: when it has landed, they would have too.
    assert writer.wait_batch(writer.submit("owner", run_list([[0, 8192, 1]]))) == "ok"
    after = owner.buffers[0].array.copy()
    after[8192] = before[0][8192]
    assert after.tobytes() == before[0]
    assert len(writer.happened) == 1


def test_batches_of_many_threads_all_arrive_and_are_reported_once(make_side: Callable[[], Side]) -> None:
    writer, owner = pair(make_side)
    num_threads, per_thread = 4, 25
    part = POOL_NBYTES // num_threads
    tickets: list[list[int]] = [[] for _ in range(num_threads)]

    def work(thread: int) -> None:
        for index in range(per_thread):
            rows = [
                [thread * part + index * 4096 + 7 * i, thread * part + index * 4096 + 8 * i, 7] for i in range(50)
            ]
            tickets[thread].append(writer.submit("owner", run_list(rows)))

    threads = [threading.Thread(target=work, args=[thread]) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    every = {ticket for some in tickets for ticket in some}
    assert len(every) == num_threads * per_thread
    for ticket in every:
        assert writer.wait_batch(ticket) == "ok"
    assert len(writer.happened) == len(every)
    written, there = writer.buffers[0].array, owner.buffers[0].array
    for start in range(0, num_threads * part, part):
        for block in range(start, start + per_thread * 4096, 4096):
            source = written[block : block + 350].reshape(50, 7)
            landed = there[block : block + 400].reshape(50, 8)[:, :7]
            np.testing.assert_array_equal(landed, source)
