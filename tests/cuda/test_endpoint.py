"""Endpoints whose KV is in device memory: whole transfers by kernel, and a lane that is demanded. On the double."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pdlink.kv.plan import warm_up
from pdlink.transport.base import Transport
from tests.cuda.double import DoubleTransport
from tests.cuda.fake import Fake
from tests.endpoint.conftest import TIMEOUTS, Node, Pair, layout
from tests.loopback import LoopbackHub, LoopbackTransport

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


class DeviceNode(Node):
    """One worker's endpoint over what the double takes for device memory."""

    def __init__(self, name: str, block_tokens: int, require_lane: str | None, *others: Transport) -> None:
        transports = [*others, DoubleTransport()]
        hub, kv = LoopbackHub(), layout(block_tokens)
        super().__init__(hub, name, kv, TIMEOUTS, transports=transports, require_lane=require_lane)


class DevicePair(Pair):
    def __init__(self, require_lane: str | None, *, loopback: bool = False) -> None:
        """loopback: both have another transport that they like better."""
        warm_up()
        self.hub = LoopbackHub()
        self.events = []
        others = [[LoopbackTransport(self.hub)] if loopback else [] for _ in range(2)]
        self.prefill = DeviceNode("prefill", 4, require_lane, *others[0]).open()
        self.decode = DeviceNode("decode", 8, require_lane, *others[1]).open()
        random = np.random.default_rng(7)
        self.prefill.buffer.array[:] = random.integers(0, 256, self.prefill.buffer.nbytes, np.uint8)
        self._stop = lambda: None


@pytest.fixture
def pairs(double: Fake) -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.parametrize("require_lane", [None, "mapped-cuda"])
def test_kv_in_device_memory_arrives_by_kernel(require_lane: str | None, pairs: list[Pair], double: Fake) -> None:
    """Blocks of 4 tokens become blocks of 8, layer by layer."""
    pair = DevicePair(require_lane)
    pairs.append(pair)
    log, handler = pair.announce("t"), pair.expect("t")
    double.take_log()
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]
    for layer in range(3):
        assert np.array_equal(pair.decode.rows(DST, TOKENS, layer), pair.prefill.rows(SRC, TOKENS, layer))
    launches = [call for call, _ in double.take_log()].count("cuLaunchKernel")
    assert 1 <= launches <= 3, "a layer is one launch, or less where several are pushed at once"


def test_lane_that_is_demanded_is_taken_where_another_one_is_preferred(pairs: list[Pair]) -> None:
    pair = DevicePair("mapped-cuda", loopback=True)
    pairs.append(pair)
    pair.announce("t")
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert [peer.lane for peer in pair.prefill.endpoint.peers()] == ["mapped-cuda"]


def test_another_lane_than_the_one_demanded_is_refused(pairs: list[Pair]) -> None:
    pair = DevicePair("tcp", loopback=True)
    pairs.append(pair)
    pair.announce("t")
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    first, last = handler.wait()
    assert "transport.require" in first
    assert "mapped-cuda" in first
    assert "tcp" in first
    assert last == "released"
