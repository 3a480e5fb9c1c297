"""The planner and plain numpy find the same runs, and `pdlink bench bind` notices if they do not."""

from __future__ import annotations

import pytest

from pdlink_bench import bind


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "NUM_TOKENS", 512)


@pytest.mark.parametrize("seed", range(3))
def test_numpy_finds_the_runs_that_the_planner_finds(seed: int) -> None:
    for pair in bind.pairs():
        measured = bind.measure(pair, rounds=2, seed=seed)
        assert measured.num_runs * measured.run_nbytes == pytest.approx(512 * pair.src.num_heads * 256 * 2, rel=0.01)
        assert len(measured.bind_s) == len(measured.numpy_s) == 2


def test_other_runs_than_the_planners_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bind.by_numpy
    monkeypatch.setattr(bind, "by_numpy", lambda *args: right(*args) + [[0, 1, 0]])
    with pytest.raises(ValueError, match="different runs"):
        bind.measure(bind.pairs()[0], rounds=1, seed=0)
