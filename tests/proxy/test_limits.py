"""Requests and tokens that one key may ask in a minute."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdlink.config.proxy import RateLimit
from pdlink_proxy.limits import MAX_KEYS, RateLimits
from tests.proxy.fakes import FakeWorker, proxy_of


def limits(default: RateLimit | None = None, **by_key: RateLimit) -> RateLimits:
    return RateLimits(default or RateLimit(), by_key)


def test_a_key_gets_its_requests_at_once_and_then_one_after_the_other() -> None:
    found = limits(RateLimit(requests=60))
    assert [found.take("a", 1, 0.0) for _ in range(60)] == [0.0] * 60
    assert found.take("a", 1, 0.0) == pytest.approx(1.0)
    assert found.take("b", 1, 0.0) == 0.0
    assert found.take("a", 1, 0.5) == pytest.approx(0.5)
    assert found.take("a", 1, 1.0) == 0.0


def test_a_refused_request_takes_nothing_of_either_bucket() -> None:
    found = limits(RateLimit(requests=1, tokens=100))
    assert found.take("a", 100, 0.0) == 0.0
    assert found.take("a", 100, 30.0) == pytest.approx(30.0)
    assert found.take("a", 100, 60.0) == 0.0


def test_a_request_larger_than_the_bucket_waits_for_a_full_one_and_leaves_it_in_debt() -> None:
    found = limits(RateLimit(tokens=60))
    assert found.take("a", 600, 0.0) == 0.0
    assert found.take("a", 1, 0.0) == pytest.approx(541.0)
    assert found.take("a", 1, 541.0) == 0.0


def test_the_debt_of_one_request_is_paid_in_an_hour() -> None:
    found = limits(RateLimit(tokens=60))
    assert found.take("a", 10**30, 0.0) == 0.0
    assert found.take("a", 1, 0.0) == pytest.approx(3541.0)


def test_a_key_of_its_own_has_its_own_limit_and_no_limit_refuses_nobody() -> None:
    found = limits(RateLimit(requests=1), rich=RateLimit(requests=0))
    assert [found.take("rich", 10**9, 0.0) for _ in range(100)] == [0.0] * 100
    assert found.take("poor", 1, 0.0) == 0.0
    assert found.take("poor", 1, 0.0) == pytest.approx(60.0)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_gets_more_than_the_rate_and_one_burst_and_who_waits_as_told_is_served(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    found, now, taken, largest = limits(RateLimit(tokens=600)), 0.0, 0, 0
    for _ in range(300):
        tokens = rng.randint(1, 300)
        wait_s = found.take("a", tokens, now)
        if wait_s:
            now += wait_s
            assert found.take("a", tokens, now) == 0.0
        taken, largest = taken + tokens, max(largest, tokens)
        assert taken <= 600 + 10 * now + 1e-3
        now += rng.random()


def test_keys_that_are_remembered_are_bounded() -> None:
    found = limits(RateLimit(requests=1))
    for number in range(MAX_KEYS + 10):
        found.take(str(number), 1, 0.0)
    assert len(found._buckets) == MAX_KEYS


async def test_a_client_over_its_limit_is_told_when_to_come_again(prefill: FakeWorker, decode: FakeWorker) -> None:
    limit: dict[str, Any] = {"rate_limit": {"requests": 1}, "rate_limits": {"rich": {"tokens": 10**6}}}
    async with proxy_of([prefill], [decode], **limit) as proxy:
        body = {"model": "m", "prompt": "x"}
        for key, statuses in (("poor", [200, 429]), ("rich", [200, 200])):
            for status in statuses:
                headers = {"Authorization": f"Bearer {key}"}
                async with proxy.client.post(f"{proxy.url}/v1/completions", json=body, headers=headers) as response:
                    assert response.status == status
                    if status == 429:
                        assert 1 <= int(response.headers["Retry-After"]) <= 60
                        error = (await response.json())["error"]
                        assert (error["code"], error["type"]) == ("rate_limited", "rate_limit_error")
                        assert "poor" not in str(error)
        assert len(decode.received) == 3
        async with proxy.client.post(f"{proxy.url}/tokenize", json=body, headers={"x-api-key": "poor"}) as response:
            assert response.status == 429
