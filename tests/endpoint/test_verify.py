"""Checksums end to end: right bytes pass, one wrong byte fails the transfer and names its layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import pytest

from pdlink.memory.checksums import Checksums
from pdlink.protocol.messages import Done, Verify
from pdlink.protocol.receiving import Receiving
from tests.waiting import WAIT_S, until

from .conftest import Handler, Node, Pair

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


def begin(pair: Pair, name: str, verify: Verify, start: int = 0) -> Handler:
    pair.announce(name)
    handler = pair.expect(name)
    pair.decode.receiver.offer(name, DST[start // 8 :], start, TOKENS, verify=verify)
    until(lambda: pair.sender_state("writing") == 1, "the offer is there")
    pair.compute(name, SRC, TOKENS)
    return handler


@pytest.mark.parametrize("verify", ["sample", "all"])
@pytest.mark.parametrize("start", [0, 8, 11])
def test_right_bytes_pass(pair: Pair, verify: Verify, start: int) -> None:
    assert begin(pair, "t", verify, start).wait() == ["ready 42", "released"]


def test_one_byte_that_changed_on_the_way_fails_the_transfer(pair: Pair) -> None:
    pair.hub.hold = True
    handler = begin(pair, "t", "all")
    until(lambda: len(pair.hub.open_batches) == 3, "three layers are in flight")
    batches = list(pair.hub.open_batches)
    for batch in batches:
        pair.hub.land(batch, report=False)
    place = pair.decode.layout.layers[1]
    pair.decode.buffer.array[place.parts[0].offset + DST[2] * place.block_stride + 4 * place.token_stride] ^= 1
    for batch in batches:
        pair.hub.report(batch)
    assert handler.wait() == ["failed checksum: checksum of layer 1, tokens [0, 21) differs", "released"]


def test_without_verify_nobody_would_have_noticed(pair: Pair) -> None:
    """The cost of `off`, shown: the same damage passes."""
    pair.hub.hold = True
    handler = begin(pair, "t", "off")
    until(lambda: len(pair.hub.open_batches) == 3, "three layers are in flight")
    batches = list(pair.hub.open_batches)
    for batch in batches:
        pair.hub.land(batch, report=False)
    place = pair.decode.layout.layers[1]
    pair.decode.buffer.array[place.parts[0].offset + DST[2] * place.block_stride] ^= 1
    for batch in batches:
        pair.hub.report(batch)
    assert handler.wait() == ["ready 42", "released"]


def test_done_with_fewer_checksums_than_layers_fails_the_transfer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = pair.decode.endpoint.verifier
    assert verifier is not None
    mismatch = verifier._mismatch

    def without_the_last(machine: Receiving, done: Done) -> str:
        return mismatch(machine, msgspec.structs.replace(done, checksums=done.checksums[:-1]))

    monkeypatch.setattr(verifier, "_mismatch", without_the_last)
    reason = "checksums: got 42 tokens; 63 were offered"
    assert begin(pair, "t", "all").wait() == [f"failed checksum: {reason}", "released"]


class Reading:
    """Holds up every checksum of a node until it may go on."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        assert node.endpoint.verifier is not None
        checksums = node.endpoint.verifier._checksums
        of = checksums.of

        def wait(layer: int, blocks: Sequence[int], start: int, end: int) -> int:
            self.begun.set()
            assert self.go_on.wait(WAIT_S)
            return of(layer, blocks, start, end)

        monkeypatch.setattr(checksums, "of", wait)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_nobody_waits_while_checksums_are_computed(pair: Pair, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the loop, not who needs the lock; only the transfer itself."""
    reading = Reading(pair.prefill if side == "prefill" else pair.decode, monkeypatch)
    handler = begin(pair, "t", "all")
    assert reading.begun.wait(WAIT_S)
    assert begin(pair, "another", "off").wait() == ["ready 42", "released"]
    until(lambda: "another" not in pair.prefill.endpoint.sender._transfers, "the other one is acknowledged")
    assert handler.calls == []
    assert pair.receiver_state("offered") == 1, "its blocks are kept"
    assert pair.sender_state("writing" if side == "prefill" else "sent") == 1, "nothing is acknowledged"
    reading.go_on.set()
    assert handler.wait() == ["ready 42", "released"]
    until(pair.idle, "nothing is held")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_transfer_can_be_cancelled_while_its_checksums_are_computed(
    pair: Pair, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(pair.prefill if side == "prefill" else pair.decode, monkeypatch)
    handler = begin(pair, "t", "all")
    assert reading.begun.wait(WAIT_S)
    pair.decode.receiver.cancel("t", "enough")
    if side == "prefill":
        until(lambda: pair.sender_state("draining") == 1, "it has heard so")
        assert handler.calls in ([], ["failed aborted: enough"]), "its own blocks are read still"
        reading.go_on.set()
    assert handler.wait() == ["failed aborted: enough", "released"]
    reading.go_on.set()
    until(pair.idle, "nothing is held")
    assert begin(pair, "after", "all").wait() == ["ready 42", "released"]


def test_checksum_that_cannot_be_computed_fails_its_transfer_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Checksums, layer: int, *_: object) -> int:
        raise ValueError(f"layer {layer} cannot be read")

    monkeypatch.setattr(Checksums, "of", fail)
    failed, released = begin(pair, "t", "all").wait()
    assert "ValueError" in failed
    assert released == "released"
    assert begin(pair, "another", "off").wait() == ["ready 42", "released"]
    until(pair.idle, "nothing is held")


def test_endpoint_is_closed_only_when_nothing_reads_its_buffer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(pair.decode, monkeypatch)
    begin(pair, "t", "all")
    assert reading.begun.wait(WAIT_S)
    closing = threading.Thread(target=pair.decode.endpoint.close)
    closing.start()
    verifier = pair.decode.endpoint.verifier
    assert verifier is not None
    until(lambda: verifier.closing, "it is being closed")
    assert closing.is_alive()
    reading.go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
