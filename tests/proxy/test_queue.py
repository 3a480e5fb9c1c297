"""Who goes first among those who wait, and that nobody waits for ever."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from pdlink_proxy.queue import PATIENCE_S, Queue, Waiting


def waiting(
    tenant: str = "", model: str = "m", tokens: int = 100, since_s: float = 0.0, priority: int = 0
) -> Waiting:
    return Waiting(tenant, model, tokens, since_s, priority=priority)


def taken(queue: Queue, now: float = 0.0, room: float = math.inf) -> Waiting | None:
    """Who gets workers that have room for so many tokens."""
    found: list[Waiting] = []

    def take(each: Waiting) -> bool:
        if each.tokens <= room:
            found.append(each)
        return bool(found)

    assert queue.serve(take, now) == bool(found)
    return found[0] if found else None


def served(queue: Queue, now: float = 0.0) -> Waiting:
    """The next one, where everybody finds a worker."""
    found = taken(queue, now)
    assert found is not None
    return found


def test_one_share_is_served_in_the_order_of_arrival() -> None:
    queue, all_of_them = Queue(10), [waiting(since_s=i) for i in range(5)]
    assert all(queue.put(each) for each in all_of_them)
    assert [served(queue) for _ in all_of_them] == all_of_them
    assert not queue.serve(lambda _: True, 0.0)


def test_a_full_queue_takes_nobody_and_one_that_leaves_makes_room() -> None:
    queue, first, second, third = Queue(2), waiting(), waiting(), waiting()
    assert queue.put(first)
    assert queue.put(second)
    assert not queue.put(third)
    queue.remove(first)
    queue.remove(first)
    assert queue.put(third)
    assert [served(queue), served(queue)] == [second, third]
    assert len(queue) == 0


@pytest.mark.parametrize("seed", range(5))
def test_shares_get_tokens_by_their_weights_within_five_percent(seed: int) -> None:
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.0, "c": 4.0, "big": 0.5}
    queue = Queue(10_000, weights)
    shares = [(tenant, model) for tenant in "abc" for model in ("m", "big")]
    got: Counter[tuple[str, str]] = Counter()

    def more(share: tuple[str, str]) -> None:
        queue.put(waiting(*share, tokens=rng.randint(1, 2000)))

    for share in shares * 3:
        more(share)
    for _ in range(6000):
        each = served(queue)
        got[each.share] += each.tokens
        more(each.share)
    total = sum(weights[tenant] * weights.get(model, 1.0) for tenant, model in shares)
    for tenant, model in shares:
        due = weights[tenant] * weights.get(model, 1.0) / total
        assert got[tenant, model] / got.total() == pytest.approx(due, rel=0.05)


def test_who_comes_late_has_no_claim_to_the_past() -> None:
    queue = Queue(100)
    for _ in range(50):
        queue.put(waiting("early"))
    for _ in range(20):
        served(queue)
    for _ in range(20):
        queue.put(waiting("late"))
    assert Counter(served(queue).tenant for _ in range(20)) == {"early": 10, "late": 10}


def test_priority_orders_a_tenants_own_requests_and_yields_to_age() -> None:
    queue = Queue(10)
    low, high, old = waiting(priority=1, since_s=1), waiting(priority=-1, since_s=2), waiting(priority=1, since_s=-30)
    other = waiting("other", since_s=3)
    for each in (low, high, old, other):
        queue.put(each)
    order = [served(queue) for _ in range(4)]
    assert [each for each in order if each is not other] == [old, high, low]
    assert order.index(other) <= 1, "a priority says nothing to others"


def test_who_has_no_worker_does_not_keep_other_models_waiting() -> None:
    queue, stuck, free = Queue(10), waiting(model="gone"), waiting(model="there")
    queue.put(stuck)
    queue.put(free)
    assert queue.serve(lambda each: each.model == "there", 0.0)
    assert not queue.serve(lambda each: each.model == "there", 100.0)
    assert len(queue) == 1


def test_small_requests_do_not_take_the_room_that_a_large_one_waits_for() -> None:
    queue, large, smalls = Queue(100), waiting("large", tokens=1000), 0
    queue.put(large)
    room, now = 500, 0.0
    while True:
        queue.put(waiting("small", tokens=100, since_s=now))
        while (each := taken(queue, now, room)) is not None and each is not large:
            room -= each.tokens
            smalls += 1
        if each is large:
            break
        room, now = room + 100, now + 0.1  # a small one ends
        assert now < PATIENCE_S + 2, f"starved by {smalls}"
    assert smalls > 5


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_lost_and_nobody_is_served_twice(seed: int) -> None:
    rng = random.Random(seed)
    queue, inside, gone = Queue(30, {"a": 3.0}), set[Waiting](), list[Waiting]()
    for step in range(2000):
        now = step * 0.01
        match rng.randrange(3):
            case 0:
                each = waiting(rng.choice("ab"), rng.choice("mn"), rng.randint(1, 50), now, rng.randint(-99, 99))
                assert queue.put(each) == (len(inside) < 30)
                if each.queued:
                    inside.add(each)
            case 1 if inside:
                each = rng.choice(sorted(inside, key=id))
                queue.remove(each)
                inside.discard(each)
            case _:
                each_or_none = taken(queue, now, rng.randrange(70))
                if each_or_none is not None:
                    inside.remove(each_or_none)
                    gone.append(each_or_none)
        assert len(queue) == len(inside)
    while (last := taken(queue, 1e6)) is not None:
        inside.remove(last)
        gone.append(last)
    assert not inside
    assert len(gone) == len(set(gone))


def test_when_to_try_again_follows_the_pace() -> None:
    queue = Queue(100)
    assert queue.retry_after_s() == 1
    for _ in range(60):
        queue.put(waiting())
    for step in range(20):
        served(queue, step * 0.5)
    assert queue.retry_after_s() == 20


def test_accounts_of_keys_that_were_served_do_not_pile_up() -> None:
    """Clients choose their keys where the proxy has none of its own."""
    queue = Queue(10)
    assert queue.put(waiting("patient", tokens=1))
    for number in range(2000):
        assert queue.put(waiting(f"key-{number}"))
        served(queue)
        assert queue.put(waiting("patient", tokens=1, since_s=number))
        served(queue)
    assert len(queue.finish) < 200


def test_requests_under_ever_new_keys_do_not_starve_the_others() -> None:
    queue, late = Queue(10), waiting("old", since_s=1.0)
    for each in (waiting("old"), waiting("other", tokens=10**9), late):
        assert queue.put(each)
    for number in range(50):
        assert queue.put(waiting(f"key-{number}"))
        if served(queue) is late:
            return
    pytest.fail("50 others were served before it")


def test_one_key_holds_at_most_as_many_places_as_are_free_and_others_find_some() -> None:
    queue = Queue(12, divided=True)
    put = {key: sum(queue.put(waiting(key)) for _ in range(20)) for key in ("a", "b", "c")}
    assert put == {"a": 6, "b": 3, "c": 2}
    assert queue.put(waiting("d"))


def test_requests_of_a_share_keep_their_order_when_those_that_have_left_are_cleared_away() -> None:
    queue = Queue(8)
    stay = [waiting(since_s=float(number)) for number in (5, 1, 3)]
    for each in stay:
        assert queue.put(each)
    for number in range(10):
        gone = waiting(since_s=100.0 - number)
        assert queue.put(gone)
        queue.remove(gone)
    last = waiting(since_s=2.0)
    assert queue.put(last)
    assert [served(queue).since_s for _ in range(4)] == [1.0, 2.0, 3.0, 5.0]
