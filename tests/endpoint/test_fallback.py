"""A transport that both sides offer and that does not connect: the next one that both have carries the session."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from pdlink.errors import TransportFailure, TransportUnavailable
from pdlink.kv.plan import warm_up
from pdlink.protocol import messages
from pdlink.reasons import Code, Reason
from tests.attacks.stranger import FalsePrefill, Stranger
from tests.loopback import LOOPBACK, LoopbackHub, LoopbackTransport
from tests.waiting import WAIT_S, until

from .conftest import TIMEOUTS, Handler, Node, Pair, layout

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


class Near(LoopbackTransport):
    """What both sides like best."""

    name: ClassVar[str] = "near"
    reach = "host"
    num_connects = 0
    num_closed = 0
    broken: Callable[[str], None] | None = None
    """Called with what is to be done: "invite" or "connect"."""

    def invite(self, peer: str) -> bytes:
        if self.broken:
            self.broken("invite")
        return super().invite(peer)

    def connect(self, peer: str, invitation: bytes) -> None:
        self.num_connects += 1
        if self.broken:
            self.broken("connect")
        super().connect(peer, invitation)

    def close_peer(self, peer: str) -> None:
        self.num_closed += 1
        super().close_peer(peer)


class NearPair(Pair):
    """Workers that have two transports each."""

    near: dict[str, Near]

    def __init__(self, *, hosts: tuple[str, str] = ("host", "host"), far: bool = True) -> None:
        warm_up()
        self.hub, self.timeouts, self.events, self.near = LoopbackHub(), TIMEOUTS, [], {}
        self._stop = lambda: None
        self.prefill, self.decode = self.node("prefill", hosts[0], far=far), self.node("decode", hosts[1], far=far)
        self.prefill.buffer.array[:] = np.random.default_rng(7).integers(0, 256, self.prefill.buffer.nbytes, np.uint8)

    def node(self, name: str, host: str = "host", *, far: bool = True) -> Node:
        kv = layout(4 if name == "prefill" else 8)
        near = self.near[name] = Near(self.hub)
        transports = [near, LoopbackTransport(self.hub)] if far else [near]
        node = Node(self.hub, name, kv, TIMEOUTS, transports=transports).open()
        node.transport = transports[-1]
        node.endpoint.local.identity = replace(node.endpoint.local.identity, host=host)
        return node

    def play(self, name: str) -> list[str]:
        log, handler = self.announce(name), self.expect(name)
        self.decode.receiver.offer(name, DST, 0, TOKENS)
        self.compute(name, SRC, TOKENS)
        heard = handler.wait()
        self.prefill.sender.cancel(name, "test over")
        log.wait()
        return heard

    def used(self) -> list[str]:
        """What carries each session, on both sides."""
        peers = [*self.prefill.endpoint.peers(), *self.decode.endpoint.peers()]
        return [peer.transport.name if peer.transport else "" for peer in peers]

    def check_bytes(self) -> None:
        for number in range(3):
            assert (self.decode.rows(DST, TOKENS, number) == self.prefill.rows(SRC, TOKENS, number)).all()


@pytest.fixture
def near() -> Iterator[NearPair]:
    pair = NearPair()
    yield pair
    pair.close()


def fails(step: str, error: Exception) -> Callable[[str], None]:
    def broken(what: str) -> None:
        if what == step:
            raise error

    return broken


NOT_THAT_USER = TransportFailure("cannot map the memory of the peer; run both processes as the same user")


def test_the_transport_that_both_like_best_is_taken_where_it_works(near: NearPair) -> None:
    assert near.play("t") == ["ready 42", "released"]
    assert near.used() == ["near", "near"]


def test_transport_that_does_not_connect_costs_nothing_but_a_line(
    near: NearPair, caplog: pytest.LogCaptureFixture
) -> None:
    """Mapped memory between two users, UCX between pid namespaces."""
    near.near["prefill"].broken = fails("connect", NOT_THAT_USER)
    assert near.play("t") == ["ready 42", "released"]
    near.check_bytes()
    assert near.used() == ["loopback", "loopback"]
    assert near.prefill.endpoint.refused() == near.decode.endpoint.refused() == []
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"prefill: no near to decode, which falls back on loopback: {NOT_THAT_USER}"]
    assert near.near["decode"].num_closed == 1, "nobody can write through the invitation that was not used"


def test_transport_that_cannot_invite_is_passed_over(near: NearPair, caplog: pytest.LogCaptureFixture) -> None:
    near.near["decode"].broken = fails("invite", TransportUnavailable("no descriptors are left"))
    assert near.play("t") == ["ready 42", "released"]
    near.check_bytes()
    assert near.used() == ["loopback", "loopback"]
    assert (
        "no near to decode, which falls back on loopback: decode cannot invite: no descriptors are left"
        in caplog.text
    )


def test_transport_that_did_not_connect_is_not_tried_again_in_that_life_of_the_peer(near: NearPair) -> None:
    near.near["prefill"].broken = fails("connect", NOT_THAT_USER)
    for number in range(3):
        assert near.play(f"t{number}") == ["ready 42", "released"]
        for peer in near.decode.endpoint.peers():
            with near.decode.endpoint.lock:
                near.decode.endpoint.sessions.lose(peer, Reason(Code.PEER_LOST, "test"))
        until(lambda: not near.prefill.endpoint.peers(), "the session is over")
    assert near.near["prefill"].num_connects == 1
    near.decode.close()
    near.near["prefill"].broken = None
    near.decode = near.node("decode")
    assert near.play("new life") == ["ready 42", "released"]
    assert near.used() == ["near", "near"]


def test_data_connection_that_never_carried_a_byte_makes_room_for_the_next_transport(
    near: NearPair, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection may fail only when it is used: behind a firewall, for one."""
    near.hub.fail_next = 1
    assert "injected failure" in near.play("t")[0]
    assert "no near to decode, which falls back on loopback: injected failure" in caplog.text
    assert near.play("u") == ["ready 42", "released"]
    assert near.used() == ["loopback", "loopback"]


def test_data_connection_that_worked_keeps_its_transport(near: NearPair) -> None:
    assert near.play("t") == ["ready 42", "released"]
    near.hub.fail_next = 1
    assert "injected failure" in near.play("u")[0]
    assert near.play("v") == ["ready 42", "released"]
    assert near.used() == ["near", "near"]


def test_pair_without_another_transport_is_refused_with_the_reason() -> None:
    pair = NearPair(far=False)
    pair.near["prefill"].broken = fails("connect", NOT_THAT_USER)
    heard = pair.play("t")
    assert heard[0].startswith("failed refused:data_connection: data connection differs: ")
    assert str(NOT_THAT_USER) in heard[0]
    assert [entry.factor for entry in pair.decode.endpoint.refused()] == ["data connection"]
    pair.close()


def test_transport_of_one_host_is_not_tried_between_two() -> None:
    pair = NearPair(hosts=("one", "two"))
    assert pair.play("t") == ["ready 42", "released"]
    assert pair.used() == ["loopback", "loopback"]
    assert pair.near["prefill"].num_connects == 0
    pair.close()


def test_pair_without_a_transport_that_reaches_so_far_is_told_what_both_declare() -> None:
    pair = NearPair(hosts=("one", "two"), far=False)
    assert pair.play("t")[0].startswith("failed refused:transport: transport differs: ")
    refusal = pair.decode.endpoint.refused()[0]
    for said, host in ((refusal.local, "two"), (refusal.remote, "one")):
        assert said.startswith("host memory in process ")
        assert said.endswith(f" of host {host}, near (reach host, moves host+cuda, trusts with pool)")
    pair.close()


def test_dialer_opens_nothing_to_a_transport_that_the_listener_declares_too_near(pair: Pair) -> None:
    handler = Handler()
    with FalsePrefill(pair) as false:
        pair.decode.receiver.expect("t", false.address, handler)
        false.hear(messages.Hello)
        elsewhere = replace(pair.prefill.endpoint.local.identity, host="elsewhere")
        false.say(messages.Welcome("false", elsewhere, replace(LOOPBACK, reach="host")))
        refusal = false.hear(messages.Refuse)
        assert refusal.factor == "transport"
        assert "loopback (reach network" in refusal.local
        assert "elsewhere, loopback (reach host" in refusal.remote
    assert handler.wait()[-1] == "released"


def test_blocks_wait_for_the_fence_of_the_transport_that_was_given_up(near: NearPair) -> None:
    """Its invitation was out: until it is closed for good, its holder may write."""
    near.near["prefill"].broken = fails("connect", NOT_THAT_USER)
    near.hub.stop(near.near["decode"])  # reports nothing
    near.announce("t")
    handler = near.expect("t")
    near.decode.receiver.offer("t", DST, 0, TOKENS)
    until(lambda: near.sender_state("writing") == 1, "the offer is there")
    near.decode.receiver.cancel("t", "enough")
    for peer in near.decode.endpoint.peers():
        with near.decode.endpoint.lock:
            near.decode.endpoint.sessions.lose(peer, Reason(Code.PEER_LOST, "test"))
    until(lambda: bool(handler.calls), "the request falls back")
    until(lambda: not near.prefill.endpoint.peers(), "the session is over")
    assert near.decode.endpoint.num_closing() == 1
    near.hub.resume(near.near["decode"])
    assert handler.wait()[-1] == "released"
    until(lambda: near.decode.endpoint.num_closing() == 0, "the fence holds")


def test_listener_cannot_have_a_transport_opened_twice(pair: Pair) -> None:
    handler = Handler()
    with FalsePrefill(pair) as false:
        pair.decode.receiver.expect("t", false.address, handler)
        false.hear(messages.Hello)
        welcome = messages.Welcome("false", pair.prefill.endpoint.local.identity, LOOPBACK)
        false.say(welcome)
        false.hear(messages.Invite)
        false.say(welcome)
        assert false.hear(messages.Refuse).factor == "transport"
    assert handler.wait()[-1] == "released"


def test_nothing_is_said_to_a_listener_that_has_not_connected(pair: Pair) -> None:
    """A dialer takes a session for ready when the listener says so."""
    handler = Handler()
    with FalsePrefill(pair) as false:
        pair.decode.receiver.expect("t", false.address, handler)
        false.hear(messages.Hello)
        false.say(messages.Ready())
        false.say(messages.Welcome("false", pair.prefill.endpoint.local.identity, LOOPBACK))
        false.hear(messages.Invite)
        assert false.hear(messages.Heartbeat), "a lost invitation shows by the gap before it"
        assert [peer.state.value for peer in pair.decode.endpoint.peers()] == ["connecting"]
        false.say(messages.Ready())
        assert false.hear(messages.Expect).transfer_id == "t"
        false.say(messages.Bye("enough"))
    assert handler.wait()[-1] == "released"


def test_dialer_that_can_open_nothing_is_refused(pair: Pair) -> None:
    with Stranger(pair) as stranger:
        stranger.hello()
        stranger.hear(messages.Welcome)
        stranger.say(messages.Invite(b"", "no\nmemory"))
        refusal = stranger.hear(messages.Refuse)
    assert (refusal.factor, refusal.local) == ("data connection", "stranger cannot invite: no?memory")


class Slow:
    """A peer that takes its time to hand out its memory, until it is told to go on."""

    def __init__(self, near: Near) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        near.connects_aside = True  # type: ignore[misc]
        near.broken = self.wait

    def wait(self, what: str) -> None:
        if what == "connect":
            self.began.set()
            assert self.go_on.wait(WAIT_S)


def test_connection_that_waits_for_its_peer_holds_up_no_other_session(near: NearPair) -> None:
    slow = Slow(near.near["prefill"])
    other = near.node("other")
    log, handler = near.announce("t"), near.expect("t")
    assert slow.began.wait(WAIT_S)
    near.near["prefill"].broken = None
    quick, mine = near.announce("u"), Handler()
    other.receiver.expect("u", near.prefill.endpoint.address, mine)
    other.receiver.offer("u", DST, 0, TOKENS)
    near.compute("u", SRC, TOKENS)
    assert mine.wait() == ["ready 42", "released"]
    assert near.sender_state("waiting") == 1
    slow.go_on.set()
    near.decode.receiver.offer("t", DST, 0, TOKENS)
    near.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    near.check_bytes()
    for one in (log, quick):
        one.wait()
    other.close()


def test_connection_of_a_session_that_has_ended_meanwhile_is_closed(near: NearPair) -> None:
    slow = Slow(near.near["prefill"])
    near.announce("t")
    near.expect("t")
    assert slow.began.wait(WAIT_S)
    for peer in near.prefill.endpoint.peers():
        with near.prefill.endpoint.lock:
            near.prefill.endpoint.sessions.lose(peer, Reason(Code.PEER_LOST, "test"))
    assert near.near["prefill"].num_closed == 0
    slow.go_on.set()
    until(lambda: near.near["prefill"].num_closed == 1, "the connection is closed")
