"""Which pair of workers a request gets, and when none."""

from __future__ import annotations

from collections import Counter

import pytest

from pdlink._index import HeldKV
from pdlink_proxy.fleet import Fleet, PlacementRequest
from pdlink_proxy.placement import Alone, Pair, Placer, ProxyBarred, Queued
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
