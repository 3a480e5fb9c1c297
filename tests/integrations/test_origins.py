"""Every token of a prompt has one source, and is told once."""

from __future__ import annotations

import pytest

from pdlink.integrations.stats import Counts
from pdlink.integrations.vllm_parts.origins import NO_TIERS, Origins
from pdlink.integrations.vllm_parts.store_book import Chosen

CHOSEN = Chosen("faster", 512, 0.1, 0.4, (("memory", 256), ("disk", 256)))


def test_the_tokens_of_a_prompt_have_one_source_each() -> None:
    origins, counts = Origins(), Counts()
    origins.asked("r", 128)
    assert origins.admitted("r", 600, 471, 384, CHOSEN) is None, "it is loaded first"
    assert origins.sources("r") == {"P2P": 87, "HOST": 128, "DISK": 256}
    told = origins.admitted("r", 600, 0, 0, CHOSEN)
    assert told is not None
    assert (told.cached, told.loaded, told.received, told.computed) == (128, 384, 87, 1)
    assert told.places == {"memory": 128, "disk": 256}, "vLLM had the first tokens itself"
    counts(told)
    assert counts.take() == {
        "pdlink_prompt_tokens_total|device": 128,
        "pdlink_prompt_tokens_total|host": 128,
        "pdlink_prompt_tokens_total|disk": 256,
        "pdlink_prompt_tokens_total|prefill": 87,
        "pdlink_prompt_tokens_total|computed": 1,
        "pdlink_store_choices_total|faster": 1,
    }


def test_a_request_is_told_once_though_vllm_reserves_blocks_again() -> None:
    origins = Origins()
    assert origins.admitted("stranger", 600, 0, 0, NO_TIERS) is None
    origins.asked("r", 0)
    assert origins.admitted("r", 600, 512, 512, CHOSEN) is None
    told = origins.admitted("r", 600, 0, 0, CHOSEN)
    assert told is not None
    origins.asked("r", 512)
    assert origins.admitted("r", 600, 0, 0, CHOSEN) is None
    assert origins.ended("r") == told
    assert origins.ended("r") is None


@pytest.mark.parametrize("receives", [False, True])
def test_what_a_load_did_not_bring_is_computed_or_received(receives: bool) -> None:
    origins = Origins()
    origins.asked("r", 128)
    origins.admitted("r", 600, 384, 384, CHOSEN)
    origins.fell_short("r", 384, receives=receives)
    told = origins.admitted("r", 600, 0, 0, CHOSEN)
    assert told is not None
    assert (told.cached, told.loaded, told.received + told.computed) == (128, 256, 216)
    assert told.received == (128 if receives else 0)
    assert told.places == {"memory": 128, "disk": 128}


def test_a_server_without_a_store_computes_what_it_has_not() -> None:
    origins = Origins()
    origins.asked("r", 32)
    told = origins.admitted("r", 100, 0, 0, NO_TIERS)
    assert told is not None
    assert (told.cached, told.computed, told.reason) == (32, 68, "no_tiers")
    assert origins.sources("r") == {}


def test_vllm_has_no_name_for_a_tier_that_is_neither_memory_nor_disk_nor_a_peer() -> None:
    places = ("disk-2", 256), ("valkey", 256), ("peer", 64), ("peer 10.0.0.7:8110", 32)
    origins = Origins()
    origins.asked("r", 0)
    origins.admitted("r", 700, 608, 608, Chosen("always", 608, places=places))
    assert origins.sources("r") == {"DISK": 256, "EXTERNAL_UNSPECIFIED": 256, "P2P": 96}
