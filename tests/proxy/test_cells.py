"""Cells of bounded size: nobody is alone, few are moved, and requests stay within them."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pdlink_proxy.cells import Cells
from pdlink_proxy.steps import Leg
from tests.proxy.fakes import FakeWorker, proxy_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def names(side: str, count: int) -> list[str]:
    return [f"{side}{number}" for number in range(count)]


def sizes(found: dict[str, str], urls: Sequence[str]) -> list[int]:
    return sorted(Counter(found[url] for url in urls).values())


@pytest.mark.parametrize(("num_prefill", "num_decode", "cells"), [(128, 64, 2), (65, 3, 2), (640, 350, 10)])
def test_cells_are_bounded_and_both_sides_are_spread_evenly(num_prefill: int, num_decode: int, cells: int) -> None:
    prefill, decode = names("p", num_prefill), names("d", num_decode)
    found = Cells(64).allot(prefill, decode)
    for urls in (prefill, decode):
        each = sizes(found, urls)
        assert (len(each), each[-1] - each[0] <= 1, each[-1] <= 64) == (cells, True, True)


def test_a_fleet_that_fits_into_one_cell_has_none() -> None:
    assert set(Cells(64).allot(names("p", 64), names("d", 3)).values()) == {""}
    assert Cells(0).allot(names("p", 1000), names("d", 3)) == {}


def test_workers_that_come_and_go_move_few_others() -> None:
    seed = 7
    draw, cells = random.Random(seed), Cells(16)
    prefill, decode = names("p", 60), names("d", 60)
    before, moved = cells.allot(prefill, decode), 0
    for step in range(200):
        urls = draw.choice((prefill, decode))
        if draw.random() < 0.5:
            urls.remove(draw.choice(urls))
        else:
            urls.append(f"{urls[0][0]}new{step}")
        found = cells.allot(prefill, decode)
        stayed = found.keys() & before.keys()
        moved += sum(found[url] != before[url] for url in stayed)
        for side in (prefill, decode):
            assert sizes(found, side)[-1] <= 16, f"seed {seed}, step {step}"
            assert len(sizes(found, side)) == len({*found.values()}), f"a side is missing: {seed=}, {step=}"
        before = found
    assert moved < 200 * 2, "less than two a step"


def test_a_worker_of_both_sides_has_one_cell() -> None:
    swing = names("s", 20)
    found = Cells(16).allot([*names("p", 30), *swing], [*names("d", 30), *swing])
    assert len(found) == 80
    assert len({*found.values()}) == 4


async def test_requests_stay_within_cells(prefills: list[FakeWorker], decodes: list[FakeWorker]) -> None:
    async with proxy_of(prefills, decodes, cell_size=1, policy="round_robin") as proxy:
        cell = {worker.url: worker.cell for worker in proxy.router.pools.all}
        assert sorted(cell.values()) == ["cell-0", "cell-0", "cell-1", "cell-1"]
        for _ in range(8):
            await proxy.stream()
        by_name = {worker.name: cell[worker.url] for worker in prefills}
        for decode in decodes:
            assert decode.received, "it has work"
            for received in decode.received:
                assert by_name[received.body["kv_transfer_params"]["prefill"]["name"]] == cell[decode.url]
        assert len(proxy.router.pools.workers[Leg.PREFILL]) == 2
