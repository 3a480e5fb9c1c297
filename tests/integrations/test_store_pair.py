"""A decode rank with a store, joined to a prefill rank by real endpoints: it loads first and asks for the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from pdlink.events import Event, LayerLanded, listen
from pdlink.integrations.vllm_parts.layout import CacheGroups, CacheLayout
from pdlink.integrations.vllm_parts.requests import Scheduled
from pdlink.integrations.vllm_parts.steps import Steps
from pdlink.integrations.vllm_parts.store_book import StoreBook
from pdlink.integrations.vllm_parts.store_half import StoreHalf
from pdlink.store.eviction import Lru
from pdlink.store.groups import RecordGroup
from pdlink.store.source import CallersBlocks, Source
from pdlink.store.store import Store
from tests.endpoint.conftest import Pair
from tests.integrations.test_worker import NAMES, PROMPT, SRC, Server, same
from tests.integrations.vllm_engine import NO_ADAPTERS
from tests.waiting import WAIT_S, until

CHUNK = 8
TABLE, BLOCKS = [5, 2], [10, 11, 4, 5]
"""Decode's blocks, and the kernel blocks that they are."""
OTHER, OTHERS = [7, 9], [14, 15, 18, 19]


class Decode(Server):
    """With a store that keeps what was received."""

    def __init__(self, pair: Pair, store: Store) -> None:
        super().__init__(pair.decode, ratio=2)
        cache = CacheLayout(pair.decode.layout, {name: (at,) for at, name in enumerate(NAMES)})
        group = RecordGroup(cache.layout, model="m", revision="r", chunk_tokens=CHUNK)
        source = Source(store, [group], [pair.decode.buffer], CallersBlocks())
        news = self.half._news
        groups = CacheGroups.of([cache], cache.layout.num_blocks // 2)
        self.kept = StoreHalf(source, groups, news=news, adapters=NO_ADAPTERS, load_if_faster=False)
        self.half = Steps(news, self.half.transfers, self.kept)
        self.store = self.book.store = StoreBook(CHUNK, keeps_answers=True)

    def ask(self, prefill: Server, attempt: str, prompt: list[int]) -> None:
        """Both legs of a request arrive."""
        control = {"control": prefill.node.node.address}
        prefill.book.arrived("p", {"transfer_id": attempt, "leg": "prefill"}, prompt)
        self.book.arrived("d", {"transfer_id": attempt, "leg": "decode", "prefill": control}, prompt)
        self.store.arrived("d", prompt, "", "", (), receives=True)

    def admit(self, table: list[int]) -> int:
        """vLLM is told how much comes from elsewhere, and reserves blocks: tokens that the store loads."""
        found: list[int | None] = [None]

        def asked() -> bool:
            found[0] = self.book.missing("d", 0)[0]
            if found[0] is None:
                self.store.looked(self.step().looked)
            return found[0] is not None

        until(asked, "the store has answered")
        return self.book.allocated("d", (table,), found[0] or 0)

    def finish(self, table: list[int], tokens: list[int]) -> None:
        assert self.book.ended("d", tokens, (table,)) == (len(tokens) >= CHUNK)
        self.over.add("d")
        if len(tokens) >= CHUNK:
            self.until_reported(sent="d")
        assert self.step().received == set()


def serve(prefill: Server, decode: Decode, attempt: str, table: list[int], prompt: list[int] = PROMPT) -> int:
    """One request through both; tokens that decode's store loaded."""
    decode.ask(prefill, attempt, prompt)
    loaded = decode.admit(table)
    begun = decode.step()
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, len(prompt))])
    came = "d" in begun.received  # all of it was in decode's store, and the load was over within the step
    assert (begun if came else decode.until_reported(received="d")).failed == set()
    assert prefill.end("p")
    prefill.until_reported(sent="p")
    decode.finish(table, prompt[:-1])
    return loaded


@contextmanager
def opened() -> Iterator[tuple[Pair, Server, Decode, Store]]:
    store = Store(1 << 20, Lru())
    store.open()
    pair = Pair()
    prefill, decode = Server(pair.prefill), Decode(pair, store)
    try:
        yield pair, prefill, decode, store
        assert prefill.idle()
        assert decode.idle()
        half = decode.kept
        half._lookers.close(WAIT_S)
        half.source.copier.wait()
        assert not any((half._prompts, half._looks, half._loads, half._saved, half.copying, half.pace._offers))
        assert not decode.half.transfers._offers
        assert not store._catalog._leases
        store.check()
    finally:
        decode.kept.source.close()
        pair.close()
        store.close()


def test_decode_asks_only_for_what_its_store_lacks() -> None:
    """29 tokens come from elsewhere; three chunks of them are in the store the second time."""
    with opened() as (pair, prefill, decode, _):
        assert serve(prefill, decode, "a", TABLE) == 0
        assert same(pair, SRC, BLOCKS)
        landed = pair.decode.buffer.array.copy()
        pair.decode.buffer.array[:] = 0
        assert serve(prefill, decode, "b", OTHER) == 24
        assert same(pair, SRC, OTHERS)
        pair.decode.buffer.array[:] = landed
        assert decode.kept.pace.receiving.known


def test_nothing_is_pushed_of_a_prompt_that_decode_has_in_its_store() -> None:
    """25 tokens: all that decode does not compute itself are three chunks."""
    prompt = PROMPT[:25]
    with opened() as (pair, prefill, decode, _):
        assert serve(prefill, decode, "a", TABLE, prompt) == 0
        landed: list[Event] = []
        stop = listen(lambda event: landed.append(event) if isinstance(event, LayerLanded) else None)
        try:
            assert serve(prefill, decode, "b", OTHER, prompt) == 24
        finally:
            stop()
        assert same(pair, SRC, OTHERS, 0, 24)
        assert not landed


def test_what_the_store_has_lost_meanwhile_is_asked_of_prefill() -> None:
    with opened() as (pair, prefill, decode, store):
        serve(prefill, decode, "a", TABLE)
        decode.ask(prefill, "b", PROMPT)
        assert decode.admit(OTHER) == 24
        with store._lock:
            assert store._catalog.expire(float("1e18"))
        decode.step()
        prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
        assert decode.until_reported(received="d").failed == set()
        assert same(pair, SRC, OTHERS)
        prefill.end("p")
        prefill.until_reported(sent="p")
        decode.finish(OTHER, [])


@pytest.mark.parametrize("when", ["asked", "loading", "offered"])
def test_an_abort_is_reported_once_and_lets_go_of_everything(when: str) -> None:
    with opened() as (_, prefill, decode, _):
        serve(prefill, decode, "a", TABLE)
        decode.ask(prefill, "b", PROMPT)
        prefill.step()
        stop = threading.Event()
        if when == "asked":
            assert decode.book.missing("d", 0) == (None, False)
            decode.step()
        else:
            if when == "loading":
                decode.kept.source.copier.put(partial(_wait, stop))
            assert decode.admit(OTHER) == 24
            assert not decode.step().received
            if when == "offered":
                offers = decode.half.transfers._offers
                until(lambda: not decode.step().received and not offers, "it has offered for the rest")
        decode.end("d")
        reports = [decode.step().received]
        assert when != "loading" or not reports[0], "the store still writes into its blocks"
        stop.set()
        prefill.end("p")

        def over() -> bool:
            reports.append(decode.step().received)
            prefill.step()
            return prefill.idle() and decode.idle() and (when == "asked" or any(reports))

        until(over, "both have given their blocks up")
        decode.kept.source.copier.wait()
        reports.append(decode.step().received)
        assert sum(map(len, reports)) == (when != "asked")


def _wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S)
