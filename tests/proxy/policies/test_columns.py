"""The native judgement of workers, beside one that is written as it reads (`csrc/index/columns.h`)."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pdlink._index import Columns, Costs, HeldKV, WorkerLoad

NONE = Costs(1)


def work(load: float = 0, slowness: float = 1, taken: float = 0) -> WorkerLoad:
    made = WorkerLoad(allowed=False)
    made.heard(0, None, load)
    made.slowness, made.taken = slowness, math.log(taken) if taken else -math.inf
    return made


def works(*loads: float) -> Columns:
    return Columns([work(load) for load in loads], {})


def chosen(
    table: dict[str, list[float]], fit: list[bool], cached: list[int], extra: list[float], tokens: int, turn: int
) -> tuple[int, list[tuple[float, int]]]:
    """The row, and all costs with their rows, the lowest first."""
    load, slow, taken = table["load"], table["slowness"], table["taken"]
    rows = [row for row in range(len(load)) if fit[row]]
    cost = [(load[row] + tokens - cached[row]) * slow[row] + extra[row] for row in range(len(load))]
    cheap = [row for row in rows if cost[row] == min(cost[each] for each in rows)]
    fresh = [row for row in cheap if taken[row] == min(taken[each] for each in cheap)]
    row = fresh[turn % len(fresh)]
    idle = [each for each in rows if load[each] * slow[each] <= load[row] * slow[row]]
    other = min(idle, key=taken.__getitem__)
    worth = 16 * (tokens - cached[row]) * (taken[row] - taken[other] - 0.25)
    if taken[row] > 0 and cost[other] - cost[row] <= worth:
        row = other
    return row, sorted((cost[each], each) for each in rows)


@pytest.mark.parametrize("seed", range(200))
def test_the_cheapest_worker_is_taken_unless_one_that_computed_less_costs_little_more(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    num, tokens = rng.choice((1, 2, 3, 70)), rng.randrange(1, 500)
    table: dict[str, list[float]] = {
        "load": [float(rng.choice((0, 0, 100, rng.randrange(1000)))) for _ in range(num)],
        "slowness": [rng.choice((1.0, 1.0, 2.0, 0.5)) for _ in range(num)],
        "taken": [rng.choice((0.0, 0.0, rng.random() * 2)) for _ in range(num)],
    }
    fit = [rng.random() < 0.7 for _ in range(num)]
    fit[rng.randrange(num)] = True
    held = {row: rng.randrange(tokens + 1) for row in range(num + 3) if rng.random() < 0.4}
    loading = {row: float(rng.randrange(50)) for row in held if rng.random() < 0.5}
    made = [work(*values) for values in zip(*table.values(), strict=True)]
    numbers = [*(each.number for each in made), *(made[-1].number + more for more in (1, 2, 3))]
    said = HeldKV([(numbers[row], tokens, loading.get(row, 0.0)) for row, tokens in held.items()])
    behind = {f"w{row}": rng.random() for row in range(num + 3) if rng.random() < 0.3}
    cached = [held.get(row, 0) for row in range(num)]
    extra = [loading.get(row, 0.0) + behind.get(f"w{row}", 0.0) * tokens for row in range(num)]
    rows = {f"w{row}": row for row in range(num)}
    columns = Columns(made, rows)
    for turn in range(4):
        mask = None if all(fit) else np.array(fit)
        row, costs = chosen(table, fit, cached, extra, tokens, turn)
        found = columns.cheapest(NONE, [], 1, tokens, said, behind, mask, turn, 8)
        assert found[:2] == (row, cached[row])
        assert [each for each, _ in found[2]] == [each for _, each in costs[:8]]
        assert [cost for _, cost in found[2]] == pytest.approx([cost for cost, _ in costs[:8]])
        assert not columns.cheapest(NONE, [], 1, tokens, said, None, mask, turn, 0)[2]
    assert columns.held(said) == columns.cached(NONE, [], 1, tokens, said) == cached


@pytest.mark.parametrize("bad", [[0], [2], [0, 1, 2]])
def test_a_worker_whose_pace_is_no_number_is_chosen_last(bad: list[int]) -> None:
    made = [work(3.0 + row, math.nan if row in bad else 1.0, (0.0, 2.0, 1.0)[row]) for row in range(3)]
    columns, fit = Columns(made, {}), np.array([True, False, True])
    fine = [row for row in (0, 2) if row not in bad] or [0, 2]
    for turn in range(4):
        row, _, scores = columns.cheapest(NONE, [], 1, 10, None, None, fit, turn, 8)
        assert row == fine[0]
        assert sorted(each for each, _ in scores) == [0, 2]
        assert scores[0][0] == fine[0]


def test_equal_loads_take_turns_and_a_change_of_a_worker_is_seen() -> None:
    made = [work(1.0), work(2.0), work(1.0)]
    columns = Columns(made, {})
    assert [columns.least(None, turn) for turn in range(4)] == [0, 2, 0, 2]
    assert columns.lowest(None, 2) == [(0, 1.0), (2, 1.0)]
    fit = np.array([False, True, True])
    assert [columns.least(fit, turn) for turn in range(2)] == [2, 2]
    made[2].heard(0, None, math.inf)
    assert columns.least(fit, 0) == 1
    columns.put(1, work(math.inf))
    assert [columns.least(fit, turn) for turn in range(2)] == [1, 2], "no value is too large to be the least"
    assert columns.load.tolist() == [1.0, math.inf, math.inf]


def test_what_is_no_worker_or_no_row_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cast"):
        Columns([object()], {})  # type: ignore[list-item]
    columns = works(0, 0)
    with pytest.raises(IndexError):
        columns.put(2, work())
    with pytest.raises(ValueError, match="fit: expected a mark for each row"):
        columns.least(np.ones(3, np.bool_), 0)
