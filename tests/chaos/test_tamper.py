"""The control channel of the tests that loses, repeats and delays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from pdlink.endpoint.channel import Channel, Received
from pdlink.protocol.deadlines import Deadlines
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, PeerClosed, PeerFailed
from pdlink_bench.chaos.tamper import LinkFaults, SlowLink, TamperedChannel, channels, slow_down
from tests.endpoint.conftest import Pair
from tests.loopback import LoopbackHub, LoopbackTransport
from tests.waiting import WAIT_S, until

COUNT = 200
RUNS = itertools.count()
"""Names the frames of each call: those of an earlier one may still be on their way."""


@pytest.fixture
def listener() -> Iterator[tuple[Channel, str]]:
    channel = Channel("listener@1")
    with closing(channel):
        yield channel, f"tcp://127.0.0.1:{channel.bind('127.0.0.1', 0)}"


def delivered(listener: Channel, address: str, faults: LinkFaults, *, enough: int) -> list[int]:
    """The numbers that arrive when 0..COUNT-1 and then, surely, a last one is sent; at least `enough`."""
    sender, run = TamperedChannel(faults, "dialer@1"), b"%d/" % next(RUNS)
    with closing(sender):
        sender.bind("127.0.0.1", 0)
        route = sender.dial(address)
        for number in range(COUNT):
            assert sender.send(route, run + b"%d" % number)
        found: list[int] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(found) < enough and time.monotonic() < deadline_s:
            sender.poll(0.005)
            arrived, _ = listener.poll(0.005)
            frames = [item.frame for item in arrived if isinstance(item, Received)]
            found += [int(frame.removeprefix(run)) for frame in frames if frame.startswith(run)]
    return found


def test_lost_frames_never_arrive_and_the_seed_says_which(listener: tuple[Channel, str]) -> None:
    chaos = LinkFaults(seed=5, drop=0.3)
    chance_of_all = int(COUNT * 0.5)
    first = delivered(*listener, chaos, enough=chance_of_all)
    second = delivered(*listener, chaos, enough=chance_of_all)
    assert first[:chance_of_all] == second[:chance_of_all]
    assert first[:chance_of_all] != list(range(chance_of_all)), "some are missing"
    assert first == sorted(first)


def test_repeated_frames_come_twice_and_nothing_is_lost(listener: tuple[Channel, str]) -> None:
    found = delivered(*listener, LinkFaults(seed=6, duplicate=0.5), enough=COUNT + COUNT // 4)
    assert set(found) == set(range(COUNT))
    assert len(found) > COUNT
    assert max(found.count(number) for number in set(found)) == 2


def test_late_frames_keep_their_order(listener: tuple[Channel, str]) -> None:
    assert delivered(*listener, LinkFaults(seed=7, delay_s=0.02), enough=COUNT) == list(range(COUNT))


def test_what_is_held_leaves_before_the_connection_is_closed(listener: tuple[Channel, str]) -> None:
    """The last word of a session, *bye*, is not lost because it was to be late."""
    channel, address = listener
    sender = TamperedChannel(LinkFaults(seed=8, delay_s=60.0), "dialer@1")
    with closing(sender):
        sender.bind("127.0.0.1", 0)
        route = sender.dial(address)
        assert sender.send(route, b"bye")
        sender.drop(route)
        deadline_s = time.monotonic() + WAIT_S
        arrived: list[object] = []
        while not arrived and time.monotonic() < deadline_s:
            arrived += channel.poll(0.05)[0]
    assert [item.frame for item in arrived if isinstance(item, Received)] == [b"bye"]


def test_a_route_that_is_gone_is_told_at_the_next_frame(listener: tuple[Channel, str]) -> None:
    channel, _ = listener
    sender = TamperedChannel(LinkFaults(seed=9, delay_s=0.001), "dialer@1")
    with closing(sender):
        sender.bind("127.0.0.1", 0)
        nobody = b"nobody".hex()
        assert sender.send(nobody, b"1")
        deadline_s = time.monotonic() + WAIT_S
        while sender.send(nobody, b"2"):
            assert time.monotonic() < deadline_s, "the route is never reported as gone"
            sender.poll(0.005)


def test_nothing_is_tampered_with_unless_asked_for() -> None:
    assert not LinkFaults().of_frames
    assert LinkFaults(drop=0.1).of_frames
    assert LinkFaults(duplicate=0.1).of_frames
    assert LinkFaults(delay_s=0.1).of_frames


def test_whatever_is_lost_repeated_or_late_no_transfer_waits_for_its_deadline() -> None:
    """Silence, leases and deadlines are longer than the test waits: a gap ends what would hang."""
    timeouts = Deadlines(
        heartbeat_s=0.05, peer_s=6 * WAIT_S, connect_s=1.0, lease_s=7 * WAIT_S, request_s=10 * WAIT_S
    )
    pair = Pair(timeouts, channel=channels(LinkFaults(seed=3, drop=0.1, duplicate=0.2, delay_s=0.005)))
    outcomes = []
    for number in range(25):
        name = f"t-{number}"
        log, handler = pair.announce(name), pair.expect(name)
        pair.decode.receiver.offer(name, [11, 3, 20], 0, 21)
        pair.compute(name, [5, 1, 9, 2, 30, 7], 21)
        outcomes.append(handler.wait()[0])
        if outcomes[-1] != "ready 42":
            pair.prefill.sender.cancel(name, "decode has given up")  # as the router does
        log.wait()
    assert outcomes.count("ready 42") > 5
    assert any("lost frame" in outcome for outcome in outcomes)
    until(pair.idle, "nothing is held")
    pair.close()


def done(ticket: int, peer: str, nbytes: int = 100, status: BatchStatus = BatchStatus.OK) -> BatchDone:
    return BatchDone(ticket, peer, status, nbytes, 0.0, 0.0)


def test_slow_link_reports_batches_one_after_the_other_as_it_carries_them() -> None:
    now = 10.0
    link = SlowLink(100.0, lambda: now)
    first, second = done(1, "a"), done(2, "b", 50)
    assert link.passed([first, second]) == []
    now = 11.0
    assert link.passed([]) == [first]
    now = 11.6
    assert link.passed([]) == [second]
    third = done(4, "a")
    assert link.passed([third]) == []
    now = 12.5
    assert link.passed([]) == [], "an idle link saves nothing up"
    now = 12.7
    assert link.passed([]) == [third]


@pytest.mark.parametrize("news", [PeerFailed("a", "x"), PeerClosed("a"), done(9, "a", status=BatchStatus.CANCELLED)])
def test_slow_link_does_not_hold_up_bad_news_and_keeps_the_order_of_a_peer(news: Occurrence) -> None:
    link = SlowLink(1.0, lambda: 10.0)
    mine, other = done(1, "a"), done(2, "b")
    assert link.passed([mine, other, news]) == [mine, news]


def test_slow_link_reports_what_it_holds_when_its_transport_is_closed() -> None:
    transport = LoopbackTransport(LoopbackHub())
    held = done(1, "a")
    transport.poll = lambda: [held]  # type: ignore[method-assign]
    SlowLink(1.0, lambda: 10.0).carry(transport)
    assert transport.poll() == []
    transport.close()
    assert transport.poll() == [held, held]


def test_transfer_over_a_slow_link_is_ready_when_the_link_has_carried_it() -> None:
    nbytes = 21 * 3 * 2 * 2 * 16
    """Tokens, layers, K and V, heads, bytes of a head."""
    pair = Pair()
    slow_down(pair.prefill.endpoint.transports.values(), LinkFaults(link_nbytes_per_s=nbytes / 0.3))
    try:
        log, handler = pair.announce("t"), pair.expect("t")
        began_s = time.monotonic()
        pair.decode.receiver.offer("t", [0, 1, 2], 0, 21)
        pair.compute("t", [0, 1, 2, 3, 4, 5], 21)
        assert handler.wait() == ["ready 42", "released"]
        assert time.monotonic() - began_s >= 0.3
        assert log.wait() == ["end"]
    finally:
        pair.close()
