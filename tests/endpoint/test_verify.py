"""Checksums end to end: right bytes pass, one wrong byte fails the transfer and names its layer."""

from __future__ import annotations

import pytest

from pdlink.protocol.messages import Verify

from .conftest import Handler, Pair, until

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


def begin(pair: Pair, name: str, verify: Verify, start: int = 0) -> Handler:
    pair.announce(name)
    handler = pair.expect(name)
    pair.decode.endpoint.receiver.offer(name, DST[start // 8 :], start, TOKENS, verify=verify)
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
    until(lambda: len(pair.hub.flights) == 3, "three layers are in flight")
    flights = list(pair.hub.flights)
    for flight in flights:
        pair.hub.land(flight, report=False)
    place = pair.decode.layout.layers[1]
    pair.decode.buffer.array[place.parts[0].offset + DST[2] * place.block_stride + 4 * place.token_stride] ^= 1
    for flight in flights:
        pair.hub.report(flight)
    assert handler.wait() == ["failed checksum of layer 1, tokens [0, 21) differs", "released"]


def test_without_verify_nobody_would_have_noticed(pair: Pair) -> None:
    """The cost of `off`, shown: the same damage passes."""
    pair.hub.hold = True
    handler = begin(pair, "t", "off")
    until(lambda: len(pair.hub.flights) == 3, "three layers are in flight")
    flights = list(pair.hub.flights)
    for flight in flights:
        pair.hub.land(flight, report=False)
    place = pair.decode.layout.layers[1]
    pair.decode.buffer.array[place.parts[0].offset + DST[2] * place.block_stride] ^= 1
    for flight in flights:
        pair.hub.report(flight)
    assert handler.wait() == ["ready 42", "released"]
