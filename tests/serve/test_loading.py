"""A prefix is looked up in line, loaded as far as it pays while the rest is computed, and pushed as it lands."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pdlink.errors import RequestAborted
from pdlink.events import LayerLanded, listen
from pdlink.store.worth import COPY, Speed
from tests.waiting import WAIT_S

from .tiered import (
    CHUNK,
    Computed,
    answer,
    answers,
    between_layers,
    computed_here,
    expire,
    opened,
    prompt_of,
    pushed,
    settle,
    sourced,
    store_of,
    until_free,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdlink.events import Event
    from pdlink.store.interface import Found


@pytest.mark.parametrize("rest", [7, 0])
def test_the_rest_of_a_prompt_is_computed_while_its_prefix_is_loaded(
    rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a rest the last token, whose chunk is loaded but for it."""
    prompt = prompt_of(5 * CHUNK + rest, 10)
    with opened() as worker:
        expected, asked = answers(worker, [prompt], at_once=False), threading.Event()
        tiers = worker.tiers
        assert tiers is not None
        right = tiers.layer_needed

        def layer_needed(request_id: str, layer: int, timeout_s: float) -> bool:
            if layer == 1 and timeout_s > 0:
                asked.set()
            return right(request_id, layer, timeout_s)

        monkeypatch.setattr(tiers, "layer_needed", layer_needed)
        between_layers(worker, monkeypatch, lambda: wait_for(asked))
        computed = Computed(worker, monkeypatch)
        assert answers(worker, [prompt], at_once=False) == expected
        assert asked.is_set(), "the pass was in its second layer before that one was copied"
        assert computed.take() == max(1, rest)


@pytest.mark.parametrize("rest", [7, 0])
def test_a_load_that_fails_while_the_rest_is_computed_is_computed_anew(
    rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(5 * CHUNK + rest, 11)
    with opened() as worker:
        expected, store = answers(worker, [prompt], at_once=False), store_of(worker)
        computed = Computed(worker, monkeypatch)
        between_layers(worker, monkeypatch, lambda: expire(store))
        assert answers(worker, [prompt], at_once=False) == expected
        assert computed.take() == 5 * CHUNK + rest
        assert worker.pool.num_held == 0
        store.check()


def test_a_loaded_layer_is_at_the_receiver_before_the_next_one_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, landed = prompt_of(5 * CHUNK + 7, 12), threading.Event()

    def listener(event: Event) -> None:
        if isinstance(event, LayerLanded) and (event.layer, event.end) == (0, 5 * CHUNK):
            landed.set()

    with opened(role="prefill") as prefill, opened(role="decode", records=0) as decode:
        expected = asyncio.run(pushed(prefill, decode, prompt))
        settle(prefill)
        between_layers(prefill, monkeypatch, lambda: wait_for(landed))
        stop = listen(listener)
        try:
            assert asyncio.run(pushed(prefill, decode, prompt)) == expected
        finally:
            stop()
        assert landed.is_set()


def test_a_push_of_layers_that_do_not_count_afterwards_fails_and_decode_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = prompt_of(5 * CHUNK + 7, 13)
    with opened(role="prefill") as prefill, opened(role="decode", records=0) as decode:
        tokens, _ = asyncio.run(pushed(prefill, decode, prompt))
        settle(prefill)
        store = store_of(prefill)

        def fail() -> None:
            store.array[:] = 255  # somebody else's records by now
            expire(store)

        between_layers(prefill, monkeypatch, fail)
        again, kv_path = asyncio.run(pushed(prefill, decode, prompt))
        assert again == tokens
        assert kv_path.startswith("recomputed")
        store.check()


def test_a_prompt_is_looked_up_in_line_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, others = prompt_of(2 * CHUNK, 20), [prompt_of(2 * CHUNK, seed) for seed in (21, 22)]
    with opened() as worker:
        expected, store = answers(worker, [slow], at_once=False), store_of(worker)
        right, answered, computed = store.lookup, threading.Event(), Computed(worker, monkeypatch)
        assert worker.source is not None
        keys = worker.source.keys(slow).by_group[0]

        def lookup(asked: Sequence[bytes], timeout_s: float) -> Found:
            if asked == keys:
                wait_for(answered)
            return right(asked, timeout_s)

        async def in_turn() -> list[int]:
            looks = asyncio.ensure_future(answer(worker, slow))
            await asyncio.sleep(0)
            for prompt in others:
                await answer(worker, prompt)
            assert not looks.done()
            answered.set()
            return await looks

        monkeypatch.setattr(store, "lookup", lookup)
        assert [asyncio.run(in_turn())] == expected
        assert computed.take() == 2 * 2 * CHUNK + 1


def test_all_who_wait_for_a_tier_that_does_not_answer_go_on_by_their_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """sglang#31398: loads that wait for a slow tier stop everybody. Eight requests, and two threads that look."""
    prompts = [prompt_of(2 * CHUNK + number, number) for number in range(8)]
    expected = computed_here(prompts)
    with opened(below={"remote_url": f"file://{tmp_path}"}) as worker:
        assert worker.source is not None
        source, going = worker.source, threading.Event()
        monkeypatch.setattr(source, "lookup_timeout_s", 0.2)
        (tier,) = store_of(worker)._below.tiers
        monkeypatch.setattr(tier.tier, "contains", lambda keys: [] if going.wait(WAIT_S) else keys)
        timeouts: list[float] = []
        right = source.store.lookup

        def lookup(keys: Sequence[bytes], timeout_s: float) -> Found:
            timeouts.append(timeout_s)
            return right(keys, timeout_s)

        monkeypatch.setattr(source.store, "lookup", lookup)
        assert answers(worker, prompts, at_once=True) == expected
        assert len(timeouts) == 8
        assert min(timeouts) == 0, "who was in line behind others asks memory only"
        going.set()


def test_a_look_up_may_take_no_longer_than_the_prompt_would(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK, 33)
    with opened(below={"load_if_faster": True}) as worker:
        assert worker.source is not None
        timeouts: list[float] = []
        right = store_of(worker).lookup

        def lookup(keys: Sequence[bytes], timeout_s: float) -> Found:
            timeouts.append(timeout_s)
            return right(keys, timeout_s)

        monkeypatch.setattr(store_of(worker), "lookup", lookup)
        for token_s in (1e-6, 1.0):
            monkeypatch.setattr(worker.tiers, "_computing", Speed())
            worker.tiers._computing.measured(100, 100 * token_s, time.monotonic())
            answers(worker, [prompt], at_once=False)
        assert timeouts[0] <= 0.05 < timeouts[1] <= worker.source.lookup_timeout_s


def test_a_look_up_that_fails_costs_nothing_but_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5 * CHUNK, 23)
    with opened() as worker:
        expected = answers(worker, [prompt], at_once=False)

        def lookup(*_: object) -> None:
            raise OSError(107, "not connected")

        with monkeypatch.context() as broken, sourced() as events:
            broken.setattr(store_of(worker), "lookup", lookup)
            assert answers(worker, [prompt], at_once=False) == expected
        assert [(event.computed, event.reason) for event in events] == [(5 * CHUNK, "look_up_failed")]


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    """lmcache#1109: a hit in a slow tier was slower than no cache."""
    prompt = prompt_of(5 * CHUNK + 3, 25)
    with opened(below={"load_if_faster": True}) as worker, sourced() as events:
        expected = answers(worker, [prompt], at_once=False)
        assert answers(worker, [prompt], at_once=False) == expected
        assert worker.source is not None
        for _ in range(100):
            worker.source.speeds[COPY].measured(1 << 20, 100.0, time.monotonic())
        assert answers(worker, [prompt], at_once=False) == expected
    assert [(event.reason, event.loaded, event.computed) for event in events] == [
        ("not_found", 0, 5 * CHUNK + 3),
        ("not_measured", 5 * CHUNK, 3),
        ("slower", 0, 5 * CHUNK + 3),
    ]
    assert events[2].found == 5 * CHUNK
    assert events[2].load_s > events[2].other_s >= 0


def test_the_next_turn_of_a_conversation_needs_no_push_of_what_decode_has_kept() -> None:
    first = prompt_of(5 * CHUNK + 7, 26)
    keeps = {"save_decode_cache": True}
    with opened(role="prefill") as prefill, opened(role="decode", below=keeps) as decode, sourced() as events:
        (tokens, _) = asyncio.run(pushed(prefill, decode, first))
        settle(decode)
        second = (*first, *tokens, *prompt_of(40, 27))
        before = len(first) + len(tokens) - 1
        answered = asyncio.run(pushed(prefill, decode, second))
        assert answered == (computed_here([second])[0], "transferred")
        of_decode = [event for event in events if event.request_id.startswith("d")]
        loaded = before // CHUNK * CHUNK
        assert [(event.loaded, event.received) for event in of_decode] == [
            (0, len(first)),
            (loaded, len(second) - loaded),
        ]
        settle(decode)
        assert (prefill.pool.num_held, decode.pool.num_held) == (0, 0)


def test_only_the_last_token_is_computed_and_pushed_of_a_prompt_that_both_workers_have_whole() -> None:
    prompt, keeps = prompt_of(5 * CHUNK, 30), {"save_decode_cache": True}
    (expected,) = computed_here([prompt])
    with opened(role="prefill") as prefill, opened(role="decode", below=keeps) as decode, sourced() as events:
        for loaded in (0, 5 * CHUNK - 1):
            events.clear()
            assert asyncio.run(pushed(prefill, decode, prompt)) == (expected, "transferred")
            settle(prefill)
            settle(decode)
            counts = {event.request_id[0]: (event.loaded, event.computed, event.received) for event in events}
            assert counts == {"p": (loaded, 5 * CHUNK - loaded, 0), "d": (loaded, 0, 5 * CHUNK - loaded)}
        assert (prefill.pool.num_held, decode.pool.num_held) == (0, 0)


def test_decode_keeps_nothing_unless_it_is_told_to() -> None:
    prompt = prompt_of(5 * CHUNK, 28)
    with opened(role="prefill") as prefill, opened(role="decode") as decode:
        asyncio.run(pushed(prefill, decode, prompt))
        settle(decode)
        assert store_of(decode).gauges()["used"] == 0


@pytest.mark.parametrize("end", ["lease", "abort"])
def test_decode_offers_for_what_its_store_has_lost_and_holds_nothing_after_an_abort(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(5 * CHUNK + 7, 29)
    keeps = {"save_decode_cache": True}
    with opened(role="prefill") as prefill, opened(role="decode", below=keeps) as decode, sourced() as events:
        expected = asyncio.run(pushed(prefill, decode, prompt))
        settle(decode)
        events.clear()

        def act() -> None:
            if end == "lease":
                expire(store_of(decode))
            else:
                for stream in list(decode._running.values()):
                    decode.abort(stream)

        between_layers(decode, monkeypatch, act)
        if end == "lease":
            assert asyncio.run(pushed(prefill, decode, prompt)) == expected
            assert [event.received for event in events if event.request_id.startswith("d")] == [len(prompt)]
        else:
            with pytest.raises(RequestAborted):
                asyncio.run(pushed(prefill, decode, prompt))
        settle(decode)
        until_free(decode)
        store_of(decode).check()
