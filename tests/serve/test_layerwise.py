"""Decode begins with the layers that have landed: two nodes, two engines, a link that lands what the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from pdlink.engine.request import GenerationRequest, SamplingParams
from pdlink.errors import TransferFailed
from pdlink.kv.groups import KVGroups
from pdlink.node.node import Node
from pdlink.node.port import EnginePort
from pdlink.protocol.deadlines import Deadlines
from pdlink.reasons import Reason
from pdlink.serve.stream import DecodeLeg, Stream
from tests.engine.small import NUM_LAYERS, Rig, oracle, prompt_of, rig
from tests.loopback import LoopbackHub, LoopbackTransport
from tests.waiting import until

PROMPT, MAX_TOKENS = prompt_of(43), 8
TIMEOUTS = Deadlines(heartbeat_s=0.05, peer_s=5.0, connect_s=6.0, lease_s=7.0, request_s=60.0)


@dataclass
class Link:
    """A prompt that prefill has computed, all its layers in flight, and a decode engine that has reserved blocks."""

    hub: LoopbackHub
    decode: Rig
    port: EnginePort
    stream: Stream
    leg: DecodeLeg
    asked: list[int]

    def land(self, layer: int) -> None:
        self.hub.land(self.hub.open_batches[0])
        until(lambda: self.leg.incoming.has_layer(layer), f"layer {layer} is here")


async def _stream() -> Stream:
    return Stream("r", len(PROMPT), 60.0)


@pytest.fixture
def link() -> Iterator[Link]:
    torch.set_num_threads(1)
    hub = LoopbackHub()
    prefill, decode = rig(), rig()
    nodes = [
        Node(
            name,
            KVGroups((worker.cache.layout,)),
            [worker.cache.buffer],
            pool=worker.pool,
            transports=[LoopbackTransport(hub)],
            deadlines=TIMEOUTS,
        )
        for name, worker in (("prefill", prefill), ("decode", decode))
    ]
    first = prefill.generate(PROMPT, 1)[0]
    table = prefill.pool.take(prefill.pool.num_free)  # the blocks of the ended request, as it left them
    outgoing = nodes[0].send("t")
    outgoing.publish([prefill.heard.tables["r"]], len(PROMPT), 0)
    port = EnginePort(nodes[1])
    stream = asyncio.run(_stream())
    leg = DecodeLeg(stream, "t", nodes[0].address, decode.engine, port, recompute=True)
    link = Link(hub, decode, port, stream, leg, [])

    def layer_needed(name: str, layer: int, timeout_s: float) -> bool:
        link.asked.append(layer)
        if layer > 0:
            assert not leg.incoming.has_layer(layer), "the pass has come this far before the layer"
            link.land(layer)
        return port.layer_needed(name, layer, timeout_s)

    decode.heard.on_layer_needed = layer_needed
    decode.engine.submit(
        GenerationRequest("r", PROMPT, SamplingParams(max_tokens=MAX_TOKENS), external_tokens=len(PROMPT))
    )
    leg.submitted()
    decode.engine.step()
    for part in (part for layer in range(NUM_LAYERS) for part in decode.cache.views(layer)):
        part[list(decode.heard.tables["r"])] = float("nan")  # what has not landed would spoil the answer
    hub.hold = True
    port.admitted("r", [decode.heard.tables["r"]], 0)
    until(lambda: nodes[0].report().sending["writing"] == 1, "the offer is here")
    for layer in range(NUM_LAYERS):
        outgoing.layer_ready(layer)
        until(lambda num=layer + 1: len(hub.open_batches) == num, f"layer {layer} is in flight")  # type: ignore[misc]
    outgoing.finish(first)
    yield link
    hub.hold = False
    hub.deliver_all()
    for node in reversed(nodes):
        node.close()
    prefill.pool.give_back(table)


def test_decode_begins_when_one_layer_of_three_has_landed_and_gives_the_same_tokens(link: Link) -> None:
    assert not link.leg.incoming.sampled.is_set()
    link.land(0)
    until(link.leg.incoming.sampled.is_set, "the first token is known")
    link.decode.run()
    assert link.asked == list(range(NUM_LAYERS))
    until(link.leg.incoming.done.is_set, "all KV is here")
    link.decode.run()
    assert link.decode.heard.tokens("r") == oracle(PROMPT, MAX_TOKENS)
    assert link.asked == list(range(NUM_LAYERS)), "there was one early pass"


def test_a_transfer_that_fails_during_the_pass_is_computed_here(link: Link) -> None:
    link.land(0)
    until(link.leg.incoming.sampled.is_set, "the first token is known")

    def layer_needed(name: str, layer: int, timeout_s: float) -> bool:
        if layer == 1:
            threading.Thread(target=link.leg.incoming.cancel, args=(Reason.of("enough"),)).start()
        return link.port.layer_needed(name, layer, 20 * timeout_s)

    link.decode.heard.on_layer_needed = layer_needed
    link.decode.run()
    until(link.leg.incoming.done.is_set, "the transfer has failed")
    link.decode.run()
    assert isinstance(link.leg.incoming.error, TransferFailed)
    assert link.decode.heard.tokens("r") == oracle(PROMPT, MAX_TOKENS)
    assert link.stream.kv_path.startswith("recomputed")
