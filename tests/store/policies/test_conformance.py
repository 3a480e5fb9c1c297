"""What every policy does, whatever it prefers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdlink.store.eviction import Adaptive, EvictionPolicy, Lru, S3Fifo

from .harness import Cache, key

POLICIES = (Adaptive, Lru, S3Fifo)
Makes = Callable[[], EvictionPolicy]
every_policy = pytest.mark.parametrize("make", POLICIES)


class Machine(RuleBasedStateMachine):
    """Any order of the verbs, with sizes and leases; `Cache` checks each answer."""

    @initialize(make=st.sampled_from(POLICIES))
    def begin(self, make: Makes) -> None:
        self.cache = Cache(make(), 24)

    @rule(number=st.integers(0, 15), nbytes=st.integers(1, 8))
    def put(self, number: int, nbytes: int) -> None:
        self.cache.put(key(number), nbytes)

    @rule(number=st.integers(0, 15))
    def touch(self, number: int) -> None:
        self.cache.touch(key(number))

    @rule(number=st.integers(0, 15))
    def remove(self, number: int) -> None:
        self.cache.remove(key(number))

    @rule(numbers=st.sets(st.integers(0, 15), max_size=6))
    def lease(self, numbers: set[int]) -> None:
        self.cache.leased = {key(number) for number in numbers}

    @rule()
    def evict(self) -> None:
        self.cache.evict()

    @invariant()
    def fits(self) -> None:
        if hasattr(self, "cache"):
            assert sum(self.cache.resident.values()) <= self.cache.capacity_nbytes


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@every_policy
def test_all_keys_leave_in_the_end_and_the_policy_is_empty(make: Makes) -> None:
    cache = Cache(make(), 50)
    for number in range(200):
        cache.put(key(number % 70))
    while cache.evict() is not None:
        pass
    assert not cache.resident
    assert cache.put(key(1))


@every_policy
def test_nothing_is_evicted_while_everything_is_leased(make: Makes) -> None:
    cache = Cache(make(), 5)
    for number in range(5):
        cache.put(key(number))
    cache.leased = set(cache.resident)
    assert cache.evict() is None
    assert not cache.put(key(9))
    assert len(cache.policy) == 5


@every_policy
def test_the_head_of_a_prefix_outlives_its_tail(make: Makes) -> None:
    """Chunks of one prompt, inserted and touched suffix first: what is left of each is a prefix of it."""
    cache = Cache(make(), 64)
    prompts = [[key(prompt * 100 + chunk) for chunk in range(8)] for prompt in range(8)]
    for _ in range(2):
        for prompt in prompts:
            for chunk in reversed(prompt):
                cache.put(chunk)
    for _ in range(40):
        cache.evict()
    left = [[chunk in cache.resident for chunk in prompt] for prompt in prompts]
    assert all(chunks == sorted(chunks, reverse=True) for chunks in left)


@every_policy
def test_what_a_policy_remembers_of_evicted_keys_is_bounded_by_what_it_holds(make: Makes) -> None:
    policy = make()
    cache = Cache(policy, 64)
    for number in range(3000):
        cache.put(key(number))
    assert _num_keys(policy) <= 24 * 64


def _num_keys(thing: object, seen: set[int] | None = None) -> int:
    """Keys that an object holds, in whatever containers and objects of ours."""
    seen = set() if seen is None else seen
    if isinstance(thing, bytes):
        return 1
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return sum(_num_keys(part, seen) for pair in thing.items() for part in pair)
    if isinstance(thing, (list, tuple, set, frozenset)):
        return sum(_num_keys(part, seen) for part in thing)
    fields = getattr(thing, "__dict__", {})
    return sum(_num_keys(part, seen) for part in fields.values())


@every_policy
def test_an_eviction_looks_at_few_keys_however_many_there_are(make: Makes) -> None:
    """Amortised: hits make some policies go over their keys again, but not more often than there were hits."""
    seed = 7
    looks = {}
    for size in (500, 4000):
        draw, cache = random.Random(seed), Cache(make(), size)
        cache.check = lambda: None  # type: ignore[method-assign]
        looks[size] = 0

        def look(_: bytes, size: int = size) -> bool:
            looks[size] += 1
            return True

        for number in range(size):
            cache.policy.insert(key(number), 1)
        for number in range(size, 3 * size):
            cache.policy.touch(key(draw.randrange(number)))
            assert cache.policy.evict(look) is not None
            cache.policy.insert(key(number), 1)
    print(f"seed {seed}, looks per eviction: {looks[500] / 1000:.2f}, {looks[4000] / 8000:.2f}")
    assert looks[4000] / 8000 < 8
