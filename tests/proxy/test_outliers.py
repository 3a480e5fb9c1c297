"""Workers that are worse than their peers get no requests for a while."""

from __future__ import annotations

import random

import pytest

from pdlink_proxy import pools
from pdlink_proxy.outliers import FIRST_PAUSE_S, LONGEST_PAUSE_S, MIN_LEGS, SLOW_BEYOND, Outlier, leave_out
from tests.proxy.fakes import FakeWorker, proxy_of, until

MOST = 0.34


def legs(outlier: Outlier, number: int, *, failed: int = 0, pace: float = 1.0) -> None:
    """So many legs end; of every ten `failed` do not end well."""
    for index in range(number):
        outlier.end(0.0, probe=outlier.begin(), failed=index % 10 < failed, pace=pace)


def pool(number: int) -> list[Outlier]:
    found = [Outlier() for _ in range(number)]
    for each in found:
        legs(each, 30)
    return found


@pytest.mark.parametrize("number", [2, 3, 10, 40])
@pytest.mark.parametrize(("failed", "pace"), [(5, 1.0), (0, 2 * SLOW_BEYOND)])
def test_one_that_fails_or_is_slow_far_beyond_its_peers_is_left_out(number: int, failed: int, pace: float) -> None:
    found = pool(number)
    legs(found[0], 40, failed=failed, pace=pace)
    leave_out(found, 100.0, MOST)
    assert [each.out for each in found] == [True] + [False] * (number - 1)
    assert ("fail" if failed else "times as long") in found[0].why


def test_nobody_is_left_out_for_what_all_do() -> None:
    found = [Outlier() for _ in range(5)]
    for each in found:
        legs(each, 40, failed=6, pace=50.0)
    leave_out(found, 100.0, MOST)
    assert not any(each.out for each in found)


def test_a_few_legs_prove_nothing_and_a_lone_worker_has_no_peers() -> None:
    found = pool(3)
    found[0] = Outlier()
    legs(found[0], MIN_LEGS - 1, failed=10, pace=100.0)
    leave_out(found, 100.0, MOST)
    assert not found[0].out
    alone = [Outlier()]
    legs(alone[0], 40, failed=10)
    leave_out(alone, 100.0, MOST)
    assert not alone[0].out


@pytest.mark.parametrize(("number", "bad", "out"), [(3, 1, 1), (4, 2, 1), (10, 4, 3), (30, 12, 10)])
def test_never_more_than_a_share_of_the_pool_and_the_worst_first(number: int, bad: int, out: int) -> None:
    found = pool(number)
    for index in range(bad):
        legs(found[index], 60, pace=SLOW_BEYOND * (index + 2))
    for _ in range(3):
        leave_out(found, 100.0, MOST)
    assert [index for index, each in enumerate(found) if each.out] == list(range(bad - out, bad))
    found = pool(number)
    legs(found[0], 60, failed=9)
    leave_out(found, 100.0, 0.0)
    assert not found[0].out, "off"


def test_one_leg_at_a_time_finds_out_and_pauses_grow() -> None:
    found, now_s, pauses = pool(3), 100.0, []
    legs(found[0], 40, failed=9)
    leave_out(found, now_s, MOST)
    one = found[0]
    for _ in range(9):
        began_s = now_s
        while not one.allows(now_s):
            now_s += 0.5
        pauses.append(now_s - began_s)
        assert one.begin()
        assert not one.allows(now_s), "one at a time"
        one.end(now_s, probe=True, failed=True)
    assert pauses == [min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) for number in range(9)]
    now_s += LONGEST_PAUSE_S
    probe = one.begin()
    one.drop(now_s, probe=probe)
    assert one.allows(now_s), "a client that leaves proves nothing"
    one.end(now_s, probe=one.begin(), failed=False, pace=2 * one.limit)
    assert not one.allows(now_s), "still as slow"
    now_s += LONGEST_PAUSE_S
    one.end(now_s, probe=one.begin(), failed=False, pace=1.0)
    assert one.allows(now_s)
    assert not one.out
    leave_out(found, now_s, MOST)
    assert not one.out, "what was before is forgotten"


def test_a_leg_given_up_after_long_counts_as_slow() -> None:
    found = pool(3)
    leave_out(found, 0.0, MOST)
    for _ in range(20):
        found[0].drop(0.0, probe=found[0].begin(), at_least=0.5)
    leave_out(found, 0.0, MOST)
    assert not found[0].out, "its clients left early"
    for _ in range(40):
        found[0].drop(0.0, probe=found[0].begin(), at_least=100.0)
    leave_out(found, 0.0, MOST)
    assert found[0].out


async def test_a_worker_that_fails_every_second_leg_gets_no_more(
    prefill: FakeWorker, decodes: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, whose legs end with those of decode, is not blamed."""
    monkeypatch.setattr(pools, "_COMPARE_S", 0.01)
    rng = random.Random(7)
    bad, good = decodes
    answer = bad.answer

    async def moody(*args: object) -> object:
        bad.fail_with = 503 if rng.random() < 0.5 else None
        return await answer(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bad, "answer", moody)
    async with proxy_of([prefill], decodes, policy="round_robin") as proxy:
        state = next(worker for worker in proxy.router.services.pools.all if worker.url == bad.url)
        for _ in range(200):
            async with proxy.post() as response:
                assert response.status == 200
            if state.outlier.out:
                break
        assert state.outlier.out, "seed 7"
        assert proxy.router.services.pools.usable(state.side) == [
            worker for worker in proxy.router.services.pools.all if worker.url == good.url
        ]
        assert "fail" in state.describe()["left_out"]
        await proxy.client.get(f"{proxy.url}/metrics")
        assert proxy.counted("worker_left_out", worker=bad.url, leg="decode") == 1
        assert all(
            worker.outlier.failed == 0 for worker in proxy.router.services.pools.all if worker.url == prefill.url
        )
        bad_legs = len(bad.received)
        for _ in range(10):
            async with proxy.post() as response:
                assert response.status == 200
        assert len(bad.received) == bad_legs
        monkeypatch.setattr(bad, "answer", answer)
        bad.fail_with = None
        state.outlier._until_s = 0.0
        await until(lambda: state in proxy.router.services.pools.usable(state.side), "the end of the pause")
        for _ in range(2):
            async with proxy.post() as response:
                assert response.status == 200
        assert not state.outlier.out
