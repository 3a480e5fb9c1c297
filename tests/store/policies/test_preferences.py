"""What each policy prefers: LRU against a plain model, the others the trait that they are known for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.store.eviction import SAMPLED, Adaptive, EvictionPolicy, Key, Lru, S3Fifo

from .harness import Cache, key


class Mru(Lru):
    """Most recently used first: good where LRU is bad, and bad where it is good."""

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        victim = next(filter(may_evict, reversed(list(self._keys))), None)
        if victim is not None:
            self._keys.pop(victim)
        return victim


@given(steps=st.lists(st.tuples(st.sampled_from(["use", "evict", "remove"]), st.integers(0, 9)), max_size=120))
def test_lru_takes_the_key_whose_use_is_longest_ago(steps: list[tuple[str, int]]) -> None:
    policy, used = Lru(), dict[Key, int]()
    for now, (verb, number) in enumerate(steps):
        one = key(number)
        if verb == "remove":
            policy.remove(one)
            used.pop(one, None)
        elif verb == "evict":
            expected = min((other for other in used if other != one), key=used.__getitem__, default=None)
            assert policy.evict(lambda other, one=one: other != one) == expected  # type: ignore[misc]
            if expected is not None:
                del used[expected]
        else:
            (policy.touch(one) if one in used else policy.insert(one, 1))
            used[one] = now


@pytest.mark.parametrize("make", [Adaptive, Lru, S3Fifo])
def test_keys_in_use_outlive_keys_that_came_once(make: Callable[[], EvictionPolicy]) -> None:
    cache = Cache(make(), 100)
    for number in range(1000):
        cache.put(key(number % 20))
        cache.put(key(1000 + number))
    assert sum(key(number) in cache.resident for number in range(20)) == 20


def test_a_scan_leaves_what_was_used_often() -> None:
    cache = Cache(S3Fifo(), 100)
    for number in range(2000):
        cache.put(key(number % 50))
    for number in range(400):
        cache.put(key(1000 + number))
    assert sum(key(number) in cache.resident for number in range(50)) == 50


def test_s3fifo_takes_a_key_back_into_the_main_queue_that_left_on_probation() -> None:
    cache = Cache(S3Fifo(), 10)
    for number in range(11):
        cache.put(key(number))
    assert key(0) not in cache.resident
    cache.put(key(0))
    for number in range(100, 140):
        cache.put(key(number))
    assert key(0) in cache.resident


def test_adaptive_changes_its_leader_with_the_work() -> None:
    """Loops over more than fits, where keeping the newest never hits, then keys that come back at once."""
    seed = 3
    print("seed", seed)
    draw = random.Random(seed)
    loop = [key(number % 1500) for number in range(60_000)]
    recent = [key(10_000 + index // 4 - draw.randrange(600)) for index in range(100_000)]
    lru, mru, hits = (_hits(policy, loop, recent) for policy in (Lru(), Mru(), Adaptive((Lru, Mru))))
    assert lru[0] < 0.1 * mru[0], "the work does not tell the policies apart"
    assert mru[1] < 0.5 * lru[1], "the work does not tell the policies apart"
    assert hits[0] > 0.8 * mru[0]
    assert hits[1] > 0.8 * lru[1]


def test_adaptive_asks_its_policies_about_a_sample_of_the_keys_only() -> None:
    """What every key costs is the leading policy and a look at whether the key is sampled."""
    calls = Counter[str]()

    class Counting(Lru):
        def insert(self, key: Key, nbytes: int) -> None:
            calls["insert"] += 1
            super().insert(key, nbytes)

        def touch(self, key: Key) -> None:
            calls["touch"] += 1
            super().touch(key)

    policy = Adaptive([Counting] * 4)
    for number in range(4000):
        policy.insert(key(number), 1)
        policy.touch(key(number))
    most = 4000 * (1 + 4 / SAMPLED * 1.2)
    assert calls["insert"] < most
    assert calls["touch"] < most


def _hits(policy: EvictionPolicy, *phases: list[Key]) -> list[int]:
    cache = Cache(policy, 1000)
    cache.check = lambda: None  # type: ignore[method-assign]
    hits = [0] * len(phases)
    for index, phase in enumerate(phases):
        for one in phase:
            hits[index] += one in cache.resident
            cache.put(one)
    return hits
