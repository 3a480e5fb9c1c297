from __future__ import annotations

import random

import pytest

from pdlink.protocol.leases import LeaseTable


def test_lease_ends_after_silence() -> None:
    table = LeaseTable(10.0, 100.0)
    table.grant("t", 0.0, "p")
    assert table.expired(9.9) == []
    assert table.expired(10.0) == [("t", "lease_expired")]


def test_one_sign_of_life_renews_every_lease_of_the_holder() -> None:
    table = LeaseTable(10.0, 100.0)
    for key in ("a", "b"):
        table.grant(key, 0.0, "p")
    table.grant("other", 0.0, "q")
    table.heard("p", 8.0)
    assert table.expired(17.9) == [("other", "lease_expired")]
    assert {key for key, _ in table.expired(18.0)} == {"a", "b", "other"}


def test_live_lease_at_the_head_does_not_hide_expired_ones_behind_it() -> None:
    """vllm#58222: the reaper stopped at the first lease that was still alive."""
    table = LeaseTable(10.0, 1000.0)
    table.grant("kept-alive", 0.0, "p")
    for index in range(25):
        table.grant(f"dead-{index}", 0.0, "q")
    table.heard("p", 500.0)
    assert len(table.expired(505.0)) == 25


def test_lease_ends_at_its_limit_however_alive_the_holder_is() -> None:
    table = LeaseTable(10.0, 100.0)
    table.grant("t", 0.0, "p")
    table.heard("p", 99.0)
    assert table.expired(100.0) == [("t", "deadline")]


def test_interest_shown_later_counts_from_then() -> None:
    table = LeaseTable(10.0, 100.0)
    table.grant("t", 0.0)
    table.assign("t", "p", 9.0)
    assert table.expired(18.9) == []
    table.drop("t")
    assert table.expired(50.0) == []
    assert len(table) == 0


def test_clock_that_jumps_back_renews_nothing() -> None:
    table = LeaseTable(10.0, 100.0)
    table.grant("t", 50.0, "p")
    table.heard("p", 55.0)
    table.heard("p", 1.0)
    assert table.expired(64.9) == []
    assert table.expired(65.0) == [("t", "lease_expired")]


@pytest.mark.parametrize("seed", range(20))
def test_ended_leases_are_those_that_a_look_at_every_single_one_finds(seed: int) -> None:
    """`expired` looks at few of them; this looks at all, by the rule that the words say."""
    random_, table, now = random.Random(seed), LeaseTable(10.0, 60.0), 0.0
    leases: dict[str, tuple[str, float, float]] = {}
    heard: dict[str, float] = {}
    for _ in range(400):
        now += random_.choice((0.0, 0.0, 1.0, 4.0))
        key, holder = f"t{random_.randrange(30)}", random_.choice(("", "p", "q"))
        match random_.choice(("grant", "assign", "heard", "heard", "drop", "forget")):
            case "grant":
                table.grant(key, now, holder)
                leases[key] = (holder, now, now + 60.0)
            case "assign":
                table.assign(key, holder, now)
                if key in leases:
                    leases[key] = (holder, now, leases[key][2])
            case "heard" if holder:
                table.heard(holder, now)
                heard[holder] = now
            case "drop":
                table.drop(key)
                leases.pop(key, None)
            case "forget":
                table.forget(holder)
                heard.pop(holder, None)
        expected = {
            name: "deadline" if now >= limit_s else "lease_expired"
            for name, (whose, from_s, limit_s) in leases.items()
            if now >= min(limit_s, max(from_s, heard.get(whose, from_s)) + 10.0)
        }
        assert dict(table.expired(now)) == expected
        assert len(table) == len(leases)
