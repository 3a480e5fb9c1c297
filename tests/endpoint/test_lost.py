"""A message that is lost costs its session at the next frame, which a heartbeat is at the latest, and nothing more.

Silence, leases and the deadline of a request are all longer here than a test waits: only the gap can end anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from pdlink.events import MessageDropped, PeerChanged
from pdlink.protocol.deadlines import Deadlines
from tests.waiting import WAIT_S, until

from .conftest import Handler, Node, Pair, SenderLog

SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21
PATIENT = Deadlines(heartbeat_s=0.05, peer_s=6 * WAIT_S, connect_s=WAIT_S, lease_s=7 * WAIT_S, request_s=8 * WAIT_S)


@pytest.fixture
def patient() -> Iterator[Pair]:
    pair = Pair(PATIENT)
    yield pair
    pair.close()


class Loss:
    """Loses the next frame of a node that carries a message of this kind."""

    def __init__(self, node: Node, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened, tag = threading.Event(), msgspec.msgpack.encode(kind)
        channel = node.endpoint._channel
        send = channel.send

        def send_or_lose(route: str, frame: bytes) -> bool:
            if self.happened.is_set() or tag not in frame:
                return send(route, frame)
            self.happened.set()
            return True

        monkeypatch.setattr(channel, "send", send_or_lose)


def begin(pair: Pair, transfer_id: str) -> tuple[SenderLog, Handler]:
    log, handler = pair.announce(transfer_id), pair.expect(transfer_id)
    pair.decode.receiver.offer(transfer_id, DST, 0, TOKENS)
    return log, handler


def losses(pair: Pair) -> list[str]:
    return [event.reason for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]


def assert_over(pair: Pair) -> None:
    """Both sides hold nothing, the session ended because of the gap, and the next transfer works."""
    until(lambda: len(losses(pair)) == 2, "both sides have ended the session")
    assert any(reason.startswith("lost frame ") for reason in losses(pair)), losses(pair)
    until(pair.idle, "nothing is held")
    until(lambda: pair.decode.endpoint.num_closing() == 0, "the old session is fenced")
    log, handler = begin(pair, "next")
    pair.compute("next", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    assert log.wait() == ["end"]


@pytest.mark.parametrize("kind", ["invite", "expect", "offer"])
def test_lost_word_of_the_receiver_fails_its_transfer_at_the_next_frame(
    patient: Pair, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Loss(patient.decode, kind, monkeypatch)
    handler = patient.expect("t")
    patient.decode.receiver.offer("t", DST, 0, TOKENS)
    failed, released = handler.wait()
    assert loss.happened.is_set()
    assert failed.startswith("failed peer_lost: closed by prefill: lost frame "), failed
    assert released == "released"
    assert_over(patient)


def test_lost_done_fails_both_sides_at_the_next_frame(patient: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Loss(patient.prefill, "done", monkeypatch)
    log, handler = begin(patient, "t")
    patient.compute("t", SRC, TOKENS)
    failed, released = handler.wait()
    assert loss.happened.is_set()
    assert failed.startswith("failed peer_lost: lost frame "), failed
    assert released == "released"
    assert log.wait()[-1] == "end"
    assert_over(patient)


def test_lost_ack_frees_the_senders_blocks_at_the_next_frame(patient: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """mori#655: one lost ack wedged a peer for good."""
    loss = Loss(patient.decode, "ack", monkeypatch)
    log, handler = begin(patient, "t")
    patient.compute("t", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]
    failed, end = log.wait()
    assert loss.happened.is_set()
    assert failed.startswith("failed peer_lost: lost frame "), failed
    assert end == "end"
    assert_over(patient)


@pytest.mark.parametrize("kind", ["stop", "quiet"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_lost_word_about_an_end_ends_both_sides_at_the_next_frame(
    patient: Pair, side: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either of the two stopped it: the receiver does not wait long for the *quiet* that its blocks depend on."""
    sender, receiver = patient.prefill.sender, patient.decode.receiver
    who_says_it = patient.decode if (side, kind) == ("decode", "stop") else patient.prefill
    loss = Loss(who_says_it, kind, monkeypatch)
    log, handler = begin(patient, "t")
    until(lambda: patient.sender_state("writing") == 1, "the offer is there")
    (sender.cancel if side == "prefill" else receiver.cancel)("t", "enough")
    assert handler.wait()[-1] == "released"
    assert log.wait()[-1] == "end"
    assert loss.happened.is_set()
    assert_over(patient)


def test_repeated_frames_are_dropped_and_counted(patient: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (patient.prefill, patient.decode):
        channel = node.endpoint._channel
        monkeypatch.setattr(
            channel, "send", lambda route, frame, send=channel.send: send(route, frame) and send(route, frame)
        )
    for number in range(20):
        log, handler = begin(patient, f"t-{number}")
        patient.compute(f"t-{number}", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]
        assert log.wait() == ["end"]
    dropped = [event.reason for event in patient.events if isinstance(event, MessageDropped)]
    assert dropped.count("repeated") >= 20
    assert set(dropped) <= {"repeated", "old_session"}, "a second hello is of an old session"
    assert losses(patient) == []
