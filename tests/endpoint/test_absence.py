"""A worker that did not run for a while (SIGSTOP, another thread with the GIL, a suspended machine) has not listened.

What came meanwhile waits to be read. So silence, and every deadline that only news from a peer can renew, counts time
in which the own loop went round.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pdlink.endpoint.data_path import Outgoing
from pdlink.endpoint.peer import PeerState
from pdlink.endpoint.receiver import Incoming
from pdlink.events import PeerChanged
from pdlink.protocol.deadlines import Deadlines
from tests.model.node import TIMEOUTS, Node
from tests.model.world import World
from tests.waiting import WAIT_S, until

from .conftest import Pair

LONG_S = 10 * TIMEOUTS.lease_s


@pytest.fixture
def world() -> World:
    return World(1, "gentle")


def joined(world: World) -> tuple[Node, Node]:
    """A prefill and a decode node with a session between them, in virtual time."""
    prefill, decode = world.nodes[0], world.nodes[-1]
    Incoming(decode.endpoint.receiver, "first", prefill.address)
    for _ in range(4):
        decode.endpoint.turn([])
        prefill.endpoint.turn([])
        world.deliver_all()
    assert [peer.state for peer in decode.endpoint.peers()] == [PeerState.READY]
    assert prefill.endpoint.sender.states()["early"] == 1
    return prefill, decode


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_loop_that_stood_still_reads_before_it_judges_its_peers(world: World, who: str) -> None:
    prefill, decode = joined(world)
    absent, other = (prefill, decode) if who == "prefill" else (decode, prefill)
    other.endpoint.turn([])
    world.advance(LONG_S)
    absent.endpoint.turn([])  # what was sent meanwhile is not delivered yet
    assert len(absent.endpoint.peers()) == 1
    other.endpoint.turn([])
    world.deliver_all()
    for _ in range(20):
        world.advance(0.5)
        for node in (prefill, decode):
            node.endpoint.turn([])
        world.deliver_all()
    assert len(prefill.endpoint.peers()) == len(decode.endpoint.peers()) == 1


def test_peer_that_is_silent_while_we_listen_is_lost(world: World) -> None:
    """However often the loop stood still: that only does not count."""
    _, decode = joined(world)
    for _ in range(int(TIMEOUTS.peer_s / 0.5)):
        world.advance(0.5)
        decode.endpoint.turn([])
    assert len(decode.endpoint.peers()) == 1
    world.advance(LONG_S)
    decode.endpoint.turn([])
    decode.endpoint.turn([])
    assert decode.endpoint.peers() == [], "one absence counts as a heartbeat at most"


def test_promises_do_not_run_out_while_the_loop_stands_still(world: World) -> None:
    """The offer, or the request, that they wait for may have come and wait to be read."""
    prefill, decode = joined(world)
    outgoing = Outgoing(prefill.endpoint.sender, "late")
    Incoming(decode.endpoint.receiver, "late", prefill.address)
    decode.endpoint.turn([])  # its word leaves
    world.advance(LONG_S)
    prefill.endpoint.turn([])
    assert not outgoing.done.is_set()
    assert prefill.endpoint.sender.states()["early"] == 1, "what was expected before"
    decode.endpoint.turn([])
    world.deliver_all()
    assert outgoing.peer is not None


def test_handshake_does_not_run_out_while_the_loop_stands_still(world: World) -> None:
    prefill, decode = world.nodes[0], world.nodes[-1]
    Incoming(decode.endpoint.receiver, "first", prefill.address)
    decode.endpoint.turn([])
    world.deliver(world.network.connections[0], to_listener=True)
    world.advance(LONG_S)
    for _ in range(3):
        decode.endpoint.turn([])
        prefill.endpoint.turn([])
        world.deliver_all()
    assert [peer.state for peer in decode.endpoint.peers()] == [PeerState.READY]


def test_longest_absence_is_told_to_all_who_ask() -> None:
    pair = Pair()
    try:
        endpoint = pair.decode.endpoint
        over = threading.Event()

        def stand_still() -> None:
            time.sleep(0.2)  # the loop's own thread
            over.set()

        endpoint.work.defer(stand_still)
        assert over.wait(WAIT_S)
        until(lambda: endpoint.longest_absence_s() >= 0.2, "the loop has come back")
        assert endpoint.longest_absence_s() >= 0.2, "asking changes nothing"
    finally:
        pair.close()


CHILD = """
import sys, threading
from pdlink.protocol.deadlines import Deadlines
from tests.loopback import LoopbackHub
from pdlink.events import PeerChanged, listen
from tests.endpoint.conftest import Handler, Node, layout
timeouts = Deadlines(heartbeat_s=0.05, peer_s=1.0, connect_s=5.0, lease_s=7.0, request_s=60.0)
listen(lambda event: print(event.state, event.reason, flush=True) if isinstance(event, PeerChanged) else None)
node = Node(LoopbackHub(), "decode", layout(8), timeouts).open()
node.receiver.expect("t", sys.argv[1], Handler())
sys.stdin.read()
node.close()
"""


def test_stopped_process_keeps_its_sessions_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With SIGSTOP, six times: nothing may be judged by a loop that wakes up before the I/O thread has read."""
    patient = Deadlines(heartbeat_s=0.05, peer_s=20.0, connect_s=6.0, lease_s=30.0, request_s=60.0)
    pair = Pair(patient)
    monkeypatch.setattr(pair.prefill.transport, "connect", lambda peer, invitation: None)  # another process's hub
    monkeypatch.setattr(pair.prefill.transport, "lane", lambda peer: "loopback")
    address = pair.prefill.endpoint.address
    command = [sys.executable, "-c", CHILD, address]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready loopback\n"
        for _ in range(6):
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(1.1)  # longer than its peer_s
            os.kill(child.pid, signal.SIGCONT)
            heard_s = pair.prefill.endpoint.peers()[0].heard_s
            until(lambda heard_s=heard_s: pair.prefill.endpoint.peers()[0].heard_s > heard_s, "it speaks again")  # type: ignore[misc]
        assert len(pair.prefill.endpoint.peers()) == 1
        assert [
            event.reason for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"
        ] == []
    finally:
        child.stdin.close()
        child.wait(WAIT_S)
        child.stdout.close()
        pair.close()
