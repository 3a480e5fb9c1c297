"""Layers are told when they are written, not when the host says so. Events of the test stand for a GPU's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from pdlink.engine.layer_order import LayerOrder
from pdlink.errors import EngineFailure
from tests.engine.small import NUM_LAYERS, prompt_of, rig

PATIENCE_S = 20.0
PATIENCE_TICKS = 2000


class HeldEvent:
    """Reached when the test lets it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.failure = ""
        self.num_records = 0

    def record(self) -> None:
        self.num_records += 1

    def synchronize(self) -> None:
        assert self.reached.wait(PATIENCE_S)
        if self.failure:
            raise RuntimeError(self.failure)


class Gpu:
    """Hands out events, and lets them be reached."""

    def __init__(self, *, held: bool) -> None:
        self.events: list[HeldEvent] = []
        self.held = held

    def make_event(self) -> HeldEvent:
        event = HeldEvent()
        if not self.held:
            event.reached.set()
        self.events.append(event)
        return event


@pytest.fixture
def held() -> Iterator[tuple[Gpu, LayerOrder]]:
    gpu = Gpu(held=True)
    order = LayerOrder(gpu.make_event)
    yield gpu, order
    for event in gpu.events:
        event.reached.set()
    order.close()


def test_nothing_is_told_before_its_event_and_all_in_order(held: tuple[Gpu, LayerOrder]) -> None:
    gpu, order = held
    told: list[int] = []
    first = threading.Event()

    def tell(layer: int) -> None:
        told.append(layer)
        first.set()

    for layer in range(3):
        order.tell_when_written(partial(tell, layer))
    gpu.events[1].reached.set()
    gpu.events[2].reached.set()
    assert not first.wait(0.05)
    gpu.events[0].reached.set()
    order.flush(PATIENCE_S)
    assert told == [0, 1, 2]


def test_flush_waits_and_has_a_deadline(held: tuple[Gpu, LayerOrder]) -> None:
    _, order = held
    order.tell_when_written(lambda: None)
    with pytest.raises(TimeoutError):
        order.flush(0.05)


def test_a_failed_event_tells_nothing_and_is_raised_by_flush(held: tuple[Gpu, LayerOrder]) -> None:
    gpu, order = held
    told: list[int] = []
    order.tell_when_written(lambda: told.append(0))
    gpu.events[0].failure = "an illegal memory access was encountered"
    gpu.events[0].reached.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        order.flush(PATIENCE_S)
    assert told == []


def test_events_are_used_again() -> None:
    gpu = Gpu(held=False)
    order = LayerOrder(gpu.make_event)
    for _ in range(5):
        order.tell_when_written(lambda: None)
        order.flush(PATIENCE_S)
    assert [event.num_records for event in gpu.events] == [5]
    order.close()
    order.close()


def test_the_engine_says_no_token_before_every_layer_of_its_prompt_was_told() -> None:
    """The first token ends the transfer's sending side: a layer told after it would be lost."""
    gpu = Gpu(held=True)
    order = LayerOrder(gpu.make_event)
    engine = rig(layer_order=order)
    prompt = prompt_of(20)
    engine.submit("r", prompt, 3)
    thread = threading.Thread(target=engine.engine.step)
    thread.start()
    for _ in range(PATIENCE_TICKS):
        if len(gpu.events) == NUM_LAYERS:
            break
        threading.Event().wait(0.01)
    for index, event in enumerate(gpu.events):
        assert len(engine.heard.written("r")) <= index
        assert engine.heard.tokens("r") == []
        event.reached.set()
    thread.join(PATIENCE_S)
    assert engine.heard.written("r") == [(layer, 0, 20) for layer in range(NUM_LAYERS)]
    assert len(engine.heard.tokens("r")) == 1
    engine.run()
    assert engine.heard.tokens("r") == rig().generate(prompt, 3)
    order.close()


def test_a_fault_of_the_gpu_ends_the_requests_of_the_pass() -> None:
    gpu = Gpu(held=False)
    order = LayerOrder(gpu.make_event)
    engine = rig(layer_order=order)
    bad = HeldEvent()
    bad.reached.set()
    bad.failure = "an illegal memory access was encountered"
    order._spare.append(bad)
    engine.submit("r", prompt_of(5), 3)
    engine.run()
    error = engine.heard.errors["r"]
    assert isinstance(error, EngineFailure)
    assert "illegal memory access" in str(error)
    assert engine.heard.tokens("r") == []
    order.close()
