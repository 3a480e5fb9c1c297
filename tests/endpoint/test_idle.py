"""A session that nobody has used for a while is closed by the side that dialed it, and opened again by a request.

`tests/model` plays the same with everything that can go wrong around it, and finds one that ends with transfers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdlink.config import TimeoutConfig
from pdlink.events import PeerChanged
from pdlink.protocol.deadlines import Deadlines
from tests.waiting import until

from .conftest import Pair

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(Deadlines(heartbeat_s=0.1, peer_s=10.0, lease_s=20.0, request_s=60.0, idle_s=0.5))
    yield pair
    pair.close()


HEARD = {"closed by decode: idle for 0.5 s", "control connection is gone"}
"""By the other side: its last message, or the end of the connection, whichever is noticed first."""


def reasons(pair: Pair, state: str) -> list[str]:
    return [event.reason for event in pair.events if isinstance(event, PeerChanged) and event.state == state]


def transfer(pair: Pair, transfer_id: str) -> None:
    log, handler = pair.announce(transfer_id), pair.expect(transfer_id)
    pair.decode.receiver.offer(transfer_id, DST, 0, TOKENS)
    pair.compute(transfer_id, SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]


def test_an_idle_session_is_closed_with_all_its_connections_and_the_next_request_opens_one(pair: Pair) -> None:
    for number in range(3):
        transfer(pair, f"t{number}")
        until(lambda: not pair.decode.endpoint.peers() and not pair.prefill.endpoint.peers(), "no session is left")
        until(lambda: not pair.decode.endpoint.num_closing() and not pair.prefill.endpoint.num_closing(), "the fence")
        until(pair.idle, "nothing is held")
    assert not pair.decode.endpoint._channel._dealers
    lost = reasons(pair, "lost")
    assert set(lost) - HEARD == {"idle for 0.5 s"}, lost


def test_a_session_whose_transfer_waits_for_prefill_stays_however_long(pair: Pair) -> None:
    log, handler = pair.announce("t"), pair.expect("t")
    pair.decode.receiver.offer("t", DST, 0, TOKENS)
    until(lambda: reasons(pair, "ready") != [], "the session")
    transfer(pair, "another")
    (peer,) = pair.decode.endpoint.peers()
    ended_s = pair.decode.endpoint.clock.awake_s()
    until(lambda: pair.decode.endpoint.clock.awake_s() > ended_s + 1.5, "three times as long")
    assert pair.decode.endpoint.peers() == [peer]
    assert reasons(pair, "lost") == []
    pair.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]


def test_a_session_ends_between_two_requests_or_not_at_all(pair: Pair) -> None:
    """Requests that come about when the time is up: each is served, by the old session or by another one."""
    for number in range(8):
        transfer(pair, f"t{number}")
        ended_s = pair.decode.endpoint.clock.awake_s()
        until(lambda s=ended_s, n=number: pair.decode.endpoint.clock.awake_s() > s + 0.45 + 0.03 * n, "almost")  # type: ignore[misc]
    assert all("idle for" in reason for reason in set(reasons(pair, "lost")) - HEARD)


def test_zero_keeps_sessions_and_less_than_the_silence_of_a_peer_is_refused() -> None:
    assert TimeoutConfig(idle_s=0).idle_s == 0
    with pytest.raises(ValueError, match="idle_s"):
        TimeoutConfig(idle_s=1.0, peer_s=3.0)
