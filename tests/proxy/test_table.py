"""What placement knows of a leg's workers, in columns: always that of their states, and read without a loop."""

from __future__ import annotations

import math
import random
import sys
from types import FrameType

import numpy as np
import pytest

from pdlink.api.health import Health
from pdlink_proxy.fleet import Fleet, PlacementRequest
from pdlink_proxy.placement import Pair, Placer
from pdlink_proxy.policies.registry import POLICIES
from pdlink_proxy.side import Side
from pdlink_proxy.steps import Leg
from pdlink_proxy.table import Table, Workers, WorkerState, compare
from pdlink_proxy.worker import FAILURES, State, Worker

GROUPS = [("", ""), ("a", ""), ("a", "1"), ("b", "1"), ("b", "2")]


def states(num: int) -> list[WorkerState]:
    return [WorkerState(f"http://w{number}#1") for number in range(num)]


class Plain:
    """What a worker has to do, as it reads."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.foreign, self.mean = 0, 0.0
        self.foreign_tokens: int | None = None
        self.room: int | None = None

    def sent(self, tokens: int) -> None:
        self.mean = self.mean + 0.1 * (tokens - self.mean) if self.mean else tokens
        self.running.append(tokens)
        self.room = None if self.room is None else self.room - tokens

    def finished(self, tokens: int) -> None:
        self.running.remove(tokens)
        self.room = None if self.room is None else self.room + tokens

    def heard(self, requests: int, room: int | None, load: int | None) -> None:
        self.foreign = max(0, requests - len(self.running))
        self.foreign_tokens = None if load is None else max(0, load - sum(self.running))
        self.room = room

    @property
    def load(self) -> float:
        others = self.foreign * (self.mean or 1) if self.foreign_tokens is None else self.foreign_tokens
        return sum(self.running) + others

    @property
    def free(self) -> float:
        idle = not self.running and not self.foreign
        return math.inf if self.room is None or idle else self.room


@pytest.mark.parametrize("seed", range(5))
def test_rows_say_what_their_workers_have_to_do_through_whatever_happens(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    table, plain = Table(states(6)), [Plain() for _ in range(6)]
    running: list[tuple[WorkerState, Plain, int]] = []
    for turn in range(400):
        row = rng.randrange(6)
        state = table.states[row]
        match rng.randrange(6):
            case 0 | 1:
                tokens = rng.randrange(1, 1000)
                plain[row].sent(tokens)
                assert state.sent(tokens, turn) == pytest.approx(plain[row].load)
                running.append((state, plain[row], tokens))
            case 2 if running:  # perhaps of a life that is over
                one, of_one, tokens = running.pop(rng.randrange(len(running)))
                one.finished(tokens, turn + rng.random(), served=rng.random() < 0.9)
                of_one.finished(tokens)
            case 3:
                said = rng.randrange(5), rng.choice([None, rng.randrange(5000)]), rng.choice([None, 700])
                state.heard(*said)
                plain[row].heard(*said)
            case 4:
                compare(table.states)
            case 5:
                state.group = rng.choice(GROUPS)
                table.tell_group(row)
                if rng.random() < 0.3:
                    table.put(row, WorkerState(f"http://w{row}#{turn}"))
                    plain[row] = Plain()
        assert table.columns.load == pytest.approx([each.load for each in plain])
        assert table.columns.room.tolist() == [each.free for each in plain]
        assert table.columns.slowness.tolist() == [each.slowness for each in table.states]
        assert table.columns.tells_room == any(each.room is not None for each in plain)
        assert [each.requests for each in table.states] == [len(each.running) for each in plain]
        fresh = Table(table.states)
        assert np.array_equal(table.names, fresh.names)
        assert table.rows == fresh.rows
        assert table.groups_of(None) == {each.group for each in table.states}


def brute(side: Side, model: str | None, now_s: float) -> list[Worker]:
    """As the rules say, one worker after the other."""
    well = [
        worker
        for worker in side.workers
        if worker.state is State.OK and worker.health and worker.health.serves(model)
        if not worker.listed_as_draining
    ]
    allowed = [worker for worker in well if worker.breaker.allows(now_s)]
    found = allowed if 2 * len(allowed) >= len(well) else well
    return [worker for worker in found if worker.outlier.allows(now_s)] or found


@pytest.mark.parametrize("seed", range(5))
def test_those_that_may_get_requests_are_known_without_asking_each(seed: int) -> None:
    rng, side = random.Random(seed), Side()
    health = {model: Health("ok", "w", "1", None, model, None) for model in "mn"}
    side.replace([Worker(f"http://w{number}", Leg.DECODE, plain=number % 4 == 0) for number in range(7)])
    for turn in range(500):
        worker = rng.choice(side.workers)
        match rng.randrange(7):
            case 0 | 1:
                worker.heard(health[rng.choice("mmn")], faults_when_asked=worker.faults)
            case 2:
                worker.fault("gone")
            case 3:
                for _ in range(FAILURES):
                    worker.breaker.end(worker.breaker.begin(turn), turn, failed=True)
                worker.judged()
            case 4:
                worker.breaker.end(worker.breaker.begin(turn), turn, failed=False)
                worker.judged()
            case 5:
                worker.outlier.leave_out(turn, "slow")
                worker.judged()
            case 6 if rng.random() < 0.1:
                kept = rng.sample(side.workers, 6)
                kept[0].listed_as_draining = not kept[0].listed_as_draining
                side.replace([*kept, Worker(f"http://new{turn}", Leg.DECODE)])
        for model in ("m", "n", None):
            wanted = brute(side, model, turn)
            usable = side.usable(model, turn)
            assert side.usable_workers(model, turn) == wanted
            assert list(usable.pair) == [worker.work for worker in wanted if not worker.plain]
            assert list(usable.plain or ()) == [worker.work for worker in wanted if worker.plain]
        known = {worker.health.model for worker in side.workers if worker.health}
        assert side.models == sorted(known)
        assert side.all_heard == (bool(known) and all(worker.health for worker in side.workers))


def calls_of_a_decision(policy: str, num: int) -> int:
    """Python functions that one placement among so many workers on each side calls."""
    sides = []
    for leg in Leg:
        side = Side()
        side.replace(
            [
                Worker(state.key, leg, state=State.OK, health=Health("ok", "", "", None, "m", None), work=state)
                for state in states(num)
            ]
        )
        sides.append(side)
    placer, calls = Placer(policy, policy), 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    for number in range(20):
        request = PlacementRequest("m", 2048, 100, session="s", chain=(0, number, number, number))
        if number == 19:
            sys.setprofile(count)
        try:
            prefill, decode = (side.usable("m", 0.0).pair for side in sides)
            placed = placer.place(request, Fleet(prefill, decode))
        finally:
            sys.setprofile(None)
        assert isinstance(placed, Pair)
        assert placed.prefill is not None
        if (note := placer.noting.get("prefill")) is not None:
            note(request, placed.prefill)
        placed.prefill.sent(2048, 0.0)
        placed.decode.sent(2148, 0.0)
    return calls


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_among_a_thousand_workers_takes_as_many_steps_as_one_among_a_hundred(policy: str) -> None:
    assert calls_of_a_decision(policy, 1000) <= calls_of_a_decision(policy, 100) + 10


def test_workers_are_a_sequence_of_those_that_fit() -> None:
    table = Table(states(5))
    some = Workers(table).without(["http://w1#1", "http://w4#1", "unknown"])
    assert [each.key for each in some] == ["http://w0#1", "http://w2#1", "http://w3#1"]
    assert (len(some), some[1], some[-1], some[1:]) == (3, table.states[2], table.states[3], table.states[2:4])
    assert table.states[1] not in some
    assert not some.without(each.key for each in some)
    assert Workers(table)[4] is table.states[4]
