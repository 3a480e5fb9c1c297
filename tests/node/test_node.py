"""The front door: transfers between two nodes, what leaving early does, and what is refused with which words."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

import pdlink
from pdlink.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    PeerNotAllowed,
    TransferFailed,
)
from pdlink.memory.blocks import BlockPool
from pdlink.reasons import Code, Reason
from tests.events import DeviceLike
from tests.loopback import LoopbackHub, LoopbackTransport
from tests.waiting import WAIT_S, until

from .conftest import DST, LAYERS, SRC, TIMEOUTS, TOKENS, Pair, assert_same, compute, fill, groups


def num_held(node: pdlink.Node, blocks: list[int]) -> int:
    """References that the node has to these blocks, beside the one of the request."""
    assert node.pool is not None
    return sum(node.pool._refs[block] - 1 for block in blocks)


def test_transfer_brings_kv_and_first_token(pair: Pair) -> None:
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    compute(outgoing)
    assert incoming.wait(WAIT_S) == 42
    outgoing.wait(WAIT_S)
    assert_same(pair.prefill, pair.decode)
    for end, blocks in ((outgoing, SRC), (incoming, DST)):
        assert end.released.wait(WAIT_S)
        assert end.error is None
        assert num_held(pair.prefill if end is outgoing else pair.decode, blocks) == 0


def test_blocks_may_be_reserved_after_the_request_has_come(pair: Pair) -> None:
    outgoing = pair.prefill.send("t")
    incoming = pair.decode.receive("t", pair.prefill.address)
    assert outgoing.accepted.wait(WAIT_S)
    outgoing.publish([SRC[:2]], TOKENS)
    outgoing.extend([SRC[2:]])
    incoming.offer([DST[1:]], range(8, TOKENS))
    compute(outgoing)
    assert incoming.wait(WAIT_S) == 42
    assert not pair.decode.pages(0)[DST[0]].any(), "tokens that were not asked for stay away"


def test_blocks_that_are_withdrawn_while_their_transfer_ends_are_given_back_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pair.prefill.pool
    assert pool is not None
    outgoing, give_back, calls = pair.prefill.send("t", [SRC], TOKENS), pool.give_back, list[list[int]]()

    def while_they_are_given_back(blocks: Any) -> None:
        calls.append(list(blocks))
        if len(calls) == 1:
            engine = threading.Thread(target=outgoing.withdraw, args=(WAIT_S,))
            engine.start()
            engine.join(WAIT_S)
        give_back(blocks)

    monkeypatch.setattr(pool, "give_back", while_they_are_given_back)
    outgoing.cancel()
    assert outgoing.released.wait(WAIT_S)
    assert calls == [SRC]
    assert num_held(pair.prefill, SRC) == 0


def test_layer_can_be_read_while_later_ones_are_computed(pair: Pair) -> None:
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    compute(outgoing, range(1))
    incoming.wait_layer(0, WAIT_S)
    assert_same(pair.prefill, pair.decode, range(1))
    assert not incoming.has_layer(1)
    with pytest.raises(DeadlineExceeded, match="layer 1 was not here within 0.01 s"):
        incoming.wait_layer(1, 0.01)
    compute(outgoing, range(1, LAYERS))
    incoming.wait_layer(2, WAIT_S)
    assert incoming.wait(WAIT_S) == 42
    incoming.wait_layer(1)


def test_threads_that_wait_for_layers_all_go_on_when_the_transfer_fails(pair: Pair) -> None:
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    errors: list[Reason] = []

    def wait(layer: int) -> None:
        with pytest.raises(TransferFailed) as raised:
            incoming.wait_layer(layer, WAIT_S)
        errors.append(raised.value.reason)

    threads = [threading.Thread(target=wait, args=(layer % LAYERS,)) for layer in range(6)]
    for thread in threads:
        thread.start()
    incoming.cancel(Reason(Code.ABORTED, "enough"))
    for thread in threads:
        thread.join(WAIT_S)
    assert errors == [Reason(Code.ABORTED, "enough")] * 6


def test_receiver_that_leaves_early_keeps_its_blocks_until_the_sender_is_quiet(pair: Pair) -> None:
    pair.hub.hold = True
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    with pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS)) as incoming:
        outgoing.layer_ready(0)
        until(lambda: bool(pair.hub.open_batches), "a layer is in flight")
    with pytest.raises(TransferFailed, match="aborted"):
        incoming.wait(WAIT_S)
    assert not incoming.released.wait(0.1)
    assert num_held(pair.decode, DST) == len(DST)
    pair.hub.hold = False
    pair.hub.deliver_all()
    assert incoming.released.wait(WAIT_S)
    assert num_held(pair.decode, DST) == 0


def test_sender_that_leaves_early_keeps_its_blocks_until_nothing_reads_them(pair: Pair) -> None:
    pair.hub.hold = True
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    freed = threading.Event()

    def fail() -> None:
        with pair.prefill.send("t", [SRC], TOKENS) as outgoing:
            outgoing.released.then(freed.set)
            outgoing.layer_ready(0)
            until(lambda: bool(pair.hub.open_batches), "a layer is in flight")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(TransferFailed, match="aborted: by ZeroDivisionError"):
        incoming.wait(WAIT_S)
    assert not freed.is_set()
    assert num_held(pair.prefill, SRC) == len(SRC)
    pair.hub.hold = False
    pair.hub.deliver_all()
    assert freed.wait(WAIT_S)
    assert num_held(pair.prefill, SRC) == 0


def test_finished_sender_may_leave_before_the_receiver_comes(pair: Pair) -> None:
    with pair.prefill.send("t", [SRC], TOKENS) as outgoing:
        compute(outgoing)
    with pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS)) as incoming:
        assert incoming.wait(WAIT_S) == 42
    assert_same(pair.prefill, pair.decode)


async def test_both_ends_can_be_awaited(pair: Pair) -> None:
    async with asyncio.timeout(WAIT_S):
        async with pair.prefill.send("t", [SRC], TOKENS) as outgoing:
            async with pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS)) as incoming:
                await outgoing.accepted
                compute(outgoing, range(1))
                await incoming.layer(0)
                compute(outgoing, range(1, LAYERS))
                assert await incoming == 42
            await outgoing
        await outgoing.released
        await incoming.released
        await incoming.layer(2)


async def test_failure_is_raised_where_it_is_awaited(pair: Pair) -> None:
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await incoming
    waits = asyncio.gather(incoming.layer(1), asyncio.ensure_future(_token(incoming)), return_exceptions=True)
    await asyncio.sleep(0)
    incoming.cancel(Reason(Code.ABORTED, "enough"))
    async with asyncio.timeout(WAIT_S):
        assert [getattr(error, "reason", error) for error in await waits] == [
            Reason(Code.ABORTED, "enough"),
            Reason(Code.ABORTED, "enough"),
        ]


async def _token(incoming: pdlink.Incoming) -> int:
    return await incoming


def test_callback_that_waits_is_told_that_it_cannot(pair: Pair) -> None:
    heard: list[str] = []
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    incoming = pair.decode.receive("t", pair.prefill.address)

    def wait() -> None:
        try:
            incoming.wait(WAIT_S)
        except RuntimeError as error:
            heard.append(str(error))

    outgoing.accepted.then(wait)
    until(lambda: bool(heard), "the callback was called")
    assert heard[0].startswith("a callback of a transfer cannot wait")


@pytest.mark.parametrize("well", [True, False])
def test_blocks_go_back_and_waiters_wake_though_a_callback_raises(pair: Pair, well: bool) -> None:
    def raises() -> None:
        raise ZeroDivisionError

    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    layer = incoming._signal(1)
    outgoing.done.then(raises)
    incoming.done.then(raises)
    if well:
        compute(outgoing)
        assert incoming.sampled.wait(WAIT_S)
    else:
        incoming.cancel()
    assert layer.wait(WAIT_S)
    for end, node, blocks in ((outgoing, pair.prefill, SRC), (incoming, pair.decode, DST)):
        assert end.released.wait(WAIT_S)
        assert num_held(node, blocks) == 0


def test_every_callback_runs_though_one_of_them_raises(pair: Pair) -> None:
    second = threading.Event()
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    outgoing.released.then(lambda: [][0])
    outgoing.released.then(second.set)
    outgoing.cancel()
    assert second.wait(WAIT_S)


def test_closing_a_node_fails_its_transfers_and_those_of_its_peer(pair: Pair) -> None:
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    assert outgoing.accepted.wait(WAIT_S)
    pair.prefill.close()
    for end in (outgoing, incoming):
        with pytest.raises(TransferFailed):
            end.wait(WAIT_S)
        assert end.released.wait(WAIT_S)
    for again in (lambda: pair.prefill.send("u"), lambda: pair.prefill.receive("u", pair.decode.address)):
        with pytest.raises(TransferFailed, match="node prefill is closed"):
            again()


def test_transfers_fail_when_the_nodes_loop_dies(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    died = threading.Event()
    node = pair.node("mortal", 4, on_death=died.set)
    outgoing = node.send("t", [SRC], TOKENS)
    monkeypatch.setattr(node.endpoint, "turn", lambda *_: [][0])
    with pytest.raises(TransferFailed, match="loop has died: IndexError"):
        outgoing.wait(WAIT_S)
    assert died.wait(WAIT_S)
    assert not outgoing.released.is_set(), "nobody knows whether a peer still reads the blocks"
    node.close()


def test_id_that_was_used_is_refused_and_leaves_the_first_transfer_alone(pair: Pair) -> None:
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    with pytest.raises(InvalidRequest, match="every attempt needs a new one"):
        pair.prefill.send("t", [SRC], TOKENS)
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    compute(outgoing)
    assert incoming.wait(WAIT_S) == 42


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (range(30), r"blocks: got an offer of 3 blocks; tokens \[0, 30\) take 4"),
        (range(0, TOKENS, 2), "tokens: got range.*, with a step of 1"),
        (range(-1, TOKENS), "tokens: got range.*from 0 or later on"),
    ],
)
def test_blocks_that_do_not_fit_the_tokens_are_refused(pair: Pair, tokens: range, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pair.decode.receive("t", pair.prefill.address, [DST], tokens)


def test_layer_that_is_not_there_is_refused(pair: Pair) -> None:
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    with pytest.raises(InvalidRequest, match="layer: got 3; expected 0 to 2"):
        incoming.wait_layer(3)
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    for layer in (-1, 3):
        with pytest.raises(InvalidRequest, match=f"layer: got {layer}; expected 0 to 2"):
            outgoing.layer_ready(layer)
    compute(outgoing)
    assert incoming.wait(WAIT_S) == 42


def test_other_hosts_take_keys_or_a_word() -> None:
    with pytest.raises(ConfigError, match=r"listen: other hosts can reach 0\.0\.0\.0.*pass credentials"):
        pdlink.Node("n", groups(4), listen=pdlink.LinkListen(address="0.0.0.0"))


def test_address_of_another_host_is_not_dialed_without_keys(pair: Pair) -> None:
    with pytest.raises(PeerNotAllowed, match="192.0.2.1"):
        pair.decode.receive("t", "tcp://192.0.2.1:8500")


def test_name_that_no_worker_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="name: got 'a b'"):
        pdlink.Node("a b", groups(4))


def test_buffer_that_is_too_small_is_refused_with_both_sizes() -> None:
    with pytest.raises(LayoutMismatch, match=r"buffers\[0\]: got 100 bytes, the layout reaches to byte 24576"):
        pdlink.Node("n", groups(4), [bytearray(100)])


def device_pair(pair: Pair) -> tuple[pdlink.Node, DeviceLike]:
    memory = DeviceLike(groups(4).extent(0))
    node = pdlink.Node("gpu", groups(4), [memory], transports=[LoopbackTransport(pair.hub)])
    fill(node)
    return node, memory


def test_layers_in_device_memory_leave_when_their_event_is_reached(pair: Pair) -> None:
    node, memory = device_pair(pair)
    incoming = pair.decode.receive("t", node.address, [DST], range(TOKENS))
    with node.send("t", [SRC], TOKENS) as outgoing:
        compute(outgoing)
        assert not incoming.done.wait(0.05), "nothing is written yet"
        for event in memory.gpu.events:
            assert event.num_records
            event.reach()
        assert incoming.wait(WAIT_S) == 42
    assert_same(node, pair.decode)
    node.close()
    memory.close()


def test_kernel_that_fails_ends_the_transfer(pair: Pair) -> None:
    node, memory = device_pair(pair)
    incoming = pair.decode.receive("t", node.address, [DST], range(TOKENS))
    with node.send("t", [SRC], TOKENS) as outgoing:
        outgoing.layer_ready(0)
        memory.gpu.reach(failure="an illegal memory access")
        with pytest.raises(TransferFailed, match="illegal memory access"):
            incoming.wait(WAIT_S)
    node.close()
    memory.close()


def test_failed_opening_leaves_nothing_open(steady_descriptors: None) -> None:
    class Broken(LoopbackTransport):
        def fileno(self) -> int:
            raise ConfigError("no descriptor")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="no descriptor"):
        pdlink.Node("n", groups(4), transports=[Broken(LoopbackHub())], pool=BlockPool(32))
    gc.collect()  # the error's traceback holds views of the memory
    assert len(os.listdir("/proc/self/fd")) <= before


def test_process_that_ends_with_its_node_open_speaks_of_no_leak() -> None:
    """Its threads hold the native engines to the last; nanobind would call each a leak, on the user's terminal."""
    program = """
import pdlink
from tests.node.conftest import groups
node = pdlink.Node("left-open", groups(4))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr


def test_closed_node_frees_its_native_engines() -> None:
    prefill, decode = (pdlink.Node(name, groups(4), deadlines=TIMEOUTS) for name in ("prefill", "decode"))
    engines = [
        weakref.ref(transport) for node in (prefill, decode) for transport in node.endpoint.transports.values()
    ]
    assert engines
    outgoing = prefill.send("t", [SRC], TOKENS)
    incoming = decode.receive("t", prefill.address, [SRC], range(TOKENS))
    compute(outgoing)
    incoming.wait(WAIT_S)
    outgoing.wait(WAIT_S)
    decode.close()
    prefill.close()
    gc.collect()
    assert [engine for engine in engines if engine() is not None] == [], "the handles are still here"
    assert outgoing.released.is_set()


def test_live_transfers_show_their_layers_and_end(pair: Pair) -> None:
    pair.hub.hold = True
    outgoing = pair.prefill.send("t", [SRC], TOKENS)
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    assert outgoing.accepted.wait(WAIT_S)
    outgoing.layer_ready(0)
    until(lambda: bool(pair.hub.open_batches), "a layer is in flight")
    (sent,), (received,) = pair.prefill.transfers(), pair.decode.transfers()
    assert (sent.transfer_id, sent.side, sent.peer, sent.num_tokens, sent.nbytes) == ("t", "sender", "decode", 21, 0)
    assert sent.layers == "f.."
    assert (received.transfer_id, received.side, received.peer) == ("t", "receiver", "prefill")
    assert received.num_tokens == TOKENS
    assert sent.age_s >= 0
    pair.hub.hold = False
    pair.hub.deliver_all()
    compute(outgoing, range(1, LAYERS))
    incoming.wait(WAIT_S)
    outgoing.wait(WAIT_S)
    assert pair.prefill.transfers() == pair.decode.transfers() == []
