"""`EnginePort`: what an engine says about its requests, by its own ids, and what becomes of their transfers."""

from __future__ import annotations

import pytest

import pdlink
from pdlink.errors import InvalidRequest
from pdlink.events import Event, FallbackUsed, listen
from pdlink.reasons import ABORTED, Code, Reason
from tests.waiting import WAIT_S, until

from .conftest import DST, LAYERS, SRC, TOKENS, Pair, assert_same


class Engines:
    """One request on either side, named by its own engine."""

    def __init__(self, pair: Pair) -> None:
        self.sends, self.receives = pdlink.EnginePort(pair.prefill), pdlink.EnginePort(pair.decode)
        self.outgoing = self.sends.send("p", "t", TOKENS)
        self.incoming = self.receives.receive("d", "t", pair.prefill.address, TOKENS)

    def compute(self, layers: range = range(LAYERS), start: int = 0, end: int = TOKENS) -> None:
        for layer in layers:
            self.sends.layer_written(layer, [("stranger", 0, 3), ("p", start, end)])


@pytest.fixture
def engines(pair: Pair) -> Engines:
    return Engines(pair)


def test_verbs_of_two_engines_move_the_kv_of_one_request(pair: Pair, engines: Engines) -> None:
    engines.sends.admitted("p", [SRC])
    engines.receives.admitted("d", [[*DST, 31]])
    engines.compute()
    engines.sends.finished("p", 42)
    engines.sends.ended("p")
    assert engines.incoming.wait(WAIT_S) == 42
    assert_same(pair.prefill, pair.decode)
    engines.receives.ended("d")
    assert engines.outgoing.released.wait(WAIT_S)
    assert engines.outgoing.error is None


@pytest.mark.parametrize("cached", [8, 9, TOKENS])
def test_receiver_asks_only_for_what_its_engine_has_not_cached(pair: Pair, engines: Engines, cached: int) -> None:
    engines.sends.admitted("p", [SRC])
    engines.receives.admitted("d", [DST], cached)
    engines.compute()
    engines.sends.finished("p", 42)
    assert engines.incoming.wait(WAIT_S) == 42
    assert pair.decode.pages(0)[DST[-1]].any() == (cached < TOKENS)
    assert not pair.decode.pages(0)[DST[0]].any(), "its tokens are cached"


def test_blocks_may_be_added_chunk_by_chunk_and_taken_away(pair: Pair, engines: Engines) -> None:
    engines.receives.admitted("d", [DST])
    engines.sends.admitted("p", [SRC[:2]])
    engines.compute(end=8)
    engines.sends.preempted("p", WAIT_S)
    engines.sends.admitted("p", [SRC[:2]])
    engines.compute(end=8)
    engines.sends.extended("p", [SRC[2:]])
    engines.compute(start=8)
    engines.sends.finished("p", 42)
    assert engines.incoming.wait(WAIT_S) == 42
    assert_same(pair.prefill, pair.decode)


def test_layer_is_waited_for_and_a_failed_one_is_not(pair: Pair, engines: Engines) -> None:
    engines.sends.admitted("p", [SRC])
    engines.receives.admitted("d", [DST])
    engines.compute(range(1))
    assert engines.receives.layer_needed("d", 0, WAIT_S)
    assert not engines.receives.layer_needed("d", 1, 0.01), "it has not come"
    engines.sends.ended("p", ABORTED)
    assert not engines.receives.layer_needed("d", 1, WAIT_S)
    assert engines.incoming.error is not None


def test_request_that_is_admitted_after_its_transfer_failed_is_a_fallback(pair: Pair, engines: Engines) -> None:
    heard: list[Event] = []
    stop = listen(heard.append)
    engines.sends.ended("p", ABORTED)
    until(engines.incoming.done.is_set, "decode has heard it")
    for _ in range(2):
        engines.receives.admitted("d", [DST])
    stop()
    assert [event.reason for event in heard if isinstance(event, FallbackUsed)] == ["aborted"]
    assert not engines.receives.layer_needed("d", 0, WAIT_S)
    engines.receives.ended("d")


def test_request_that_ends_early_ends_its_transfer_on_both_sides(pair: Pair, engines: Engines) -> None:
    engines.receives.admitted("d", [DST])
    engines.receives.ended("d")
    assert engines.incoming.released.wait(WAIT_S)
    assert engines.outgoing.released.wait(WAIT_S)
    assert engines.outgoing.error is not None
    assert engines.outgoing.error.reason == Reason(Code.ABORTED, "the request has ended")


def test_id_in_use_is_refused_and_the_first_request_goes_on(pair: Pair, engines: Engines) -> None:
    for begin in (
        lambda: engines.sends.send("p", "other", TOKENS),
        lambda: engines.receives.receive("d", "other", pair.prefill.address, TOKENS),
    ):
        with pytest.raises(InvalidRequest, match="is in use"):
            begin()
    engines.sends.admitted("p", [SRC])
    engines.receives.admitted("d", [DST])
    engines.compute()
    engines.sends.finished("p", 42)
    assert engines.incoming.wait(WAIT_S) == 42


def test_requests_without_a_transfer_are_ignored(pair: Pair) -> None:
    port = pdlink.EnginePort(pair.prefill)
    port.admitted("r", [SRC])
    port.extended("r", [SRC])
    port.preempted("r", WAIT_S)
    port.layer_written(0, [("r", 0, TOKENS)])
    port.finished("r", 42)
    port.ended("r", ABORTED)
    assert not port.layer_needed("r", 0, WAIT_S)
    assert not any(pair.prefill.report().sending.values())
