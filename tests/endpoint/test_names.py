"""One name is one live worker: a restarted one takes its own place, a second one is refused."""

from __future__ import annotations

import pytest

from pdlink.events import PeerChanged
from pdlink.protocol import messages
from pdlink.protocol.deadlines import Deadlines
from tests.attacks.stranger import FalsePrefill, Stranger
from tests.loopback import LOOPBACK
from tests.waiting import WAIT_S, until

from .conftest import TIMEOUTS, Handler, Node, Pair, layout

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21
NEVER_SILENT = Deadlines(
    heartbeat_s=0.05, peer_s=5 * WAIT_S, connect_s=5 * WAIT_S, lease_s=6 * WAIT_S, request_s=7 * WAIT_S
)


def transfer(pair: Pair, decode: Node, name: str) -> list[str]:
    log, handler = pair.announce(name), Handler()
    decode.receiver.expect(name, pair.prefill.endpoint.address, handler)
    decode.receiver.offer(name, DST, 0, TOKENS)
    pair.compute(name, SRC, TOKENS)
    heard = handler.wait()
    pair.prefill.sender.cancel(name, "test over")
    log.wait()
    return heard


def test_second_live_worker_of_a_name_is_refused_with_both_addresses_and_the_first_one_stays(pair: Pair) -> None:
    """Two hosts with one configuration: they threw each other out at every request."""
    assert transfer(pair, pair.decode, "t") == ["ready 42", "released"]
    (first,) = pair.prefill.endpoint.peers()
    second = Node(pair.hub, "decode", layout(8), TIMEOUTS).open()
    refused = transfer(pair, second, "u")[0]
    assert refused.startswith("failed refused:name_in_use: name_in_use differs: ")
    assert f"decode at {second.endpoint.address}" in refused
    assert f"decode is connected already, and listens at {pair.decode.endpoint.address}" in refused
    assert "give one of the two workers another `name`" in refused
    assert transfer(pair, pair.decode, "v") == ["ready 42", "released"]
    assert pair.prefill.endpoint.peers() == [first]
    assert [entry.factor for entry in pair.prefill.endpoint.refused()] == ["name_in_use"]
    assert any(
        isinstance(event, PeerChanged) and (event.state, event.reason) == ("refused", "name_in_use")
        for event in pair.events
    )
    second.close()


def test_second_worker_of_a_name_gets_in_when_the_first_one_has_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink.endpoint.known.FIRST_PAUSE_S", 0.0)
    assert transfer(pair, pair.decode, "t") == ["ready 42", "released"]
    second = Node(pair.hub, "decode", layout(8), TIMEOUTS).open()
    assert transfer(pair, second, "u")[0].startswith("failed refused:name_in_use: name_in_use")
    pair.decode.close()
    assert transfer(pair, second, "v") == ["ready 42", "released"]
    assert pair.prefill.endpoint.refused() == []
    second.close()


def test_worker_that_died_without_a_word_is_replaced_at_once() -> None:
    """Only the kernel tells: its connection is cut, and it will not be missed by its silence for long."""
    pair = Pair(NEVER_SILENT)
    with Stranger(pair, name="decode").join():
        until(lambda: [peer.state.value for peer in pair.prefill.endpoint.peers()] == ["ready"], "it is a peer")
    assert transfer(pair, pair.decode, "t") == ["ready 42", "released"]
    pair.close()


def test_worker_that_died_in_its_handshake_is_replaced_at_once() -> None:
    pair = Pair(NEVER_SILENT)
    with Stranger(pair, name="decode") as dying:
        dying.hello()
        dying.hear(messages.Welcome)
    assert transfer(pair, pair.decode, "t") == ["ready 42", "released"]
    pair.close()


NO_NAMES = ["", "a b", "decode\n2026 CRITICAL all is lost", "\x1b[2J", "a@b", "x" * 256, "\u202e"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_dialer_whose_name_would_forge_a_line_of_the_log_is_refused(
    pair: Pair, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with Stranger(pair, name=name) as stranger:
        stranger.hello()
        refusal = stranger.hear(messages.Refuse)
    assert refusal.factor == "name"
    assert refusal.local.startswith("up to 4 parts of up to 64 letters")
    assert not pair.prefill.endpoint.peers()
    assert all(line.isprintable() for line in caplog.messages)


@pytest.mark.parametrize("name", NO_NAMES)
def test_listener_whose_name_would_forge_a_line_of_the_log_is_refused(
    pair: Pair, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    handler = Handler()
    with FalsePrefill(pair) as false:
        pair.decode.receiver.expect("t", false.address, handler)
        false.hear(messages.Hello)
        false.say(messages.Welcome(name, pair.prefill.endpoint.local.identity, LOOPBACK), src=name)
        assert false.hear(messages.Refuse).factor == "name"
    assert handler.wait()[0].startswith("failed refused:name: name differs: ")
    assert all(line.isprintable() for line in caplog.messages)


def test_sessions_never_share_a_key(pair: Pair) -> None:
    """Leases and data connections are kept by it; `a@b`, `c` and `a`, `b@c` once had the same."""
    keys = set()
    for number in range(20):
        with Stranger(pair, name=f"d{number % 3}").join() as stranger:
            until(
                lambda s=stranger: any(p.epoch == s.epoch for p in pair.prefill.endpoint.peers()),  # type: ignore[misc]
                "it is a peer",
            )
            keys |= {peer.key for peer in pair.prefill.endpoint.peers() if peer.epoch == stranger.epoch}
    assert len(keys) == 20
