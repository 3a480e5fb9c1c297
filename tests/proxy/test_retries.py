"""How many requests may be tried again."""

from __future__ import annotations

from pdlink_proxy.retries import MOST, PER_S, RATIO, RetryBudget


def spent(budget: RetryBudget, now: float) -> int:
    count = 0
    while budget.spend(now):
        count += 1
    return count


def test_all_requests_of_a_worker_that_dies_can_be_tried_again_at_once() -> None:
    assert spent(RetryBudget(), 0.0) == MOST


def test_a_fleet_that_fails_gets_a_fifth_more_requests_and_no_more() -> None:
    budget = RetryBudget()
    spent(budget, 0.0)
    budget.num_new = 1000
    assert spent(budget, 0.0) in (RATIO * 1000 - 1, RATIO * 1000)


def test_a_proxy_with_few_requests_may_try_some_again_each_second() -> None:
    budget = RetryBudget()
    spent(budget, 0.0)
    assert spent(budget, 1.0) == PER_S
    assert spent(budget, 1000.0) == MOST
