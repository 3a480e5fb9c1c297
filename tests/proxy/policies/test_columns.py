"""The native judgement of workers, beside one that is written as it reads (`csrc/index/columns.h`)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pdlink._index import Columns, Guesses, HeldKV

if TYPE_CHECKING:
    import numpy.typing as npt

NONE = Guesses(1)


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
    worth = 16 * (tokens - cached[row]) * ((taken[row] - taken[other]) / 2.0 - 0.25)
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
        "taken": [rng.choice((0.0, 0.0, rng.random() * 4)) for _ in range(num)],
    }
    fit = [rng.random() < 0.7 for _ in range(num)]
    fit[rng.randrange(num)] = True
    held = {row: rng.randrange(tokens + 1) for row in range(num + 3) if rng.random() < 0.4}
    loading = {row: float(rng.randrange(50)) for row in held if rng.random() < 0.5}
    said = HeldKV([(row, tokens, loading.get(row, 0.0)) for row, tokens in held.items()])
    behind = {f"w{row}": rng.random() for row in range(num + 3) if rng.random() < 0.3}
    cached = [held.get(row, 0) for row in range(num)]
    extra = [loading.get(row, 0.0) + behind.get(f"w{row}", 0.0) * tokens for row in range(num)]
    rows = {f"w{row}": row for row in range(num)}
    made: dict[str, npt.NDArray[Any]] = {name: np.array(values) for name, values in table.items()}
    columns = Columns(**made, numbers=np.arange(num, dtype=np.uint32), rows=rows)
    for turn in range(4):
        mask = None if all(fit) else np.array(fit)
        row, costs = chosen(table, fit, cached, extra, tokens, turn)
        found = columns.cheapest(NONE, [], 1, tokens, said, behind, 2.0, mask, turn, 8)
        assert found[:2] == (row, cached[row])
        assert [each for each, _ in found[2]] == [each for _, each in costs[:8]]
        assert [cost for _, cost in found[2]] == pytest.approx([cost for cost, _ in costs[:8]])
        assert not columns.cheapest(NONE, [], 1, tokens, said, None, 2.0, mask, turn, 0)[2]
    assert columns.held(said) == columns.cached(NONE, [], 1, tokens, said) == cached


@pytest.mark.parametrize("bad", [[0], [2], [0, 1, 2]])
def test_a_worker_whose_load_is_no_number_is_chosen_last(bad: list[int]) -> None:
    load = np.array([3.0, 4.0, 5.0])
    load[bad] = np.nan
    columns = Columns(load, np.ones(3), np.array([0.0, 2.0, 1.0]), np.zeros(3, np.uint32), {})
    fit = np.array([True, False, True])
    fine = [row for row in (0, 2) if row not in bad] or [0, 2]
    for turn in range(4):
        row, _, scores = columns.cheapest(NONE, [], 1, 10, None, None, 1.0, fit, turn, 8)
        assert row == fine[0]
        assert columns.least(fit, turn) in (fine if bad == [0, 1, 2] else fine[:1])
        assert sorted(each for each, _ in scores) == [0, 2]
        assert scores[0][0] == fine[0]
    assert columns.lowest(fit, 1)[0][0] == fine[0]


def test_equal_loads_take_turns_and_a_change_of_a_column_is_seen() -> None:
    load = np.array([1.0, 2.0, 1.0])
    columns = Columns(load, np.ones(3), np.zeros(3), np.zeros(3, np.uint32), {})
    assert [columns.least(None, turn) for turn in range(4)] == [0, 2, 0, 2]
    assert columns.lowest(None, 2) == [(0, 1.0), (2, 1.0)]
    fit = np.array([False, True, True])
    assert [columns.least(fit, turn) for turn in range(2)] == [2, 2]
    load[2] = np.inf
    assert columns.least(fit, 0) == 1
    load[1] = np.inf
    assert [columns.least(fit, turn) for turn in range(2)] == [1, 2], "no value is too large to be the least"


def test_columns_of_other_lengths_are_refused() -> None:
    two, three = np.zeros(2), np.zeros(3)
    with pytest.raises(ValueError, match="columns: expected equal lengths"):
        Columns(two, two, three, np.zeros(2, np.uint32), {})
    columns = Columns(two, two, two, np.zeros(2, np.uint32), {})
    with pytest.raises(ValueError, match="fit: expected a mark for each row"):
        columns.least(np.ones(3, np.bool_), 0)
