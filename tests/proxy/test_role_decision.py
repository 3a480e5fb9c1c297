"""When the proxy's loop turns a worker, against a fleet in virtual time: two fluids, and workers that drain.

Loads are in workers: prefill 2.5 is the work of two and a half prefill workers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from pdlink.config import RolesConfig
from pdlink_proxy.dialects import Health
from pdlink_proxy.dialects.base import Curves
from pdlink_proxy.turning.decide import OTHER, Decider, Turn
from pdlink_proxy.turning.demand import Seen, Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink_proxy.turning.demand import Side

SEEDS = 3
GROUP = ("m", "", "f")
TOKEN_S = 1e-4
"""Of a prompt."""
CAPACITY = 100_000
CURVES = Curves((0.0, TOKEN_S, 0.0), (0.005, 1e-4, 0.0))
CONFIG = RolesConfig(mode="on", admin_key_file="k", token_s=1.0, drain_s=30.0)
TICK_S = CONFIG.window_s / 4


@dataclass
class Sim:
    """A worker of the fleet."""

    name: str
    side: Side
    epoch: str = "e"
    busy_s: float = 0.0
    backlog_s: float = 0.0
    drains_until_s: float | None = None


@dataclass
class Hall:
    """The fleet, its clients, and the one who does what the decider says."""

    num_prefill: int
    num_decode: int
    loads: Callable[[float], tuple[float, float]]
    """By time, what prefill and decode have to do."""
    config: RolesConfig = CONFIG
    noise: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    can_turn: bool = True
    now_s: float = 0.0
    waits: float = 0.0
    """Decode work that found no room."""
    turns: list[tuple[float, Turn]] = field(default_factory=list)
    smallest: dict[Side, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decider = Decider(self.config)
        self.workers = [Sim(f"p{n}", "prefill") for n in range(self.num_prefill)]
        self.workers += [Sim(f"d{n}", "decode") for n in range(self.num_decode)]
        self.turning: Turn | None = None

    def count(self, side: Side) -> int:
        return sum(each.side == side for each in self.workers)

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._work()
            self._look()
            self.now_s += TICK_S

    def _shaken(self, load: float) -> float:
        return max(0.0, load * self.dice.uniform(1 - self.noise, 1 + self.noise))

    def _work(self) -> None:
        prefill, _ = self.loads(self.now_s)
        serving = [each for each in self.workers if each.side == "prefill" and each.drains_until_s is None]
        for each in serving:
            each.backlog_s += self._shaken(prefill) * TICK_S / len(serving)
        for each in self.workers:
            done_s = min(each.backlog_s, TICK_S)
            each.backlog_s -= done_s
            each.busy_s += done_s
            if each.drains_until_s is not None and self.now_s >= each.drains_until_s and self.turning is not None:
                each.side, each.drains_until_s = self.turning.role, None
                self.turning = None
                self.decider.turned(self.now_s)

    def _look(self) -> None:
        if self.turning is not None:  # the loop waits for the answer
            return
        turn = self.decider.look(self.now_s, [self._seen(each) for each in self.workers], 0)
        if turn is None:
            return
        self.turns.append((self.now_s, turn))
        self.turning = turn
        (worker,) = (each for each in self.workers if each.name == turn.url)
        assert worker.side == OTHER[turn.role]
        worker.drains_until_s = self.now_s + self.config.drain_s / 2
        for side in OTHER:
            settled = sum(each.side == side and each.drains_until_s is None for each in self.workers)
            self.smallest[side] = min(settled, self.smallest.get(side, settled))

    def _seen(self, each: Sim) -> Seen:
        _, decode = self.loads(self.now_s)
        serving = max(1, sum(other.side == "decode" and other.drains_until_s is None for other in self.workers))
        load = self._shaken(decode) / serving if each.side == "decode" else 0.0
        running = 40
        said = Health(
            *("ok", each.name, each.epoch, each.side, "m", None),
            running=running if load else 0,
            waiting=round(running * max(0.0, load - 1)) if load else 0,
            num_blocks=CAPACITY // 16,
            block_tokens=16,
            queue_tokens=round(each.backlog_s / TOKEN_S),
            kv_used_tokens=round(CAPACITY * min(1.0, load)),
            prefill_s=each.busy_s,
            curves=CURVES,
        )
        return Seen(each.name, each.side, GROUP, each.drains_until_s is None, self.can_turn, said, self.now_s)


def test_noise_alone_turns_nobody() -> None:
    for seed in range(SEEDS):
        hall = Hall(4, 4, lambda _: (2.7, 2.7), noise=0.3, dice=random.Random(seed))
        hall.run(3600)
        assert hall.turns == [], seed


def test_a_load_that_stays_is_met_once_and_no_worker_is_ever_turned_back() -> None:
    """Also where no split is enough for it, and with one to three workers on a side (dynamo PR #9294)."""
    for seed in range(8 * SEEDS):
        dice = random.Random(seed)
        num = dice.randrange(2, 9)
        prefill, decode = dice.uniform(0, num), dice.uniform(0, num)
        hall = Hall(1 + dice.randrange(num - 1), 0, lambda _, p=prefill, d=decode: (p, d), noise=0.15, dice=dice)  # type: ignore[misc]
        hall.num_decode = num - hall.num_prefill
        hall.__post_init__()
        hall.run(1200)
        assert len({turn.role for _, turn in hall.turns}) <= 1, (seed, hall.turns)
        assert len(hall.turns) < num, seed


def test_a_shift_of_the_load_is_followed_there_and_back() -> None:
    for seed in range(SEEDS):
        hall = Hall(
            *(6, 2, lambda now_s: (4.0, 1.2) if now_s < 600 or now_s > 3000 else (1.2, 4.0)),
            noise=0.15,
            dice=random.Random(seed),
        )
        hall.run(600)
        assert hall.turns == [], "the load fits the fleet"
        hall.run(3000)
        assert hall.count("prefill") == 2, seed
        hall.run(5000)
        assert hall.count("prefill") in (5, 6), seed
        assert hall.turns[0][0] - 600 <= (CONFIG.windows + 1) * CONFIG.window_s + TICK_S


def test_no_pool_is_emptied_and_turns_come_one_at_a_time_with_a_rest_between() -> None:
    config = CONFIG.model_copy(update={"min_prefill": 2})
    hall = Hall(6, 2, lambda _: (0.0, 30.0), config)
    hall.run(3600)
    assert (hall.count("prefill"), hall.smallest["prefill"]) == (2, 2)
    times = [at_s for at_s, _ in hall.turns]
    assert len(times) == 4
    assert all(later - sooner >= config.drain_s * 1.5 for sooner, later in zip(times, times[1:], strict=False))
    hall = Hall(1, 3, lambda _: (0.0, 30.0))
    hall.run(3600)
    assert hall.turns == []
    assert "prefill has 1 workers, and keeps 1" in hall.decider.judged[0].waits_for


def test_a_worker_that_comes_goes_or_drains_makes_its_group_wait() -> None:
    hall = Hall(4, 2, lambda _: (0.2, 4.0))
    hall.workers[0].drains_until_s = 1e9
    hall.run(600)
    assert hall.turns == []
    assert "p0 comes, goes, drains or turns" in hall.decider.judged[0].waits_for
    hall.workers[0].drains_until_s = None
    gone = hall.workers.pop(1)
    hall.run(600 + 1.5 * CONFIG.window_s)
    hall.workers.append(gone)
    hall.run(600 + 2.5 * CONFIG.window_s)
    hall.workers.remove(gone)
    hall.run(600 + 3.2 * CONFIG.window_s)
    assert hall.turns == []
    hall.run(900)
    assert hall.turns != []


def test_workers_that_cannot_turn_are_left_and_it_is_said() -> None:
    hall = Hall(4, 2, lambda _: (0.2, 4.0), can_turn=False)
    hall.run(600)
    assert hall.turns == []
    assert hall.decider.judged[0].waits_for == "no prefill worker can turn"


def test_one_window_of_load_turns_nobody() -> None:
    hall = Hall(4, 2, lambda now_s: (0.2, 4.0 if 100 <= now_s < 100 + CONFIG.window_s else 1.0))
    hall.run(600)
    assert hall.turns == []


def test_of_a_pool_the_worker_with_least_to_do_is_turned() -> None:
    hall = Hall(3, 1, lambda _: (0.0, 3.0))
    hall.workers[0].backlog_s = hall.workers[2].backlog_s = 500.0
    hall.config = CONFIG
    hall.run(200)
    assert hall.turns[0][1].url == "p1"


@pytest.mark.parametrize(
    "said", [Health("ok", "w", "e", "prefill", "m", None), Health("ok", "", "", None, "m", None)]
)
def test_a_worker_that_reports_nothing_has_nothing_to_do(said: Health) -> None:
    window = Window()
    for at_s in range(5):
        window.look(Seen("u", "prefill", GROUP, True, True, said, at_s), 0.1, 0.0)
    assert (window.prefill(), window.decode()) == (0.0, 0.0)


def test_a_promise_that_one_request_cannot_keep_is_not_looked_at() -> None:
    """More workers would not mend it (dynamo PR #11624)."""
    slow = Health(
        *("ok", "w", "e", "decode", "m", None),
        running=2,
        waiting=0,
        num_blocks=100,
        block_tokens=16,
        kv_used_tokens=160,
        curves=Curves(None, (0.5, 0.01, 0.0)),
    )
    for token_s, share in ((0.1, 0.1), (0.6, 0.2), (0.52, 1.0)):
        window = Window()
        window.look(Seen("u", "decode", GROUP, True, True, slow, 0.0), token_s, 0.0)
        assert window.decode() == pytest.approx(share)
