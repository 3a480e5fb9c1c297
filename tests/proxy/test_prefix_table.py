"""What the processes of one proxy know of each other's guesses where prompts' KV lies."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pdlink_proxy import prefix_table
from pdlink_proxy.fleet import Fleet, PlacementRequest, WorkerState
from pdlink_proxy.placement import Placed, Placer
from pdlink_proxy.prefix_table import PrefixTable
from pdlink_proxy.steps import Leg

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = {"a": 0, "b": 1, "c": 2}


@pytest.fixture
def tables(tmp_path: Path) -> Callable[[], PrefixTable]:
    """Opens one more of the same table."""
    prefix_table.make(tmp_path / "table")
    return lambda: PrefixTable(tmp_path / "table")


def keys(*names: int) -> list[bytes]:
    return [(2 * name + 1).to_bytes(8, "little") * 4 for name in names]


def test_a_process_finds_what_another_one_has_sent(tables: Callable[[], PrefixTable]) -> None:
    one, other = tables(), tables()
    assert other.found(keys(1, 2), ROWS) == []
    one.note(keys(1, 2, 3), "a", 100)
    assert other.found(keys(1, 2, 3, 4), ROWS) == [(0, 3)]
    assert other.found(keys(1, 2, 9), ROWS) == [(0, 2)]
    other.note(keys(1, 2), "b", 100)
    assert one.found(keys(1, 2, 3, 4), ROWS) == [(1, 2), (0, 3)]
    assert one.found(keys(1, 2, 3, 4), {"a": 7}) == [(7, 3)]  # the other worker is not of this fleet
    assert one.found([], ROWS) == []
    one.note([], "a", 100)


def test_a_worker_forgets_what_it_was_sent_long_ago(tables: Callable[[], PrefixTable]) -> None:
    one, other = tables(), tables()
    one.note(keys(1, 2), "a", 4)
    other.note(keys(3, 4, 5, 6), "a", 4)
    assert one.found(keys(1, 2), ROWS) == [(0, 2)]
    other.note(keys(7), "a", 4)
    assert one.found(keys(1, 2), ROWS) == []
    assert one.found(keys(3, 4, 5, 6), ROWS) == [(0, 4)]


def test_a_worker_that_began_anew_has_nothing(tables: Callable[[], PrefixTable]) -> None:
    one, other = tables(), tables()
    one.note(keys(1, 2), "a", 100)
    assert other.found(keys(1, 2), {"a": 0}) == [(0, 2)]
    other.forget("a")
    assert other.found(keys(1, 2), {"a, again": 0}) == []


def test_names_in_place_of_keys_are_found_too(tables: Callable[[], PrefixTable]) -> None:
    tables().note(["x", "y"], "a", 100)
    assert tables().found(["x", "y", "z"], ROWS) == [(0, 2)]


def test_two_processes_place_as_one_that_knows_all(tmp_path: Path) -> None:
    """Chats of three turns, each turn at any process: most of the tokens that one process would find are found, and
    without the table about half."""
    rng = random.Random(20261123)
    for leg in Leg:
        prefix_table.make(tmp_path / leg.value)

    def found(num_processes: int, *, shared: bool) -> float:
        placers = [Placer("cost", "least_loaded") for _ in range(num_processes)]
        workers = [WorkerState(f"{num_processes} {shared} {number}") for number in range(8)]
        decode = [WorkerState("d")]
        if shared:
            for placer in placers:
                placer.share({leg.value: PrefixTable(tmp_path / leg.value) for leg in Leg})
        cached = total = 0
        for chat in range(200):
            prompt = [chat * 100_000 + number for number in range(2048)]
            for _ in range(3):
                body = str(prompt).encode()
                request = PlacementRequest("m", len(prompt), prompt=body)
                placer = rng.choice(placers)
                placed = placer.place(request, Fleet(workers, decode))
                assert isinstance(placed, Placed)
                assert placed.prefill is not None
                placer.sent(request, "prefill", placed.prefill)
                cached += placed.cached_tokens
                total += len(prompt)
                prompt = prompt + [chat * 100_000 + len(prompt) + number for number in range(1024)]
        return cached / total

    one, two, deaf = found(1, shared=False), found(2, shared=True), found(2, shared=False)
    print(f"found of the prompts' tokens: one process {one:.2f}, two {two:.2f}, two that share nothing {deaf:.2f}")
    assert two > 0.98 * one
    assert deaf < 0.75 * one
