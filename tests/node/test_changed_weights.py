"""Weights that are changed in place: KV crosses between equal weights only, and none of the weights before."""

from __future__ import annotations

import itertools

import pytest

from pdlink.errors import TransferFailed
from pdlink.reasons import Code
from tests.waiting import WAIT_S, until

from .conftest import DST, SRC, TOKENS, Pair, assert_same, compute


def transfer(pair: Pair, name: str) -> str:
    """Why it failed, or nothing. Every end has let go of its blocks."""
    outgoing = pair.prefill.send(name, [SRC], TOKENS)
    compute(outgoing)
    try:
        incoming = pair.decode.receive(name, pair.prefill.address, [DST], range(TOKENS))
        incoming.wait(WAIT_S)
    except TransferFailed as error:
        outgoing.cancel()
        assert outgoing.released.wait(WAIT_S)
        return error.reason.label
    assert_same(pair.prefill, pair.decode)
    assert outgoing.released.wait(WAIT_S)
    assert incoming.released.wait(WAIT_S)
    return ""


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_pair_is_refused_until_both_have_the_same_weights(pair: Pair, first: str) -> None:
    assert transfer(pair, "before") == ""
    before = pair.prefill.endpoint.fingerprint
    nodes = [pair.prefill, pair.decode] if first == "prefill" else [pair.decode, pair.prefill]
    nodes[0].change_content("new")
    until(lambda: not nodes[0].endpoint.peers(), "the session has ended")
    assert transfer(pair, "one of them") in ("refused:content", "peer_lost", "weights_changed")
    assert transfer(pair, "one of them, for sure") == "refused:content"
    nodes[1].change_content("new")
    if first == "decode":  # it does not ask prefill again before its pause is over
        ids = itertools.count()
        until(lambda: not transfer(pair, f"both {next(ids)}"), "decode has asked again")
    assert transfer(pair, "both") == ""
    assert pair.prefill.endpoint.fingerprint == pair.decode.endpoint.fingerprint != before


def test_kv_of_the_weights_before_is_not_sent_and_not_taken(pair: Pair) -> None:
    """Both had the change, and only the transfers are older."""
    waiting = pair.prefill.send("nobody has asked", [SRC], TOKENS)
    compute(waiting)
    outgoing = pair.prefill.send("t")
    incoming = pair.decode.receive("t", pair.prefill.address, [DST], range(TOKENS))
    assert outgoing.accepted.wait(WAIT_S)
    for node in (pair.decode, pair.prefill):
        node.change_content("new")
    for end in (waiting, outgoing, incoming):
        with pytest.raises(TransferFailed) as failed:
            end.wait(WAIT_S)
        assert failed.value.reason.code in (Code.WEIGHTS_CHANGED, Code.PEER_LOST)
        assert end.released.wait(WAIT_S)
    assert transfer(pair, "after") == ""


def test_the_same_weights_again_end_nothing(pair: Pair) -> None:
    assert transfer(pair, "before") == ""
    session = pair.prefill.endpoint.peers()
    pair.prefill.change_content("")
    assert transfer(pair, "after") == ""
    assert pair.prefill.endpoint.peers() == session
