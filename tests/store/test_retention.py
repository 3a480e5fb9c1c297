"""What requests and settings say about how long KV is kept, through the store, its tiers and the front door."""

from __future__ import annotations

import time
from unittest.mock import patch

import msgspec
import pytest

from pdlink import Retention
from pdlink.serve.openai import CompletionRequest
from pdlink.store.slots import USUAL
from tests.waiting import WAIT_S, until

from .stubs import StubTier
from .test_cache import CHUNK, PROMPT, RECORD_NBYTES, Pages

SLOT_NBYTES = -(-RECORD_NBYTES // 4096) * 4096
OTHER = list(range(5000, 5100))


def test_kv_is_not_found_after_its_time_in_memory_nor_in_a_tier() -> None:
    tier = StubTier()
    with Pages(tiers=[tier], ttl_s=100.0) as pages:
        pages.stored()
        assert pages.cache.flush(WAIT_S)
    later = time.time() + 100.0
    with Pages(tiers=[tier]) as pages:
        assert pages.cache.retrieve(PROMPT, pages.table(1)) == 96, "readers need no setting"
        pages.cache.clear(places=["memory"])
        with patch.object(time, "time", lambda: later):
            assert pages.cache.retrieve(PROMPT, pages.table(1)) == 0


def test_a_request_may_ask_for_less_time_than_the_setting() -> None:
    with Pages(ttl_s=100.0) as pages:
        pages.stored(retention=Retention(ttl_s=5.0))
        pages.stored(OTHER, retention=Retention(ttl_s=1000.0))
        expires_s = {record.expires_s - time.monotonic() for record in pages.cache._store._catalog._records.values()}
        assert 0 < min(expires_s) <= 5 < 90 < max(expires_s) <= 100


def test_what_is_left_of_its_time_goes_with_a_record_from_tier_to_tier() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored(retention=Retention(ttl_s=50.0))
        assert pages.cache.flush(WAIT_S)
        pages.cache.clear(places=["memory"])
        assert pages.cache.retrieve(PROMPT, pages.table(1)) == 96
        left_s = [record.expires_s - time.monotonic() for record in pages.cache._store._catalog._records.values()]
        assert all(0 < left <= 50 for left in left_s)


def test_what_memory_forgets_while_it_is_being_written_is_found_below() -> None:
    """Its time went with its key, and the tier got a record that had expired."""
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        tier.going.clear()
        pages.stored()
        assert tier.stalled.wait(WAIT_S)
        pages.cache.clear(places=["memory"])
        tier.going.set()
        assert pages.cache.flush(WAIT_S)
        assert pages.cache.retrieve(PROMPT, pages.table(1)) == 96


def test_two_tiers_get_the_same_header() -> None:
    first, second = StubTier(), StubTier()
    with Pages(tiers=[first, second], ttl_s=100.0) as pages:
        pages.stored()
        assert pages.cache.flush(WAIT_S)
        assert first.records == second.records
    third = StubTier()
    with Pages(tiers=[third, first]) as pages:
        assert pages.cache.retrieve(PROMPT, pages.table(1)) == 96
        assert pages.cache.move(PROMPT, "memory", "stub") == 96
        assert third.records == first.records, "also when it is written again"


def test_the_keeper_drops_what_is_over() -> None:
    with Pages() as pages:
        pages.stored(retention=Retention(ttl_s=0.01))
        until(lambda: pages.cache._store.gauges()["used"] == 0, "it is dropped")
        assert not pages.cache.lookup(PROMPT).num_tokens


def test_one_salt_cannot_push_out_the_kv_of_others() -> None:
    with Pages(nbytes=20 * SLOT_NBYTES, salt_quota_nbytes=7 * RECORD_NBYTES) as pages:
        pages.stored(salt="a")
        for seed in range(5):
            pages.stored([seed] * 100, salt="noisy")
        assert pages.cache.lookup(PROMPT, salt="a").num_tokens == 96
        kept = sum(pages.cache.lookup([seed] * 100, salt="noisy").num_tokens // CHUNK for seed in range(5))
        assert kept == 7


def test_what_a_salt_brings_from_a_tier_counts_against_its_quota() -> None:
    tier = StubTier()
    with Pages(tiers=[tier]) as pages:
        pages.stored(salt="a")
        assert pages.cache.flush(WAIT_S)
    with Pages(tiers=[tier], salt_quota_nbytes=2 * RECORD_NBYTES) as pages:
        assert pages.cache.retrieve(PROMPT, pages.table(1), salt="a") == 2 * CHUNK


def test_a_prompt_of_high_priority_stays_while_others_go() -> None:
    with Pages(nbytes=14 * SLOT_NBYTES) as pages:
        pages.stored(retention=Retention(priority=90))
        for seed in range(5):
            pages.stored([seed] * 100)
        assert pages.cache.lookup(PROMPT).num_tokens == 96


def request(**body: object) -> CompletionRequest:
    return msgspec.json.decode(msgspec.json.encode({"model": "m", "prompt": "p", **body}), type=CompletionRequest)


def test_a_request_says_how_its_kv_is_kept() -> None:
    assert request().retention(None) == USUAL
    asked = request(kv_retention={"priority": 80, "duration_s": 60, "ttl_s": 600}).retention(None)
    assert asked == Retention(priority=80, priority_s=60.0, ttl_s=600.0)


def test_requests_less_urgent_than_the_limit_are_not_stored() -> None:
    assert request(priority=3).retention(2) is None
    assert request(priority=2).retention(2) == request(priority=-5).retention(2) == USUAL
    assert request(priority=3).retention(None) == USUAL


@pytest.mark.parametrize(
    "wrong", [{"priority": 101}, {"priority": -1}, {"ttl_s": 0}, {"duration_s": 1e9}, {"ttl_s": "x"}]
)
def test_retention_outside_its_limits_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        request(kv_retention=wrong)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_the_time_to_live_survives_a_step_of_the_wall_clock(step_s: float) -> None:
    """Set by NTP after the start, or after a suspension: what is stored from then on lives as long as it should."""
    tier, real = StubTier(), time.time
    with Pages(tiers=[tier], ttl_s=100.0) as pages, patch.object(time, "time", lambda: real() + step_s):
        pages.stored()
        assert pages.cache.flush(WAIT_S)
        pages.cache.clear(places=["memory"])
        assert pages.cache.retrieve(PROMPT, pages.table(1)) == 96
        pages.cache.clear(places=["memory"])
        with patch.object(time, "time", lambda: real() + step_s + 101.0):
            assert pages.cache.retrieve(PROMPT, pages.table(1)) == 0
