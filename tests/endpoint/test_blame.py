"""An exception costs who caused it: a frame its peer, a command its caller, a callback a log line. Never a worker."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdlink.errors import ConfigError, TransferFailed
from pdlink.events import HandlingFailed, PeerChanged
from pdlink.protocol import messages
from pdlink.protocol.messages import VERSION
from pdlink.reasons import Code, Reason
from tests.attacks.processes import Holdings
from tests.attacks.stranger import Stranger
from tests.endpoint.conftest import TIMEOUTS, Handler, Node, Pair, SenderLog, layout
from tests.loopback import LoopbackHub, LoopbackTransport
from tests.waiting import WAIT_S, until

SRC, DST, TOKENS = [3, 0, 9, 4], [5, 1], 13


class Unexpected(Exception):
    """Nobody catches this by name."""


def fail(*_: object, **__: object) -> Any:
    raise Unexpected("found by a peer")


@pytest.fixture(autouse=True)
def alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """After everything both loops live, and a new transfer brings its bytes."""
    pair = request.getfixturevalue("pair") if "pair" in request.fixturenames else None
    yield
    if pair is not None:
        assert pair.transfer("the one after", SRC, DST, TOKENS) == ["ready 42", "released"]
        until(pair.idle, "nothing is held")
        assert (pair.prefill.endpoint.failure, pair.decode.endpoint.failure) == ("", "")


def failures(pair: Pair) -> list[str]:
    return [event.what for event in pair.events if isinstance(event, HandlingFailed)]


def lost(pair: Pair) -> list[str]:
    return [event.peer for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]


def once(
    monkeypatch: pytest.MonkeyPatch, target: object, name: str, when: Callable[..., bool] = lambda *_: True
) -> None:
    """Let a method raise when it is first called with arguments for which `when` holds."""
    honest = getattr(target, name)
    spent: list[bool] = []

    def method(*args: Any, **kwargs: Any) -> Any:
        if not spent and when(*args):
            spent.append(True)
            fail()
        return honest(*args, **kwargs)

    monkeypatch.setattr(target, name, method)


def test_a_frame_that_cannot_be_handled_costs_its_peer_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, handler = pair.begin("theirs", DST, TOKENS)
    once(monkeypatch, pair.prefill.endpoint.sender, "on_message", lambda peer, _: peer.name == "stranger")
    with Stranger(pair).join() as stranger:
        stranger.say(messages.Expect("mine"))
        assert "Unexpected" in stranger.hear(messages.Bye).reason
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]
    assert failures(pair) == ["frame"]
    assert lost(pair) == ["stranger"]


def test_a_hello_that_cannot_be_handled_costs_its_route_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    once(monkeypatch, pair.prefill.endpoint.sessions.greeter, "on_hello")
    with Stranger(pair) as stranger:
        stranger.hello()
        assert stranger.hear(messages.Bye)
    assert (failures(pair), lost(pair)) == (["frame"], [])


def test_a_frame_that_cannot_even_be_read_costs_nobody_else(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = messages.decode
    monkeypatch.setattr(messages, "decode", lambda frame: fail() if frame == b"poison" else honest(frame))
    with Stranger(pair) as stranger:
        stranger.raw(b"poison")
        until(lambda: failures(pair) == ["frame", "frame"], "it was tried, and an answer to it as well")


def test_an_answer_that_cannot_be_sent_costs_its_peer_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = messages.encode

    def encode(envelope: messages.Envelope) -> bytes:
        return fail() if isinstance(envelope.bodies[0], messages.Quiet | messages.Stop) else honest(envelope)

    with Stranger(pair).join() as stranger:
        monkeypatch.setattr(messages, "encode", encode)
        stranger.raw(honest(messages.Envelope(VERSION, "stranger", stranger.epoch, pair.prefill.endpoint.epoch, 1, 2, (messages.Stop("x", ""),))))  # fmt: skip  # noqa: E501
        assert "message" in stranger.hear(messages.Bye).reason
        monkeypatch.setattr(messages, "encode", honest)
    assert failures(pair) == ["message"]


def test_a_dial_that_raises_fails_the_transfers_that_wanted_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    once(monkeypatch, pair.decode.endpoint._channel, "dial")
    handler = pair.expect("t")
    failed, released = handler.wait()
    assert "Unexpected" in failed
    assert released == "released"
    assert failures(pair) == ["command"]


def test_a_command_that_raises_costs_its_caller_only(pair: Pair) -> None:
    paid: list[Reason] = []
    pair.decode.endpoint.work.call(fail, paid.append)
    pair.decode.endpoint.work.call(fail)
    until(lambda: failures(pair) == ["command"] * 2, "both have failed")
    assert paid == [Reason(Code.HANDLING_FAILED, "command could not be handled: Unexpected")]


@pytest.mark.parametrize("which", ["ready", "failed", "released"])
def test_a_callback_that_raises_costs_a_line_in_the_log(
    pair: Pair, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Handler):
        """An embedding's, with a bug."""

    setattr(Faulty, which, fail)
    handler = Faulty()
    pair.decode.receiver.expect("t", pair.prefill.endpoint.address, handler)
    pair.announce("t")
    if which == "failed":
        pair.prefill.sender.cancel("t", "changed my mind")
    else:
        pair.decode.receiver.offer("t", DST, 0, TOKENS)
        pair.compute("t", SRC, TOKENS)
    until(lambda: failures(pair) == ["callback"], "it has raised")
    assert "a callback could not be handled: Unexpected" in caplog.text
    assert lost(pair) == []


def test_a_question_about_blocks_that_raises_costs_a_line_in_the_log(pair: Pair) -> None:
    pair.prefill.endpoint._ask_short_of_blocks = fail
    until(lambda: "callback" in failures(pair), "it was asked")
    pair.prefill.endpoint._ask_short_of_blocks = lambda: False


def test_news_of_a_transport_that_cannot_be_handled_costs_its_peer_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, pair.prefill.endpoint.sender.data_path, "ended")
    log = pair.announce("t")
    handler = pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    pair.compute("t", SRC, TOKENS)
    failed, released = handler.wait()
    assert "Unexpected" in failed
    assert released == "released"
    assert log.wait()[-1] == "end"
    assert failures(pair) == ["occurrence"]


def test_the_log_hears_of_a_flood_of_failures_once_a_second(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with pair.decode.endpoint.lock:
        for _ in range(1000):
            pair.decode.endpoint.work.call(fail)
    until(lambda: len(failures(pair)) == 1000, "all have failed")
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert 1 <= len(told) <= 10
    assert told[0].exc_info is not None


@pytest.mark.parametrize("error", [OverflowError("Python int too large"), ValueError("no such block"), Unexpected()])
def test_a_push_without_a_plan_fails_its_transfer_and_not_the_engine(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """`layer_ready` runs in the engine's thread: what a peer's numbers make it raise must not come out there."""
    log, handler = pair.begin("t", DST, TOKENS)

    def bind(*_: object) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("pdlink.endpoint.data_path.bind", bind)
        pair.compute("t", SRC, TOKENS)
    failed, released = handler.wait()
    assert failed.startswith("failed push_failed: impossible")
    assert released == "released"
    assert log.wait()[-1] == "end"
    assert lost(pair) == [], "nothing was in flight, so nobody has to be fenced"
    assert pair.prefill.endpoint.sender.push_nbytes() == {"waiting": 0, "in_flight": 0}


def test_a_push_without_a_plan_waits_for_those_in_flight(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.hub.hold = True
    log, handler = pair.begin("t", DST, TOKENS)
    sender = pair.prefill.sender
    sender.publish("t", SRC, TOKENS, 0)
    sender.layer_ready("t", 0, 0, 8)
    with monkeypatch.context() as patched:
        patched.setattr("pdlink.endpoint.data_path.bind", fail)
        sender.layer_ready("t", 0, 8, TOKENS)
    assert not log.ended.wait(0.1), "its first chunk is still read"
    assert len(pair.hub.open_batches) == 1
    pair.hub.hold = False
    pair.hub.deliver_all()
    assert log.wait()[-1] == "end"
    assert handler.wait()[-1] == "released"
    assert lost(pair) == []


def test_a_transport_that_raises_fails_its_peer_and_not_the_engine(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What became of the bytes is not known: the peer is fenced."""
    log, handler = pair.begin("t", DST, TOKENS)
    with monkeypatch.context() as patched:
        patched.setattr(pair.prefill.transport, "submit", fail)
        pair.compute("t", SRC, TOKENS)
    assert handler.wait()[-1] == "released"
    assert log.wait()[-1] == "end"
    assert failures(pair) == ["push"]
    assert lost(pair)[0] == "decode"


class Second(LoopbackTransport):
    """Another kind of transport, for a worker that has two."""

    name = "second"


class TwoTransports(Node):
    def __init__(self, name: str, hubs: tuple[LoopbackHub, LoopbackHub], block_tokens: int) -> None:
        self.died, self.second = threading.Event(), Second(hubs[1])
        transports = [LoopbackTransport(hubs[0]), self.second]
        super().__init__(hubs[0], name, layout(block_tokens), TIMEOUTS, transports=transports, on_death=self.died.set)


@pytest.fixture
def two() -> Iterator[Pair]:
    pair = Pair()
    for node in (pair.prefill, pair.decode):
        node.close()
    hubs = (LoopbackHub(), LoopbackHub())
    pair.hub = hubs[0]
    pair.prefill = TwoTransports("prefill", hubs, 4).open()
    pair.decode = TwoTransports("decode", hubs, 8).open()
    yield pair
    pair.close()


def test_a_transport_that_cannot_be_asked_is_closed_and_the_next_one_taken(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert two.transfer("over the first", SRC, DST, TOKENS) == ["ready 42", "released"]
    prefill = two.prefill.endpoint
    assert [peer.transport.name for peer in prefill.peers() if peer.transport] == ["loopback"]
    monkeypatch.setattr(two.prefill.transport, "poll", fail)
    until(lambda: list(prefill.transports) == ["second"], "the first is given up")
    until(lambda: not two.decode.endpoint.peers(), "decode has heard of it")
    assert two.transfer("over the second", SRC, DST, TOKENS) == ["ready 42", "released"]
    assert prefill.failure == ""


def test_a_worker_without_a_transport_ends(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    node = two.prefill
    assert isinstance(node, TwoTransports)
    for transport in (node.transport, node.second):
        monkeypatch.setattr(transport, "poll", fail)
    assert node.died.wait(WAIT_S)
    assert "was the last one" in node.endpoint.failure
    with pytest.raises(TransferFailed, match="was the last one"):
        node.receiver.expect("t", two.decode.endpoint.address, Handler())


# -- open and close --------------------------------------------------------------------------------------------------


def test_an_endpoint_that_cannot_open_holds_nothing() -> None:
    hub = LoopbackHub()
    taken = Node(hub, "taken", layout(4), TIMEOUTS).open()
    gc.collect()
    before = Holdings.of(os.getpid())
    for _ in range(5):
        node = Node(hub, "late", layout(4), TIMEOUTS)
        with pytest.raises(ConfigError, match="listen.control"):
            node.open(taken.port)
        assert node.transport._state == "closed"
        node.buffer.close()
    del node
    gc.collect()  # a buffer's mapping keeps a descriptor of its own
    assert Holdings.of(os.getpid()).descriptors <= before.descriptors
    taken.close()


def test_what_is_asked_of_a_closed_endpoint_fails_at_once(pair: Pair) -> None:
    node = Node(pair.hub, "another", layout(8), TIMEOUTS).open()
    node.endpoint.close()
    node.endpoint.close()
    with pytest.raises(TransferFailed, match="closed"):
        node.receiver.expect("t", pair.prefill.endpoint.address, Handler())
    node.endpoint.work.call(fail)
    node.endpoint.work.defer(fail)
    node.close()


def test_an_endpoint_cannot_be_closed_in_its_own_thread(pair: Pair) -> None:
    """It would wait for itself; and half closed it could not be closed by anybody."""
    pair.decode.endpoint.work.call(pair.decode.endpoint.close)
    until(lambda: failures(pair) == ["command"], "it is refused")


def test_closing_while_a_callback_is_stuck_neither_hangs_nor_touches_what_the_loop_uses(pair: Pair) -> None:
    node = Node(pair.hub, "slow", layout(8), TIMEOUTS).open()
    stuck, go_on = threading.Event(), threading.Event()

    def callback() -> None:
        stuck.set()
        go_on.wait(WAIT_S)

    node.endpoint.work.defer(callback)
    assert stuck.wait(WAIT_S)
    thread = node.endpoint._thread
    assert thread is not None
    node.endpoint.close(timeout_s=0.05)
    assert thread.is_alive()
    go_on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert node.endpoint.failure == ""
    node.buffer.close()


def test_closing_ends_what_waits_for_a_receiver(pair: Pair) -> None:
    node = Node(pair.hub, "lonely", layout(4), TIMEOUTS).open()
    log = SenderLog()
    node.sender.announce("t", log.failed, log.end)
    node.sender.publish("t", SRC, TOKENS, 0)
    node.close()
    assert log.wait() == ["failed shutdown", "end"]
