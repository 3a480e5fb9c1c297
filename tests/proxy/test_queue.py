"""Who goes first among those who wait, and that nobody waits for ever."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from pdlink_proxy.queue import PATIENCE_S, PRIORITY_S, Queue, Waiting


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


def test_the_last_request_may_leave_while_it_is_offered_workers() -> None:
    queue, alone = Queue(10), waiting()
    assert queue.put(alone)

    def fails(each: Waiting) -> bool:
        queue.remove(each)
        return True

    assert queue.serve(fails, 0.0)
    assert not queue.serve(fails, 0.0)


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


def test_small_requests_pass_a_large_one_that_finds_no_room() -> None:
    """In its own share, and in others."""
    queue, large = Queue(100), waiting(tokens=1000, since_s=0)
    small = [waiting(tokens=100, since_s=1), waiting("other", tokens=100, since_s=2), waiting(tokens=50, since_s=3)]
    for each in (large, *small):
        queue.put(each)
    assert {taken(queue, 4.0, 500) for _ in small} == set(small)
    assert taken(queue, 4.0, 500) is None
    assert taken(queue, 4.0, 1000) is large


def test_who_has_let_as_many_tokens_pass_as_it_asks_for_lets_no_more_pass() -> None:
    queue, large = Queue(100), waiting(tokens=1000)
    queue.put(large)
    for number in range(12):
        queue.put(waiting("other", tokens=100, since_s=1.0 + number))
    elsewhere = waiting(model="n", tokens=100)
    assert [taken(queue, 2.0, 500) is not None for _ in range(12)] == [True] * 10 + [False] * 2
    queue.put(elsewhere)
    assert taken(queue, 2.0, 500) is elsewhere, "of another model"
    assert taken(queue, 2.0, 1000) is large
    assert taken(queue, 2.0, 500) is not None


def test_who_has_been_passed_for_long_lets_no_more_pass() -> None:
    queue, large = Queue(100), waiting(tokens=10_000)
    for each in (large, *(waiting(tokens=100, since_s=1.0 + number) for number in range(3))):
        queue.put(each)
    assert taken(queue, 1000.0, 500) is not None, "none had passed it before"
    assert taken(queue, 1000.0 + PATIENCE_S / 2, 500) is not None
    assert taken(queue, 1000.0 + PATIENCE_S, 500) is None
    assert taken(queue, 1000.0 + PATIENCE_S, 10_000) is large


@pytest.mark.parametrize("seed", range(30))
def test_a_request_that_fits_an_idle_worker_waits_for_bounded_work(seed: int) -> None:
    """One worker with room for `pool` tokens, and always more that waits than it has room for."""
    rng = random.Random(seed)
    pool = rng.randint(500, 5000)
    queue, now, room = Queue(10_000), 0.0, pool
    running: list[tuple[float, int]] = []
    passed: Counter[Waiting] = Counter()
    """Tokens that began before each one that waits."""
    longest_s, inside = 3.0, set[Waiting]()
    for _ in range(1500):
        while len(queue) < 30:
            tokens = rng.randint(pool // 2, pool) if rng.random() < 0.1 else rng.randint(1, pool // 20)
            each = waiting(rng.choice("ab"), tokens=tokens, since_s=now)
            queue.put(each)
            inside.add(each)
        while (found := taken(queue, now, room)) is not None:
            inside.remove(found)
            for other in inside:
                if other.since_s < found.since_s and other.tenant == found.tenant:
                    passed[other] += found.tokens
            room -= found.tokens
            running.append((now + rng.uniform(0.1, longest_s), found.tokens))
        now, tokens = min(running)
        running.remove((now, tokens))
        room += tokens
    for each, tokens in passed.items():
        assert tokens <= each.tokens + pool, f"of {each.tokens}"
    assert max(now - each.since_s for each in inside) < 30 * longest_s + PATIENCE_S


def test_a_larger_request_is_not_tried_where_a_smaller_one_found_no_room() -> None:
    queue, tried = Queue(100), list[int]()
    for number, tokens in enumerate((500, 700, 300, 300, 400, 200)):
        queue.put(waiting(tokens=tokens, since_s=number))

    def none(each: Waiting) -> bool:
        tried.append(each.tokens)
        return False

    assert not queue.serve(none, 0.0)
    assert tried == [500, 300, 200]
    other = waiting(tokens=900, since_s=9)
    other.kind = "whole"
    queue.put(other)
    assert queue.serve(lambda each: each is other, 0.0), "another kind may fit another worker"


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
                if each.place is not None:
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


@pytest.mark.parametrize("seed", range(10))
def test_a_share_is_served_by_age_and_priority_although_requests_leave(seed: int) -> None:
    rng = random.Random(seed)
    queue, inside = Queue(1000), list[Waiting]()
    for _ in range(300):
        each = waiting(since_s=rng.uniform(0, 100), priority=rng.randint(-3, 3))
        assert queue.put(each)
        inside.append(each)
        if rng.random() < 0.3:
            queue.remove(inside.pop(rng.randrange(len(inside))))
    order = [served(queue) for _ in inside]
    assert order == sorted(inside, key=lambda each: each.since_s + PRIORITY_S * each.priority)
