"""What each policy is for."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from pdlink._index import HeldKV
from pdlink.api.openai import COMPLETIONS, parse
from pdlink_proxy.fleet import PlacementRequest, wanted
from pdlink_proxy.policies.prefix import MAX_UNHEARD_KEYS
from pdlink_proxy.policies.registry import make_policy
from pdlink_proxy.table import Workers, compare
from tests.proxy.policies.fleets import pool, request, worker


def test_round_robin_takes_each_in_turn() -> None:
    policy, workers = make_policy("round_robin"), pool(9, 0, 0)
    picked = [policy.pick(request(), workers, turn).worker for turn in range(6)]
    assert picked == workers * 2


def test_least_loaded_rotates_among_equals_only() -> None:
    policy, workers = make_policy("least_loaded"), pool(1, 2, 1)
    picked = [policy.pick(request(), workers, turn).worker for turn in range(4)]
    assert picked == [workers[0], workers[2]] * 2


def test_load_is_tokens_and_not_requests() -> None:
    many, one = worker("many"), worker("one", 5000)
    for _ in range(10):
        many.sent(10, 0.0)
    assert make_policy("least_loaded").pick(request(), [many, one], 0).worker is many


def test_requests_of_others_count_as_requests_of_mean_length() -> None:
    busy = worker("busy", 100)
    busy.heard(4, None)
    assert (busy.foreign, busy.load) == (3, 400)
    busy.finished(100, 1.0, served=True)
    assert busy.load == 300


def test_a_worker_that_leaves_moves_only_its_own_prompts() -> None:
    policy, workers = make_policy("consistent_hash"), pool(*[0] * 5)
    before = {key: policy.pick(request(key), workers, 0).worker for key in range(500)}
    after = {key: policy.pick(request(key), workers[:-1], 1).worker for key in range(500)}
    assert {key for key in before if before[key] is not after[key]} == {
        key for key in before if before[key] is workers[-1]
    }


def test_a_restarted_worker_keeps_its_share_of_the_prompts() -> None:
    policy = make_policy("consistent_hash")
    before = [policy.pick(request(key), pool(0, 0, 0), 0).worker.key for key in range(50)]
    again = [worker(f"http://w{i}#e2") for i in range(3)]
    after = [policy.pick(request(key), again, 0).worker.key for key in range(50)]
    assert [key.replace("#e1", "#e2") for key in before] == after


@pytest.mark.parametrize(("name", "bound"), [("consistent_hash", 1.25), ("session", 2.0), ("prefix", 1.25)])
def test_a_popular_prompt_does_not_overload_its_worker(name: str, bound: float) -> None:
    policy, workers = make_policy(name), pool(*[0] * 4)
    for turn in range(200):
        wanted = request(1, 2, session="s")
        pick = policy.pick(wanted, workers, turn)
        policy.placed(wanted, pick.worker)
        pick.worker.sent(200, 0.0)
        mean = sum(each.load for each in workers) / len(workers)
        assert max(each.load for each in workers) <= bound * mean + 200


def test_a_session_stays_and_requests_without_one_go_where_least_is_to_do() -> None:
    policy, workers = make_policy("session"), pool(30, 20, 10)
    assert len({policy.pick(request(turn, session="s"), workers, turn).worker.key for turn in range(20)}) == 1
    assert policy.pick(request(1), workers, 0).worker is workers[2]


@pytest.mark.parametrize("name", ["prefix", "cost"])
def test_a_prompt_that_continues_goes_where_its_beginning_is(name: str) -> None:
    policy, workers = make_policy(name), pool(0, 0, 0)
    policy.placed(request(1, 2, 3), workers[1])
    pick = policy.pick(request(1, 2, 3, 4, 5), workers, 0)
    assert pick[:2] == (workers[1], 300)
    assert policy.pick(request(1, 9), workers, 0).cached_tokens == 100
    assert policy.pick(request(9, 1), workers, 0).cached_tokens == 0


def test_cost_leaves_a_cached_prefix_when_waiting_takes_longer_than_computing() -> None:
    policy, workers = make_policy("cost"), pool(0, 0)
    policy.placed(request(1, 2, 3), workers[0])
    workers[0].sent(250, 0.0)
    assert policy.pick(request(1, 2, 3), workers, 0).worker is workers[0]
    workers[0].sent(100, 0.0)
    assert policy.pick(request(1, 2, 3), workers, 0)[:2] == (workers[1], 0)


@pytest.mark.parametrize("many", [False, True])
def test_cost_weighs_kv_below_the_device_by_what_loading_it_takes(many: bool) -> None:
    policy, workers = make_policy("cost"), pool(*[0] * (68 if many else 3))
    below, device, *_ = workers
    asked = request(1, 2, 3, held=HeldKV([(below.number, 300, 60.0), (device.number, 250, 0.0)]))
    assert policy.pick(asked, workers, 0)[:2] == (device, 250)
    asked.held = HeldKV([(below.number, 300, 40.0), (device.number, 250, 0.0)])
    assert policy.pick(asked, workers, 0)[:2] == (below, 300)


class _Cache:
    """Of one worker: blocks of 16 tokens, the least recent goes first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[object, None] = OrderedDict()
        self.pushed_out = self.computed = 0

    def held(self, blocks: list[object]) -> int:
        """Leading blocks that are there."""
        return next((at for at, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def use(self, blocks: list[object]) -> None:
        self.computed += len(blocks) - self.held(blocks)
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)
            self.pushed_out += 1


@pytest.mark.parametrize(("num_workers", "system"), [(2, 0), (2, 10), (2, 32), (3, 32), (68, 10)])
@pytest.mark.parametrize("seed", range(4))
def test_cost_spreads_sessions_that_come_one_after_the_other_so_that_nothing_is_pushed_out(
    num_workers: int, system: int, seed: int
) -> None:
    """Each worker has room for its equal part of the sessions, and for one more."""
    rng = random.Random(seed)
    policy, workers = make_policy("cost"), pool(*[0] * num_workers)
    first, more, turns, per_worker = rng.randint(8, 20), rng.randint(1, 4), 5, rng.randint(3, 5)
    num_blocks = system + (per_worker + 1) * (first + turns * more)
    caches = {each.key: _Cache(num_blocks) for each in workers}
    states = Workers.of(workers)
    for each in workers:
        each.pool_tokens = 16 * num_blocks
    sessions: list[list[object]] = [
        [*(("system", at) for at in range(system)), *((number, at) for at in range(first))]
        for number in range(num_workers * per_worker)
    ]
    turn = 0
    for _ in range(turns):
        for number, blocks in enumerate(sessions):
            held = [(each.number, 16.0 * caches[each.key].held(blocks), 0.0) for each in workers]
            asked = PlacementRequest("m", 16 * len(blocks), held=HeldKV(held), chain=())
            picked = policy.pick(asked, states, turn).worker
            policy.placed(asked, picked)
            caches[picked.key].use(blocks)
            blocks += [(number, len(blocks) + at) for at in range(more)]
            turn += 1
    assert sum(cache.pushed_out for cache in caches.values()) == 0
    least = num_workers * (system + per_worker * (first + (turns - 1) * more))
    assert sum(cache.computed for cache in caches.values()) <= least


def test_cost_leaves_a_worker_that_computed_much_only_for_one_with_no_more_to_do() -> None:
    policy, workers = make_policy("cost"), pool(0, 0)
    full, other = workers
    full.pool_tokens = other.pool_tokens = 1000
    for number in range(10):
        policy.placed(request(number), full)
    fresh = request(1000, 5001, 5002, 5003)
    policy.placed(request(1000), full)
    assert policy.pick(fresh, workers, 0).worker is other, "although it has none of it"
    other.sent(1, 0.0)
    assert policy.pick(fresh, workers, 0).worker is full
    other.finished(1, 1.0, served=True)
    long = request(*range(2000, 2030), held=HeldKV([(full.number, 2900, 0.0)]))
    assert policy.pick(long, workers, 0).worker is full, "most of a long session is there"


def test_what_was_computed_long_ago_counts_no_more() -> None:
    policy, workers = make_policy("cost"), pool(0, 0)
    one, other = workers
    for each in workers:
        each.pool_tokens = 1000
    policy.pick(request(0), workers, 0)
    for number in range(10):
        policy.placed(request(number), one)
    taken = policy.sent_to.taken  # type: ignore[attr-defined]
    assert (taken(one) > 0.6, taken(other)) == (True, 0)
    for number in range(50_000):
        policy.placed(request(100 + number), workers[number % 2])
    assert taken(one) == pytest.approx(taken(other), rel=0.2)
    assert 0.5 < taken(one) < 2
    assert max(one.taken, other.taken) < 1e4, "far from the largest number"


def test_cost_gives_a_slow_worker_less() -> None:
    workers = pool(0, 0, 0)
    for each, seconds in zip(workers, (1.0, 1.05, 4.0), strict=True):
        each.sent(1000, 0.0)
        each.finished(1000, seconds, served=True)
    compare(workers)
    assert workers[2].tokens_per_s == 250
    assert workers[0].slowness == workers[1].slowness or workers[0].slowness < 1
    assert workers[2].slowness > 2
    policy = make_policy("cost")
    for turn in range(300):
        policy.pick(request(), workers, turn).worker.sent(100, 0.0)
    assert workers[2].requests < 60


def test_time_without_work_does_not_make_a_worker_slow() -> None:
    each = worker("w")
    for start in (0.0, 100.0, 200.0):
        each.sent(1000, start)
        each.finished(1000, start + 1, served=True)
    assert each.tokens_per_s == pytest.approx(1000)


@pytest.mark.parametrize("name", ["cost", "prefix"])
def test_a_worker_lacks_what_it_was_not_sent_before(name: str) -> None:
    policy, (one, other) = make_policy(name), pool(0, 0)
    compare([one, other])
    assert [policy.placed(request(1, 2), one), policy.placed(request(1, 2, 3), one)] == [200, 100]
    assert policy.placed(request(1, 2, 3), other) == 300
    assert policy.placed(PlacementRequest("m", 300, 50), one) == 0, "nobody knows"


def test_prompts_of_a_single_worker_count_as_computed_whether_their_keys_were_asked_for_or_not() -> None:
    """Only those of short ones are known without asking."""
    taken = []
    for chain in ((), None):
        policy, (only,) = make_policy("cost"), pool(0)
        policy.placed(PlacementRequest("m", 300, chain=chain, held=HeldKV([(only.number, 100, 0.0)])), only)
        taken.append(policy.sent_to.taken(only))  # type: ignore[attr-defined]
    assert taken[0] == taken[1] > 0


def keys_of(prompt: bytes, **more: str) -> list[object]:
    return list(PlacementRequest(more.pop("model", "m"), 1, prompt=prompt, **more).keys)  # type: ignore[arg-type]


def num_tokens_of(prompt: bytes) -> int:
    return wanted(parse(COMPLETIONS, b'{"model": "m", "prompt": %b}' % prompt), None).num_tokens


def test_prompts_share_the_keys_of_the_beginning_they_share() -> None:
    text = b'"' + b"x" * 10_000
    assert len(keys_of(text + b'"')) == 4
    assert keys_of(text + b'"')[:4] == keys_of(text + b" and more" * 1000 + b'"')[:4]
    assert not set(keys_of(text)) & set(keys_of(text.replace(b"x", b"y")))
    ids = ",".join(map(str, range(2000)))
    assert keys_of(f"[{ids}]".encode()) == keys_of(f"[ {ids.replace(',', ', ')}, 7]".encode())[:3]
    for more in ({"salt": "s"}, {"model": "n"}):
        assert not set(keys_of(text)) & set(keys_of(text, **more)), "others cannot see what is here"


def test_a_prompt_that_is_none_has_no_keys() -> None:
    for prompt in (b"[1, -1]", b'[1, "a"]', b'["a", "b"]', b"[[1], [2]]", b"[]", b'""', b"[99999999999]"):
        assert keys_of(prompt) == []
        assert num_tokens_of(prompt) >= 1
    assert num_tokens_of(b"[5,6, 7]") == 3


@pytest.mark.parametrize("name", ["prefix", "cost"])
def test_what_a_worker_says_counts_more_than_what_was_sent_to_it(name: str) -> None:
    policy, (quiet, speaking) = make_policy(name), pool(0, 0)
    speaking.publishes = True
    asked = request(1, 2, 3, held=HeldKV([(speaking.number, 300, 0.0)]))
    assert policy.pick(asked, [quiet, speaking], 0)[:2] == (speaking, 300)
    for key in range(1000, 1000 + 2 * MAX_UNHEARD_KEYS):  # so the first is long computed, and gone by its own account
        policy.placed(request(key), speaking)
    policy.placed(request(1, 2, 3), quiet)
    assert policy.pick(request(1, 2, 3), [quiet, speaking], 0)[:2] == (quiet, 300)
    assert policy.pick(request(1000), [quiet, speaking], 0).cached_tokens == 0


def test_what_was_sent_to_a_worker_counts_until_it_can_have_said_so() -> None:
    policy, (other, speaking) = make_policy("cost"), pool(0, 0)
    speaking.publishes = True
    policy.placed(request(1, 2, 3), speaking)
    assert policy.pick(request(1, 2, 3), [other, speaking], 0)[:2] == (speaking, 300)
