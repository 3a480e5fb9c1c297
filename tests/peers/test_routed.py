"""Stores that a router names: asked for what they are said to have, opened at first use, and never in the way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast

import pytest

from pdlink.errors import ConfigError
from pdlink.fleet.ports import free_ports
from pdlink.peers import routed as routed_peers
from pdlink.peers.link import PeerLink
from pdlink.peers.routed import IDLE_S, LOOK_S, MAX_OPEN, RoutedPeers
from tests.other_process import PATIENCE_S
from tests.waiting import WAIT_S

from .conftest import MakeNode
from .store_node import OtherNode, key


@pytest.fixture
def make_node(make_node: MakeNode) -> MakeNode:
    """Of stores that ask whom they are told of."""
    return partial(make_node, routed=True)


def test_each_prefix_comes_from_the_store_that_is_said_to_have_it(make_node: MakeNode) -> None:
    asker, left, right = (make_node(name) for name in ("asker", "left", "right"))
    left.put(0, 1)
    right.put(10, 11)
    assert asker.read(0) == 0, "nobody says where it is"
    assert asker.pull(left.address(), 0, 1, 2) == 2
    assert asker.pull(right.address(), 10, 11) == 2
    assert asker.pull(left.address(), 10) == 1, "it is in memory here by now"
    assert asker.routed.num_open == 2
    asker.forget()
    assert asker.pull(right.address(), 0) == 0, "that one never had it"
    assert asker.pull(asker.address(), 5) == 0, "it does not ask itself"
    assert asker.routed.num_open == 2
    for node in (asker, left, right):
        node.until_idle()


def test_a_dead_source_is_a_miss_and_keeps_no_other_away(make_node: MakeNode, ends: ExitStack) -> None:
    asker, other = make_node("asker"), make_node("other")
    dying = OtherNode("dying", kind="tcp")
    ends.callback(dying.end)
    dying.call("put", 0, 1)
    other.put(10)
    address = dying.call("address")
    assert asker.pull(address, 0) == 1
    asker.store.comes_from(address, [key(1)])
    found = asker.store.lookup([key(1)], PATIENCE_S)
    assert len(found.keys) == 1
    dying.kill()
    fetch = asker.store.fetch(found, asker.shape, "read")
    assert fetch.done.result(PATIENCE_S) == ()
    assert fetch.close()
    asker.link.timeout_s = 0.5
    for _ in range(5):  # a tier that raised as often would be left alone
        assert asker.pull(address, 1) == 0
        assert asker.pull(f"tcp://127.0.0.1:{free_ports(1)}", 2) == 0
    asker.link.timeout_s = WAIT_S
    assert asker.pull(other.address(), 10) == 1


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups wait as long as their links."""
    monkeypatch.setattr(routed_peers, "LOOK_S", WAIT_S)


@pytest.mark.usefixtures("patient")
def test_a_source_that_does_not_answer_keeps_no_look_up_from_another(make_node: MakeNode, ends: ExitStack) -> None:
    asker, other = make_node("asker"), make_node("other")  # whose links give an answer WAIT_S
    other.put(10)
    silent = ends.enter_context(socket.create_server(("127.0.0.1", 0)))  # as a stopped process
    asker.store.comes_from(f"tcp://127.0.0.1:{silent.getsockname()[1]}", [key(0)])
    stuck = threading.Thread(target=asker.store.lookup, args=([key(0)], WAIT_S))
    stuck.start()
    began_s = time.monotonic()
    connection = ends.enter_context(silent.accept()[0])  # it is asked now
    assert asker.pull(other.address(), 10) == 1
    assert stuck.is_alive()
    assert time.monotonic() - began_s < WAIT_S / 2
    silent.close()
    connection.close()
    stuck.join()


def test_an_address_that_may_not_be_asked_is_a_miss_that_the_log_tells_of(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    asker = make_node("asker")
    for _ in range(100):
        assert asker.pull("tcp://10.0.0.7:8110", 0) == 0
        assert asker.pull("file:///etc/passwd", 0) == 0
    assert asker.routed.num_open == 0
    assert "10.0.0.7" in caplog.text
    assert len(caplog.records) <= 10


@pytest.mark.usefixtures("patient")
def test_a_source_at_which_nobody_listens_is_a_miss_at_once(make_node: MakeNode) -> None:
    asker = make_node("asker")
    for number in range(4):
        asker.store.comes_from(f"tcp://127.0.0.1:{free_ports(1)}", [key(number)])
    began_s = time.monotonic()
    assert asker.store.lookup([key(number) for number in range(4)], WAIT_S).keys == ()
    assert time.monotonic() - began_s < WAIT_S / 2


def test_nobody_waits_long_for_a_source_that_is_silent() -> None:
    routed, link, _ = played()
    routed.note("silent", [key(0)])
    assert routed.contains([key(0)]) == [True]
    assert link.given_s == [LOOK_S]


class _Played:
    """A peer, and the link to it."""

    address = "tcp://127.0.0.1:1"
    timeout_s = 60.0

    def __init__(self) -> None:
        self.given_s: list[float] = []
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.asked = self.pulled = 0
        self.during: Callable[[], None] = lambda: None

    def tier(self, address: str, _named_by: str) -> _Played:
        if address.startswith("file:"):
            raise ConfigError(address)
        self.opened.append(address)
        return self

    def hang_up(self, address: str) -> None:
        self.closed.append(address)

    def contains(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        assert timeout_s > 0
        self.given_s.append(timeout_s)
        self.asked += 1
        self.during()
        return [True] * len(keys)

    def get(self, _key: bytes, _into: memoryview) -> None:
        self.pulled += 1
        raise ConnectionError("dead")


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def played() -> tuple[RoutedPeers, _Played, _Clock]:
    link, clock = _Played(), _Clock()
    return RoutedPeers(cast("PeerLink", link), clock=clock), link, clock


def test_a_source_that_was_not_used_for_long_is_closed() -> None:
    routed, link, clock = played()
    routed.note("a", [key(0)])
    assert routed.contains([key(0)]) == [True]
    clock.now_s = IDLE_S
    routed.note("b", [key(1)])
    assert link.closed == []
    clock.now_s += 1.0
    assert routed.contains([key(0), key(1)]) == [False, True], "it is found when it is noted again"
    assert (link.closed, routed.num_open) == (["a"], 1)
    routed.note("a", [key(0)])
    assert routed.contains([key(0)]) == [True]


def test_no_more_than_so_many_sources_are_open_and_one_in_use_stays() -> None:
    routed, link, _ = played()
    routed.note("a0", [key(0)])

    def crowd() -> None:
        for number in range(1, MAX_OPEN + 3):
            routed.note(f"a{number}", [key(number)])

    link.during = crowd
    assert routed.contains([key(0)]) == [True]
    assert routed.num_open == MAX_OPEN
    assert link.closed == ["a1", "a2", "a3"], "those that were noted first, but for the one that answers"


def test_stores_that_there_is_no_time_for_are_not_asked_and_not_at_fault() -> None:
    routed, link, clock = played()
    routed.note("slow", [key(0)])
    routed.note("other", [key(1)])

    def stand_still() -> None:
        clock.now_s += LOOK_S

    link.during = stand_still
    assert (routed.contains([key(0), key(1)]), link.asked) == ([True, False], 1)
    assert routed.contains([key(1)]) == [True]


def test_a_dead_source_that_is_named_again_and_again_stays_left_alone() -> None:
    routed, link, clock = played()
    for _ in range(200):
        routed.note("dead", [key(0)])
        assert routed.get(key(0), memoryview(bytearray(8))) is None
        clock.now_s += 7.0
    assert (link.opened, link.closed) == (["dead"], [])
    assert link.pulled < 35, "once a minute in the end"


def test_a_source_that_fails_is_left_alone_and_tried_again() -> None:
    routed, link, clock = played()
    routed.note("a", [key(0)])
    assert routed.get(key(0), memoryview(bytearray(8))) is None
    assert (routed.contains([key(0)]), link.asked) == ([False], 0)
    clock.now_s = 2.0
    assert (routed.contains([key(0)]), link.asked) == ([True], 1)
