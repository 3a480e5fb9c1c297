"""Layers of a GPU are pushed when they are written, not when they are launched. Events here stand for the GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

import pdlink
from pdlink.capabilities import MemoryKind
from pdlink.errors import InvalidRequest, TransferFailed
from pdlink.reasons import Code, Reason
from pdlink.transport.tcp import TcpTransport
from tests.events import DeviceLike, Gpu
from tests.waiting import WAIT_S

from .conftest import DST, SRC, TOKENS, assert_same, fill, groups


class AnyTcp(TcpTransport):
    """Takes the double's memory for the host's, as it is."""

    memory: tuple[MemoryKind, ...] = ("host", "cuda")  # type: ignore[assignment]


def never(reason: Reason) -> None:
    raise AssertionError(reason)


@pytest.fixture
def nodes() -> Iterator[tuple[Gpu, pdlink.Node, pdlink.Node]]:
    """A sender whose memory is written when the test says so."""
    with (
        closing(DeviceLike(groups(4).extent(0))) as memory,
        pdlink.Node("prefill", groups(4), [memory], transports=[AnyTcp()]) as prefill,
        pdlink.Node("decode", groups(8), transports=[AnyTcp()]) as decode,
    ):
        fill(prefill)
        yield memory.gpu, prefill, decode
        memory.gpu.reach()


def test_what_follows_happens_in_order_and_not_before_its_event(
    nodes: tuple[Gpu, pdlink.Node, pdlink.Node],
) -> None:
    gpu, node, _ = nodes
    done: list[int] = []
    first, last = threading.Event(), threading.Event()

    def act(layer: int) -> None:
        done.append(layer)
        (last if layer == 2 else first).set()

    for layer in range(3):
        node.when_written(partial(act, layer), never)
    gpu.events[1].reach()
    gpu.events[2].reach()
    assert not first.wait(0.05)
    gpu.events[0].reach()
    assert last.wait(WAIT_S)
    assert done == [0, 1, 2]


def test_a_late_stream_holds_back_no_other(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    gpu, node, _ = nodes
    done, late = threading.Event(), threading.Event()
    node.when_written(late.set, never)
    gpu.stream = 1
    node.when_written(done.set, never)
    gpu.events[1].reach()
    assert done.wait(WAIT_S)
    assert not late.is_set()


def test_failed_event_does_nothing_and_says_why(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    gpu, node, _ = nodes
    done: list[int] = []
    reasons: list[Reason] = []
    failed = threading.Event()

    def fail(reason: Reason) -> None:
        reasons.append(reason)
        failed.set()

    node.when_written(partial(done.append, 0), fail)
    gpu.reach(failure="an illegal memory access was encountered")
    assert failed.wait(WAIT_S)
    assert done == []
    assert "illegal memory access" in reasons[0].words


def test_events_are_used_again(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    gpu, node, _ = nodes
    for _ in range(5):
        done = threading.Event()
        node.when_written(done.set, never)
        gpu.reach()
        assert done.wait(WAIT_S)
    assert sum(event.num_records for event in gpu.events) == 5
    assert len(gpu.events) <= 2, "the one before may still be on its way back"


def test_events_of_ended_transfers_are_used_again(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    """Also while callers keep the transfers: a prompt has an event for each layer."""
    gpu, prefill, decode = nodes
    kept = []
    for number in range(3):
        incoming = decode.receive(f"t{number}", prefill.address, [DST], range(TOKENS))
        kept.append(prefill.send(f"t{number}", [SRC], TOKENS))
        for layer in range(3):
            kept[-1].layer_ready(layer)
        kept[-1].finish(42)
        gpu.reach()
        assert incoming.wait(WAIT_S) == 42
        assert kept[-1].released.wait(WAIT_S)
        gc.collect()
    assert sum(event.num_records for event in gpu.events) == 9
    assert len(gpu.events) <= 4, "the last one of a transfer may still be on its way back"


def test_what_follows_a_node_s_end_is_ignored(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    """An engine's forward pass may still run while its node is closed."""
    gpu, node, _ = nodes
    done: list[int] = []
    node.close()
    node.when_written(partial(done.append, 0), never)
    gpu.reach()
    assert not done


def test_an_error_behind_a_launched_layer_is_told(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    """The caller has gone on by then: an error that nobody hears of would leave the transfer to its deadline."""
    gpu, node, _ = nodes
    failures: list[Reason] = []
    failed = threading.Event()

    def fail(reason: Reason) -> None:
        failures.append(reason)
        failed.set()

    def act() -> None:
        raise IndexError("layer 7 of 2")

    node.when_written(act, fail)
    gpu.reach()
    assert failed.wait(WAIT_S)
    words = "what was reported of its layers cannot be handled: IndexError: layer 7 of 2"
    assert failures == [Reason(Code.HANDLING_FAILED, words)]


def test_process_ends_although_its_gpu_never_reaches_an_event() -> None:
    program = """
import pdlink
from tests.events import DeviceLike
from tests.node.conftest import groups
from tests.node.test_launched import AnyTcp

memory = DeviceLike(groups(4).extent(0))
node = pdlink.Node("prefill", groups(4), [memory], transports=[AnyTcp()])
node.when_written(lambda: None, print)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT_S)


def test_first_token_follows_the_last_written_layer(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    """An engine finishes while kernels of the last layer run: the transfer must not fail because that layer lacks."""
    gpu, prefill, decode = nodes
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    with prefill.send("t", [SRC], TOKENS) as outgoing:
        for layer in range(3):
            outgoing.layer_ready(layer)
        outgoing.finish(42)
    for index, event in enumerate(gpu.events):
        assert not incoming.done.is_set()
        assert not any(incoming.has_layer(layer) for layer in range(index, 3))
        event.reach()
    assert incoming.wait(WAIT_S) == 42
    assert_same(prefill, decode)


def test_cached_tokens_are_pushed_when_they_are_written(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    """Another request has launched the kernels that write them, a moment ago perhaps."""
    gpu, prefill, decode = nodes
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    outgoing = prefill.send("t")
    assert outgoing.accepted.wait(WAIT_S)
    written = {layer: prefill.pages(layer).copy() for layer in range(3)}
    for layer in range(3):
        prefill.pages(layer)[:] = 0
    outgoing.publish([SRC], TOKENS, 8)
    for layer in range(3):
        outgoing.layer_ready(layer, 8)
    outgoing.finish(42)
    assert not incoming.done.wait(0.2)
    for layer in range(3):
        prefill.pages(layer)[:] = written[layer]
    gpu.reach()
    assert incoming.wait(WAIT_S) == 42
    assert_same(prefill, decode)


def test_layers_that_were_launched_before_blocks_were_withdrawn_are_not_in_the_next_ones(
    nodes: tuple[Gpu, pdlink.Node, pdlink.Node],
) -> None:
    gpu, prefill, decode = nodes
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    outgoing = prefill.send("t", [[0, 3, 4, 6, 8, 10]], TOKENS)
    assert outgoing.accepted.wait(WAIT_S)
    for layer in range(3):
        outgoing.layer_ready(layer)
    outgoing.withdraw(WAIT_S)
    outgoing.publish([SRC], TOKENS)
    gpu.reach()
    assert not incoming.has_layer(0)
    reached = threading.Event()
    prefill.when_written(reached.set, never)
    gpu.reach()
    assert reached.wait(WAIT_S)
    assert outgoing.machine.num_in_flight == 0
    assert outgoing.nbytes == 0
    for layer in range(3):
        outgoing.layer_ready(layer)
    outgoing.finish(42)
    gpu.reach()
    assert incoming.wait(WAIT_S) == 42
    assert_same(prefill, decode)


def test_fault_of_the_gpu_fails_the_transfer(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    gpu, prefill, decode = nodes
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    outgoing = prefill.send("t", [SRC], TOKENS)
    outgoing.layer_ready(0)
    gpu.reach(failure="an illegal memory access was encountered")
    with pytest.raises(TransferFailed, match="illegal memory access"):
        outgoing.wait(WAIT_S)
    with pytest.raises(TransferFailed):
        incoming.wait(WAIT_S)


@pytest.fixture
def receiver() -> Iterator[tuple[Gpu, pdlink.Node]]:
    """Whose blocks are used until the test says otherwise."""
    with (
        closing(DeviceLike(groups(8).extent(0))) as memory,
        pdlink.Node("later", groups(8), [memory], transports=[AnyTcp()]) as node,
    ):
        yield memory.gpu, node
        memory.gpu.reach()


def test_blocks_are_offered_when_what_was_launched_before_has_run(
    nodes: tuple[Gpu, pdlink.Node, pdlink.Node], receiver: tuple[Gpu, pdlink.Node]
) -> None:
    """A kernel that zeroes them, or a step scheduled ahead, must not write over what peers have put there."""
    (gpu, prefill, _), (later, decode) = nodes, receiver
    outgoing = prefill.send("t", [SRC], TOKENS, TOKENS)
    outgoing.finish(42)
    gpu.reach()
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    assert outgoing.accepted.wait(WAIT_S)
    assert not incoming.done.wait(0.2)
    decode.pages(0)[:] = 0
    later.reach()
    assert incoming.wait(WAIT_S) == 42
    assert_same(prefill, decode)
    with pytest.raises(InvalidRequest, match="a range from 0"):
        decode.receive("u", prefill.address, [DST], range(0, TOKENS, 2))


def test_a_transfer_that_is_cancelled_before_its_offer_has_left_offers_nothing(
    nodes: tuple[Gpu, pdlink.Node, pdlink.Node], receiver: tuple[Gpu, pdlink.Node]
) -> None:
    (_, prefill, _), (later, decode) = nodes, receiver
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    incoming.cancel()
    assert incoming.released.wait(WAIT_S)
    later.reach()
    reached = threading.Event()
    decode.when_written(reached.set, never)
    later.reach()
    assert reached.wait(WAIT_S)
    assert decode.report().receiving.get("offered", 0) == 0


def test_a_transfer_that_ends_takes_back_what_waits_for_its_event(
    nodes: tuple[Gpu, pdlink.Node, pdlink.Node],
) -> None:
    """Nothing of it is in flight, so nothing is waited for."""
    _, prefill, decode = nodes
    incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
    outgoing = prefill.send("t", [SRC], TOKENS)
    assert outgoing.accepted.wait(WAIT_S)
    for layer in range(3):
        outgoing.layer_ready(layer)
    incoming.cancel()
    assert outgoing.released.wait(WAIT_S)
    assert incoming.released.wait(WAIT_S)


def test_a_late_chunk_holds_back_no_other_transfer(nodes: tuple[Gpu, pdlink.Node, pdlink.Node]) -> None:
    gpu, prefill, decode = nodes
    late, incoming = (decode.receive(name, prefill.address, [DST], range(TOKENS)) for name in ("late", "t"))
    prefill.send("late", [SRC], TOKENS).layer_ready(0)
    gpu.stream, before = 1, len(gpu.events)
    with prefill.send("t", [SRC], TOKENS) as outgoing:
        for layer in range(3):
            outgoing.layer_ready(layer)
        outgoing.finish(42)
    for event in gpu.events[before:]:
        event.reach()
    assert incoming.wait(WAIT_S) == 42
    assert not late.has_layer(0)
