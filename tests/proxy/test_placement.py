"""Which pair of workers a request gets, and when none."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from pdlink._index import HeldKV
from pdlink_proxy.decisions import decision
from pdlink_proxy.fleet import Fleet, PlacementRequest
from pdlink_proxy.placement import Alone, Pair, Placer, ProxyBarred, Queued
from pdlink_proxy.policies.cost import Cost
from pdlink_proxy.table import Table, Workers, WorkerState
from tests.proxy.policies.fleets import pool, request, worker


def round_robin() -> Placer:
    return Placer("round_robin", "round_robin")


def test_avoided_workers_are_taken_only_without_another() -> None:
    placer, fleet = round_robin(), Fleet(pool(0, 0), pool(0))
    avoid = frozenset({fleet.prefill[0].key, fleet.decode[0].key})
    for _ in range(3):
        assert placer.place(request(avoid=avoid), fleet) == Pair(fleet.prefill[1], fleet.decode[0])


@pytest.mark.parametrize(
    ("num_prefill", "num_decode"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (3, 3), (4, 2), (4, 6)]
)
def test_round_robin_pairs_everyone_with_everyone_evenly(num_prefill: int, num_decode: int) -> None:
    """In lock step, one bad worker on each side would spoil every pair."""
    placer, fleet = round_robin(), Fleet(pool(*[0] * num_prefill), pool(*[0] * num_decode))
    rounds = num_prefill * num_decode * 4
    pairs = [placer.place(request(), fleet) for _ in range(rounds)]
    counts = Counter((placed.prefill, placed.decode) for placed in pairs if isinstance(placed, Pair))
    assert len(counts) == num_prefill * num_decode
    for side, workers in ((0, fleet.prefill), (1, fleet.decode)):
        each = [sum(num for pair, num in counts.items() if pair[side] is worker) for worker in workers]
        assert each == [rounds // len(workers)] * len(workers)


def test_a_refused_pair_gets_no_request_and_decode_alone_is_the_last_resort() -> None:
    prefill, decode = pool(0, 0), pool(0, 0)
    one, two = (each.key for each in prefill)
    refused = frozenset({(one, decode[0].key), (one, decode[1].key), (two, decode[0].key)})
    placer, fleet = round_robin(), Fleet(prefill, decode, refused)
    for _ in range(4):
        assert placer.place(request(), fleet) == Pair(prefill[1], decode[1])
    nobody = Fleet(prefill, decode, refused | {(two, decode[1].key)})
    placed = placer.place(request(), nobody)
    assert isinstance(placed, Pair)
    assert (placed.prefill, placed.misfit) == (None, True)


def test_no_worker_is_waited_for_unless_it_does_not_let_us_in() -> None:
    placer, there = round_robin(), pool(0)
    assert placer.place(request(), Fleet([], there)) == Pair(None, there[0])
    for fleet in (Fleet(there, []), Fleet([], there, needs_prefill=True)):
        queued = placer.place(request(), fleet)
        assert isinstance(queued, Queued)
        assert queued.empty
    assert isinstance(placer.place(request(), Fleet([], [], barred=frozenset({"decode"}))), ProxyBarred)


def test_decode_without_room_gets_nothing_and_an_idle_one_is_asked_for_what_never_fits() -> None:
    placer, prefill = round_robin(), pool(0)
    full, roomy = worker("full", 10, room_tokens=149), worker("roomy", 10, room_tokens=150)
    for _ in range(4):
        assert placer.place(request(1), Fleet(prefill, [full, roomy])) == Pair(prefill[0], roomy)
    queued = placer.place(request(1), Fleet(prefill, [full]))
    assert queued == Queued("no decode worker has room for 150 tokens", empty=False)
    assert placer.place(request(1), Fleet(prefill, [full]), full=True) == Pair(prefill[0], full)
    idle = worker("idle", room_tokens=10)
    assert placer.place(request(1), Fleet(prefill, [idle])) == Pair(prefill[0], idle)


def test_a_prefill_worker_with_enough_to_do_gets_nothing_more() -> None:
    found = round_robin()
    found.prefill_queue_tokens = 1000
    prefills, decodes = [worker("p0"), worker("p1")], [worker("d")]
    request = PlacementRequest("m", 5000, 10)

    def given() -> list[str]:
        names = []
        for _ in range(4):
            placed = found.place(request, Fleet(prefills, decodes))
            names.append(placed.prefill.key if isinstance(placed, Pair) and placed.prefill is not None else "")
        return names

    assert set(given()) == {"p0", "p1"}, "an idle one gets a prompt of any length"
    prefills[0].sent(1000, 0.0)
    prefills[1].sent(999, 0.0)
    assert given() == ["p1"] * 4
    prefills[1].sent(1, 0.0)
    assert given() == [""] * 4
    queued = found.place(request, Fleet(prefills, decodes))
    assert isinstance(queued, Queued)
    assert not queued.empty
    assert "1000 tokens" in queued.reason
    assert isinstance(found.place(request, Fleet(prefills, decodes), full=True), Pair), "an attempt after a loss"
    found = Placer("round_robin", "round_robin", Alone(tokens=5000))
    found.prefill_queue_tokens = 1000
    alone = found.place(request, Fleet(prefills, decodes))
    assert isinstance(alone, Pair)
    assert alone.alone == "short_prompt"


def test_room_follows_what_is_sent_and_finished_between_reports() -> None:
    one = worker("w", room_tokens=1000)
    one.sent(600, 0.0)
    assert one.room_tokens == 400
    one.finished(600, 1.0, served=True)
    assert one.room_tokens == 1000


@pytest.mark.parametrize(
    ("missing", "held", "load", "reason"),
    [
        (100, 0, 5, "short_prompt"),
        (101, 0, 5, ""),
        (100, 900, 5, "cached_prompt"),
        (200, 0, 0, "decode_idle"),
        (200, 0, 5, ""),
        (201, 0, 0, ""),
    ],
)
def test_decode_computes_what_it_lacks_little_of(missing: int, held: int, load: int, reason: str) -> None:
    decode = worker("d", load)
    placer = Placer("round_robin", "round_robin", Alone(tokens=100, idle_tokens=200))
    asked = PlacementRequest("m", missing + held, held=HeldKV([(decode.number, held, 0.0)]))
    fleet = Fleet(pool(0), [decode])
    placed = placer.place(asked, fleet)
    assert isinstance(placed, Pair)
    assert (placed.alone, placed.prefill is None) == (reason, bool(reason))
    strict = placer.place(asked, Fleet(pool(0), [decode], needs_prefill=True))
    assert isinstance(strict, Pair)
    assert strict.prefill is not None


def some_workers(rng: random.Random, key: str) -> Workers:
    states = [WorkerState(f"{key}{row}", f"{key}-{row}") for row in range(rng.choice((1, 2, 2, 3, 5)))]
    for each in states:
        room = rng.choice((None, None, None, rng.randrange(2000)))
        each.heard(rng.randrange(2), room, rng.choice((0, 0, 100, rng.randrange(900))))
        each.slowness = rng.choice((1.0, 1.0, 2.0))
        each.pool_tokens = rng.choice((None, 1000))
    fit = np.array([rng.random() < 0.8 for _ in states])
    return Workers(Table(states), None if fit.all() or not fit.any() else fit)


@pytest.mark.parametrize("policies", [*itertools.product(("cost", "least_loaded"), repeat=2)])
@pytest.mark.parametrize("seed", range(25))
def test_what_is_placed_in_one_call_goes_where_it_would_step_by_step(seed: int, policies: tuple[str, str]) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    usual = 0
    prefill, decode = some_workers(rng, "p"), some_workers(rng, "d")
    states = [*prefill.table.states, *decode.table.states]
    alone = rng.choice((Alone(), Alone(), Alone(100), Alone(0, 400)))
    placer = Placer(*policies, alone)
    placer.prefill_queue_tokens = rng.choice((0, 0, 500))
    behind = {d.key: {p.key: rng.random() for p in prefill.table.states} for d in decode if rng.random() < 0.2}
    fleet = Fleet(prefill, decode, needs_prefill=rng.random() < 0.3, behind=behind)
    pairs = placer.pairs(fleet)
    assert pairs is not None
    for _ in range(60):
        asked = request(*(rng.randrange(4) for _ in range(rng.randrange(1, 5))))
        if rng.random() < 0.4:
            asked.held = HeldKV([(each.number, rng.randrange(asked.num_tokens), 9.0) for each in states[::2]])
        asked.considered = {} if rng.random() < 0.7 else None
        turn = placer._turn
        rows, weighed = placer.pair(asked, pairs), asked.considered
        assert placer._turn == turn + (rows is not None), "the next one has the next turn"
        placer._turn, asked.considered = turn, None if weighed is None else {}
        placed = placer.place(asked, fleet)
        if rows is None:
            assert not isinstance(placed, Pair) or placed.prefill is None, "nothing was unusual"
            continue
        usual += 1
        one, to = prefill.table.states[rows[0]], decode.table.states[rows[1]]
        assert placed == Pair(one, to, rows[2])
        said = (0.0, "first", "placed", "", 1, 0.0, "", "", 0.0, 0.0, 0)
        assert decision("r", (*said, weighed or {})).considered == (asked.considered or {})
        for note in placer.noting.values():
            note(asked, one)
        one.sent(asked.num_tokens, 0.0)
        to.sent(asked.total_tokens, 0.0)
        if rng.random() < 0.7:
            one.finished(asked.num_tokens, 1.0, served=True)
            to.finished(asked.total_tokens, 1.0, served=True)
    if (
        not placer.prefill_queue_tokens
        and alone == Alone()
        and not any(each.room_tokens is not None for each in decode)
    ):
        assert usual == 60


def test_policies_that_are_not_known_natively_are_asked_themselves() -> None:
    class Mine(Cost):
        pass

    placer, fleet = Placer("cost", "least_loaded"), Fleet(pool(0, 0), pool(0, 0))
    assert placer.pairs(fleet) is not None
    placer.prefill = Mine()
    assert placer.pairs(fleet) is None
    assert Placer("prefix", "cost").pairs(fleet) is None
    assert Placer("cost", "cost", routers=2).pairs(fleet) is None
    placer = Placer("cost", "least_loaded")
    for odd in (
        Fleet(fleet.prefill, fleet.decode, frozenset({("a", "b")})),
        Fleet(fleet.prefill, fleet.decode, grouped=True),
        Fleet(fleet.prefill, fleet.decode, plain=pool(0)),
        Fleet([], fleet.decode),
    ):
        assert placer.pairs(odd) is None
