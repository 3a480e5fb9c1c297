"""What can come in at the data port of the tcp transport: nothing lands where nobody was invited to.

Hellos that prove nothing, frames that lie, and owners that answer nonsense, written byte by byte.
"""

from __future__ import annotations

import contextlib
import random
import resource
import select
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from pdlink.transport import tcp
from pdlink.transport.base import PeerFailed
from pdlink.transport.tcp import TcpTransport
from tests.conformance.transports.side import PATIENCE_S, Side, join
from tests.transport.standing import standing_still
from tests.waiting import until

from .wire import (
    ANSWER,
    ANSWER_MAGIC,
    FRAME_MAGIC,
    HEADER,
    HELLO,
    HELLO_MAGIC,
    MALFORMED,
    OUTSIDE,
    PLACED,
    RUN,
    STALE,
    Attack,
    Attacker,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NBYTES = 1 << 20
STRANGERS = 256
"""Places for connections that have not proved anything."""


@pytest.fixture
def attack() -> Iterator[Attack]:
    """Makes attackers; their sockets are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(invitation: bytes) -> Attacker:
            attacker = Attacker(invitation)
            stack.callback(attacker.socket.close)
            return attacker

        yield make


def make_one(stack: contextlib.ExitStack, **settings: Any) -> Side:
    side = Side(TcpTransport(**settings))
    stack.callback(side.close)
    return side


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    """Makes sides with one buffer each in this process; they are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(nbytes: int = NBYTES, **settings: Any) -> Side:
            side = make_one(stack, **settings)
            side.add_buffer(nbytes, seed=nbytes)
            return side

        yield make


@pytest.fixture
def owner(make_side: Callable[..., Side]) -> Iterator[Side]:
    """Somebody to attack; afterwards an honest writer must still get through, and nothing else have changed."""
    owner = make_side()
    before = owner.buffers[0].array.copy()
    yield owner
    writer = make_side()
    join(writer, owner, "honest", "honest")
    assert writer.wait_batch(writer.submit_block("honest", 5000, 5000)) == "ok"
    before[5000:10000] = writer.buffers[0].array[5000:10000]
    np.testing.assert_array_equal(owner.buffers[0].array, before)


def wait_dropped(owner: Side, count: int) -> None:
    until(lambda: transport(owner).strangers_dropped >= count, f"{count} strangers were sent away")


def transport(side: Side) -> TcpTransport:
    assert isinstance(side.transport, TcpTransport)
    return side.transport


# -- the wire --------------------------------------------------------------------------------------------------------


def test_an_honest_frame_written_by_hand_is_placed_and_answered(
    attack: Attack, make_side: Callable[..., Side]
) -> None:
    """Shows that the attacks below fail for the reason they are meant to fail for."""
    owner = make_side()
    expected = owner.buffers[0].array.copy()
    expected[10:13], expected[NBYTES - 2 :] = list(b"abc"), list(b"yz")
    by_hand = attack(owner.transport.invite("hand")).hello()
    by_hand.frame([(0, 10, 3), (0, NBYTES - 2, 2)], b"abcyz")
    assert by_hand.answer() == (PLACED, 0, 7)
    np.testing.assert_array_equal(owner.buffers[0].array, expected)
    assert by_hand.frame([], b"", sequence=1, ticket=8).answer() == (PLACED, 1, 8)
    owner.close_peer("hand")
    owner.wait_closed("hand")
    assert by_hand.heard() == []


@pytest.mark.parametrize("seed", range(3))
def test_frames_in_crumbs_are_placed_all_the_same(attack: Attack, make_side: Callable[..., Side], seed: int) -> None:
    """Headers, tables and payloads may be cut anywhere by the network."""
    rng = random.Random(seed)
    owner = make_side()
    expected = owner.buffers[0].array.copy()
    by_hand = attack(owner.transport.invite("hand"))
    there = by_hand.there
    data = HELLO.pack(HELLO_MAGIC, 1, 0, there.session, there.token)
    for sequence in range(20):
        offsets = [rng.randrange(NBYTES - 100) for _ in range(rng.randrange(4))]
        runs = [(offset, rng.randbytes(rng.randrange(100))) for offset in offsets]
        nbytes = sum(len(payload) for _, payload in runs)
        data += HEADER.pack(FRAME_MAGIC, len(runs), there.session, sequence, sequence, nbytes)
        data += b"".join(RUN.pack(offset, 0, len(payload)) for offset, payload in runs)
        for offset, payload in runs:
            data += payload
            expected[offset : offset + len(payload)] = list(payload)
    by_hand.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data:
        cut = rng.randrange(1, 60)
        by_hand.send(data[:cut])
        data = data[cut:]
    assert [by_hand.answer() for _ in range(20)] == [(PLACED, index, index) for index in range(20)]
    np.testing.assert_array_equal(owner.buffers[0].array, expected)


# -- strangers -------------------------------------------------------------------------------------------------------

FALSE_HELLOS: dict[str, dict[str, Any]] = {
    "magic": {"magic": 1},
    "version": {"version": 2},
    "stream beyond the last": {"stream": 16},
    "session": {"session": 1},
    "token": {"token": bytes(16)},
}


@pytest.mark.parametrize("what", FALSE_HELLOS)
def test_a_stranger_is_sent_away_and_counted(attack: Attack, owner: Side, what: str) -> None:
    invitation = owner.transport.invite("writer")
    stranger = attack(invitation).hello(**FALSE_HELLOS[what]).frame([(0, 0, 4)], b"evil")
    assert stranger.heard() == []
    wait_dropped(owner, 1)
    assert attack(invitation).hello().frame([], b"").answer() == (PLACED, 0, 7), "the invitation is still good"
    assert owner.happened == []


def test_one_wrong_bit_of_the_token_is_enough(attack: Attack, owner: Side) -> None:
    invitation = owner.transport.invite("writer")
    token = tcp._decode(invitation).token
    for bit in range(0, 128, 5):
        wrong = bytearray(token)
        wrong[bit // 8] ^= 1 << bit % 8
        assert attack(invitation).hello(token=bytes(wrong)).heard() == []
    wait_dropped(owner, 26)


def test_an_invitation_is_taken_up_once(attack: Attack, owner: Side) -> None:
    invitation = owner.transport.invite("writer")
    first = attack(invitation).hello().frame([], b"")
    assert first.answer() == (PLACED, 0, 7)
    assert attack(invitation).hello().frame([(0, 0, 4)], b"evil").heard() == []
    wait_dropped(owner, 1)
    assert first.frame([], b"", sequence=1).answer() == (PLACED, 1, 7), "the first is not disturbed"


@pytest.mark.parametrize("seed", range(4))
def test_garbage_at_the_port_is_dropped(attack: Attack, owner: Side, seed: int) -> None:
    rng = random.Random(seed)
    invitation = owner.transport.invite("writer")
    for count in range(1, 20):
        assert attack(invitation).send(rng.randbytes(rng.randrange(32, 5000))).heard() == []
        wait_dropped(owner, count)
    assert owner.happened == []


def test_somebody_who_says_nothing_is_sent_away_in_time(attack: Attack, make_side: Callable[..., Side]) -> None:
    owner = make_side(hello_timeout_s=0.1)
    silent, slow = attack(owner.transport.invite("a")), attack(owner.transport.invite("b")).send(b"PDtH")
    assert silent.heard() == slow.heard() == []
    wait_dropped(owner, 2)


def test_many_silent_connections_do_not_keep_a_writer_out(attack: Attack, make_side: Callable[..., Side]) -> None:
    """At most 256 wait; the oldest makes room. Their time would not be up before the test is."""
    owner, writer = make_side(hello_timeout_s=1000.0), make_side()
    invitation = owner.transport.invite("nobody")
    silent = [attack(invitation) for _ in range(STRANGERS + 36)]
    wait_dropped(owner, 36)
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
    assert transport(owner).strangers_dropped == 37
    for one in silent[:37]:
        assert one.heard() == []
    for one in silent[37:]:
        one.socket.close()


@pytest.mark.parametrize("when", ["with its connection", "later"])
def test_strangers_never_take_the_place_of_an_invited_peer_that_has_spoken(
    attack: Attack, make_side: Callable[..., Side], when: str
) -> None:
    """More of them than there are places have connected behind it before the owner's thread looks."""
    owner = make_side(hello_timeout_s=1000.0)
    invited = attack(owner.transport.invite("invited"))
    if when == "later":  # it has a place of a stranger, and nobody has listened to what it says
        attack(owner.transport.invite("witness")).hello(token=bytes(16)).heard()
        wait_dropped(owner, 1)
    with standing_still("pdlink-tcp"):
        invited.hello().frame([(0, 0, 3)], b"abc")
        strangers = [attack(invited.invitation()) for _ in range(STRANGERS + 100)]
    assert invited.answer() == (PLACED, 0, 7)
    wait_dropped(owner, 100)
    assert owner.happened == []
    assert len(strangers) > STRANGERS


def test_a_connection_waits_while_descriptors_have_run_out_and_is_then_served(make_side: Callable[..., Side]) -> None:
    owner = make_side()
    there = tcp._decode(owner.transport.invite("writer"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as writer, select.epoll() as events:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            writer.connect((there.host, there.port))
            writer.sendall(HELLO.pack(HELLO_MAGIC, 1, 0, there.session, there.token))
            writer.sendall(HEADER.pack(FRAME_MAGIC, 0, there.session, 0, 1, 0))
            before_s = time.process_time()
            events.register(writer, select.EPOLLIN)
            assert not events.poll(0.3), "nobody could accept it"
            assert time.process_time() - before_s < 0.1, "nobody tries without end"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        writer.settimeout(PATIENCE_S)
        assert writer.recv(ANSWER.size) == ANSWER.pack(ANSWER_MAGIC, PLACED, 0, 1)


# -- frames that lie -------------------------------------------------------------------------------------------------

FALSE_FRAMES: dict[str, tuple[int, list[tuple[int, int, int]], dict[str, Any]]] = {
    "magic": (MALFORMED, [(0, 0, 4)], {"magic": 0}),
    "another session": (STALE, [(0, 0, 4)], {"session": 1}),
    "out of order": (STALE, [(0, 0, 4)], {"sequence": 1}),
    "more runs than allowed": (MALFORMED, [(0, 0, 4)], {"num_runs": 1024}),
    "most runs there are": (MALFORMED, [(0, 0, 4)], {"num_runs": 2**32 - 1}),
    "longer than allowed": (MALFORMED, [(0, 0, 4)], {"nbytes": (1 << 20) + 1}),
    "longest there is": (MALFORMED, [(0, 0, 4)], {"nbytes": 2**64 - 1}),
    "longer than its runs": (MALFORMED, [(0, 0, 4)], {"nbytes": 5}),
    "shorter than its runs": (MALFORMED, [(0, 0, 4)], {"nbytes": 3}),
    "no such region": (OUTSIDE, [(1, 0, 4)], {}),
    "last region there could be": (OUTSIDE, [(2**32 - 1, 0, 4)], {}),
    "one byte too far": (OUTSIDE, [(0, NBYTES - 3, 4)], {}),
    "offset beyond the end": (OUTSIDE, [(0, NBYTES + 1, 0)], {}),
    "offset that wraps round": (OUTSIDE, [(0, 2**64 - 2, 4)], {}),
    "the last of many runs": (OUTSIDE, [(0, 4 * index, 4) for index in range(500)] + [(0, NBYTES, 1)], {}),
    "sizes that wrap round in 32 bits": (OUTSIDE, [(0, 0, 2**32 - 1), (0, 0, 5)], {"nbytes": 4}),
}


@pytest.mark.parametrize("what", FALSE_FRAMES)
def test_a_frame_that_lies_fails_its_peer_before_a_byte_is_placed(attack: Attack, owner: Side, what: str) -> None:
    verdict, runs, words = FALSE_FRAMES[what]
    liar = attack(owner.transport.invite("liar")).hello()
    liar.frame(runs, b"evil" * 600, **words)
    assert [answer[0] for answer in liar.heard()] in ([verdict], [])  # a reset may overtake the answer
    assert owner.wait_failed("liar") != ""
    assert [type(one) for one in owner.happened] == [PeerFailed]


@pytest.mark.parametrize("cut", [1, 39, 40, 50, 56, 58])
def test_a_frame_that_is_cut_short_fails_its_peer(attack: Attack, make_side: Callable[..., Side], cut: int) -> None:
    owner = make_side()
    writer = attack(owner.transport.invite("writer")).hello()
    header = HEADER.pack(FRAME_MAGIC, 1, writer.there.session, 0, 1, 4)
    writer.send((header + RUN.pack(0, 0, 4) + b"evil")[:cut])
    writer.socket.shutdown(socket.SHUT_WR)
    assert "middle of a frame" in owner.wait_failed("writer")
    assert writer.heard() == []


def test_a_writer_that_reads_no_answers_holds_up_itself_only(attack: Attack, make_side: Callable[..., Side]) -> None:
    """Its answers are kept back, and as long as there are any no frame of it is read."""
    owner, honest = make_side(), make_side()
    deaf = attack(owner.transport.invite("deaf")).hello()
    deaf.socket.setblocking(False)
    sent, stuck_s, sequence = 0, 0.0, 0
    data = b""
    while stuck_s < 0.2:
        if len(data) < 1 << 16:
            frames = [HEADER.pack(FRAME_MAGIC, 0, deaf.there.session, sequence + i, 0, 0) for i in range(2000)]
            sequence += 2000
            data += b"".join(frames)
        if not select.select([], [deaf.socket], [], 0.05)[1]:
            stuck_s += 0.05
            continue
        stuck_s = 0.0
        done = deaf.socket.send(data)
        sent, data = sent + done, data[done:]
        assert sent < 1 << 30
    join(honest, owner)
    assert honest.wait_batch(honest.submit_block("owner", 0, 100)) == "ok"
    owner.close_peer("deaf")
    owner.wait_closed("deaf")
    deaf.socket.close()


def test_frames_after_close_peer_are_not_placed(attack: Attack, owner: Side) -> None:
    late = attack(owner.transport.invite("late")).hello().frame([], b"")
    assert late.answer() == (PLACED, 0, 7)
    owner.close_peer("late")
    owner.wait_closed("late")
    late.frame([(0, 0, 4)], b"evil", sequence=1)
    assert late.heard() == []
    assert attack(late.invitation()).hello().heard() == []
    wait_dropped(owner, 1)


def test_a_half_received_frame_is_dropped_at_close_peer(attack: Attack, owner: Side) -> None:
    """Its placed half stays; what comes later does not, and PeerClosed does not wait for it."""
    slow = attack(owner.transport.invite("slow")).hello()
    slow.frame([(0, 0, 8)], b"")
    owner.close_peer("slow")
    owner.wait_closed("slow")
    slow.send(b"evilevil")
    assert slow.heard() == []


# -- owners that lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER.pack(0, PLACED, 0, 1),
        ANSWER.pack(ANSWER_MAGIC, PLACED, 1, 1),
        ANSWER.pack(ANSWER_MAGIC, PLACED, 0, 99),
        ANSWER.pack(ANSWER_MAGIC, OUTSIDE, 0, 1),
        ANSWER.pack(ANSWER_MAGIC, PLACED, 0, 1) * 2,
    ],
    ids=["magic", "sequence", "ticket", "refusal", "twice"],
)
def test_an_owner_that_answers_nonsense_is_failed(make_side: Callable[..., Side], answer: bytes) -> None:
    """The writer believes an answer only for the frame it is about."""
    writer, model = make_side(), make_side()
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = msgspec.structs.replace(tcp._decode(model.transport.invite("writer")), port=server.getsockname()[1])
        writer.transport.connect("liar", msgspec.msgpack.encode(there))
        connection = server.accept()[0]
        ticket = writer.submit_block("liar", 0, 100)
        assert connection.recv(HELLO.size + HEADER.size + RUN.size + 100, socket.MSG_WAITALL)
        connection.sendall(answer)
        writer.wait_failed("liar")
        assert writer.wait_batch(ticket) in ("peer_failed", "ok")
        assert (writer.done(ticket)[0].status.value == "ok") == (len(answer) > ANSWER.size)
        connection.close()
        writer.close_peer("liar")
        writer.wait_closed("liar")


def test_a_batch_is_done_only_when_all_of_it_has_left_whatever_its_owner_answers(
    make_side: Callable[..., Side],
) -> None:
    """Its blocks are free then: what still leaves would be the next request's. The owner answers 32 frames of a
    megabyte at once, of which the sockets between them hold a few, and then counts the frames that have come whole.
    """
    writer, model = make_side(), make_side()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        server.bind(("127.0.0.1", 0))
        server.listen()
        there = msgspec.structs.replace(tcp._decode(model.transport.invite("writer")), port=server.getsockname()[1])
        writer.transport.connect("liar", msgspec.msgpack.encode(there))
        connection = server.accept()[0]
        connection.settimeout(PATIENCE_S)
        tickets = [writer.submit_block("liar", 0, NBYTES) for _ in range(32)]
        before = -1
        while (waiting := _waiting_to_be_sent(connection)) != before or waiting == 0:
            before = waiting
            time.sleep(0.05)
        connection.sendall(b"".join(ANSWER.pack(ANSWER_MAGIC, PLACED, *pair) for pair in enumerate(tickets)))
        writer.wait_failed("liar")
        nbytes = -HELLO.size
        while got := len(connection.recv(1 << 20)):
            nbytes += got
        connection.close()
    statuses = [writer.wait_batch(ticket) for ticket in tickets]
    assert statuses.count("ok") <= nbytes // (HEADER.size + RUN.size + NBYTES) < len(tickets)


def _waiting_to_be_sent(connection: socket.socket) -> int:
    """Bytes in the sending side's socket of a connection on this host (IPv4)."""
    # By both ports: that of the sending side alone may be used for another address, too, and wait out its minute.
    port, own = (f":{name[1]:04X}" for name in (connection.getpeername(), connection.getsockname()))
    for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(port) and fields[2].endswith(own):
            return int(fields[4].partition(":")[0], 16)
    raise AssertionError(f"no connection from {port}")
