"""What is special to the tcp transport: whom it connects to, stopped and killed peers, and what it reports.

What every transport must do is in tests/conformance, which runs over tcp with one and two streams too; who else may
come to its port is in tests/attacks/test_tcp.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from pdlink import _tcp
from pdlink.config import TransportConfig, WorkerConfig
from pdlink.config.transport import UcxConfig
from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.transport import choice, tcp
from pdlink.transport.tcp import TcpTransport
from tests.conformance.transports.other_process import OtherProcess
from tests.conformance.transports.side import (
    LONG_NBYTES,
    LONG_PASSES,
    PATIENCE_S,
    Side,
    join,
    run_list,
    wait_until_sockets_are_full,
)
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NBYTES = 1 << 20


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
def make_other() -> Iterator[Callable[[int], OtherProcess]]:
    with contextlib.ExitStack() as stack:

        def make(nbytes: int) -> OtherProcess:
            other = OtherProcess("tcp")
            stack.callback(other.end)
            other.call("add_buffer", nbytes, 1)
            return other

        yield make


def transport(side: Side) -> TcpTransport:
    assert isinstance(side.transport, TcpTransport)
    return side.transport


# -- whom it connects to ---------------------------------------------------------------------------------------------


def test_nobody_at_the_port_is_a_failed_peer_with_the_reason(make_side: Callable[..., Side]) -> None:
    writer, owner = make_side(), make_side()
    invitation = owner.transport.invite("writer")
    owner.transport.close()
    writer.transport.connect("owner", invitation)
    try:
        ticket = writer.submit_block("owner", 0, 100)
    except TransportFailure:
        pass  # it knew already
    else:
        assert writer.wait_batch(ticket) == "peer_failed"
    assert "refused" in writer.wait_failed("owner")


def test_what_cannot_be_an_invitation_is_a_protocol_error(make_side: Callable[..., Side]) -> None:
    side = make_side()
    good = tcp._decode(side.transport.invite("writer"))
    for fields in (
        {"host": "example.org"},
        {"host": ""},
        {"port": 0},
        {"token": b"short"},
        {"session": 2**64 - 1, "regions": ()},
        {"regions": (0,)},
        {"regions": (2**63,)},
    ):
        with pytest.raises(ProtocolError):
            side.transport.connect("peer", msgspec.msgpack.encode(msgspec.structs.replace(good, **fields)))


def test_a_side_for_this_host_only_connects_to_no_other(make_side: Callable[..., Side]) -> None:
    side = make_side()
    elsewhere = msgspec.structs.replace(tcp._decode(side.transport.invite("writer")), host="192.0.2.1")
    with pytest.raises(TransportFailure, match=r"listen\.data"):
        side.transport.connect("peer", msgspec.msgpack.encode(elsewhere))


# -- stopped and killed peers ----------------------------------------------------------------------------------------


def test_a_small_batch_behind_one_with_more_time_still_meets_its_deadline(
    make_side: Callable[..., Side], make_other: Callable[[int], OtherProcess]
) -> None:
    """Its caller sends it; the native thread sleeps until the deadlines that it knows of."""
    owner, writer = make_other(NBYTES), make_side()
    writer.connect("owner", owner.call("invite", "writer"))
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
    owner.stop()
    tickets = [writer.submit_block("owner", 0, 100), writer.submit_block("owner", 100, 100, timeout_s=0.1)]
    assert [writer.wait_batch(ticket) for ticket in reversed(tickets)] == ["timeout", "peer_failed"]
    done = writer.done(tickets[1])[0]
    assert done.done_s - done.submitted_s < tcp.CONNECT_TIMEOUT_S / 2  # when it would look by itself


def test_small_batches_that_nobody_reads_any_more_are_sent_by_the_thread(
    make_side: Callable[..., Side], make_other: Callable[[int], OtherProcess]
) -> None:
    """A caller never waits for room in a socket; everything lands in the order of its submission."""
    owner, writer = make_other(NBYTES), make_side()
    writer.connect("owner", owner.call("invite", "writer"))
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
    owner.stop()
    tickets = [writer.submit_block("owner", 0, 60_000) for _ in range(400)]
    wait_until_sockets_are_full()
    last = run_list([[60_000, 0, 60_000]])
    tickets.append(writer.submit("owner", last))
    owner.resume()
    assert [writer.wait_batch(ticket) for ticket in tickets] == ["ok"] * 401
    assert owner.call("digest_of", 0, 60_000) == writer.digest_of(60_000, 60_000)


def test_a_writer_that_is_killed_in_a_batch_fails_at_the_owner_and_nobody_else(
    make_side: Callable[..., Side], make_other: Callable[[int], OtherProcess]
) -> None:
    owner, bystander = make_side(LONG_NBYTES), make_side(LONG_NBYTES)
    writer = make_other(LONG_NBYTES + 64 * LONG_PASSES)
    join(bystander, owner, "bystander", "owner")
    writer.call("connect", "owner", owner.invite("writer"))
    before = owner.buffers[0].array[: 32 << 10].copy()
    writer.call("submit_long", "owner")
    owner.wait_changed(before)
    writer.kill()
    owner.close_peer("writer")
    owner.wait_closed("writer")
    at_the_end = owner.snapshot()
    assert bystander.wait_batch(bystander.submit_block("owner", 0, 0)) == "ok"
    assert owner.snapshot() == at_the_end


def test_two_writers_at_once_each_get_their_own_bytes_there(make_side: Callable[..., Side]) -> None:
    owner = make_side()
    writers = [make_side(NBYTES, streams=streams) for streams in (1, 3)]
    half = NBYTES // 2
    tickets: list[list[int]] = [[], []]
    for index, writer in enumerate(writers):
        writer.buffers[0].array[:] = np.random.default_rng(index).integers(0, 256, NBYTES, dtype=np.uint8)
        join(writer, owner, f"writer {index}")
    for start in range(0, half, 1 << 12):
        for index, writer in enumerate(writers):
            rows = [[start + at + index * half, start + at + index * half, 256] for at in range(0, 1 << 12, 256)]
            tickets[index].append(writer.submit("owner", run_list(rows)))
    for index, writer in enumerate(writers):
        assert {writer.wait_batch(ticket) for ticket in tickets[index]} == {"ok"}
        mine = slice(index * half, (index + 1) * half)
        np.testing.assert_array_equal(owner.buffers[0].array[mine], writer.buffers[0].array[mine])


# -- settings and reports --------------------------------------------------------------------------------------------


def test_the_congestion_control_and_streams_in_use_are_reported(make_side: Callable[..., Side]) -> None:
    fast = next(name for name in ("cubic", "reno") if _tcp.congestion_usable(name))
    owner = make_side()
    for settings, expected in (({}, ("1", fast)), ({"congestion": "reno", "streams": 3}, ("3", "reno"))):
        writer, name = make_side(**settings), f"writer {expected}"
        join(writer, owner, name)
        assert writer.transport.lane("owner") in ("", "tcp")
        # One batch is enough for one stream only; the others are there when there is something for all.
        assert writer.wait_batch(writer.submit_block("owner", 0, NBYTES)) == "ok"
        wanted = {"streams": expected[0], "congestion": expected[1]}
        until(lambda writer=writer, wanted=wanted: transport(writer).details("owner") == wanted, "all are used")  # type: ignore[misc]
        assert writer.transport.lane("owner") == "tcp"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"congestion": "pigeon"}, "pigeon"),
        ({"streams": 0}, "0 streams"),
        ({"streams": 17}, "17 streams"),
        ({"host": "no such host.invalid"}, "no address"),
        ({"host": "0.0.0.0"}, "listen.advertise"),
        ({"host": "192.0.2.1"}, "192.0.2.1"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(TransportUnavailable, match=words):
        TcpTransport(**settings).open()


def test_a_name_is_listened_on_and_told_as_an_address(make_side: Callable[..., Side]) -> None:
    side = make_side(host="0.0.0.0", advertise="localhost")
    assert tcp._decode(side.transport.invite("writer")).host in ("127.0.0.1", "::1")


def test_auto_goes_on_without_tcp_where_it_cannot_listen() -> None:
    opened = choice.open_transports(TransportConfig(ucx=UcxConfig(library="off")), [], "192.0.2.1")
    assert [one.name for one in opened] == ["mapped"]
    opened[0].close()
    with pytest.raises(TransportUnavailable, match=r"192\.0\.2\.1"):
        choice.open_transports(TransportConfig(kind="tcp"), [], "192.0.2.1")


def test_a_data_port_for_other_hosts_needs_keys_too() -> None:
    with pytest.raises(ValueError, match=r"listen\.data"):
        WorkerConfig.model_validate({"listen": {"data": "10.9.8.7"}})


def watched(epoll_fd: int) -> int:
    """How many descriptors an epoll set has; one that is closed here and open in a child is among them."""
    return Path(f"/proc/self/fdinfo/{epoll_fd}").read_text(encoding="ascii").count("tfd:")


def epoll_sets() -> set[int]:
    links = {int(path.name): path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return {fd for fd, path in links.items() if os.readlink(path) == "anon_inode:[eventpoll]"}


@contextlib.contextmanager
def child_that_holds_every_descriptor() -> Iterator[None]:
    """A forked process that does nothing until the end of the block."""
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(wait, 1)
        os._exit(0)
    os.close(wait)
    try:
        yield
    finally:
        os.close(end)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("steady_descriptors")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is what it is about (Python 3.12)
def test_nothing_is_heard_of_an_ended_connection_while_a_forked_child_holds_a_copy(
    make_side: Callable[..., Side],
) -> None:
    """The kernel reports a socket until its last copy is closed; what the report is written to is gone by then."""
    before = epoll_sets()
    writer, owner = make_side(), make_side(hello_timeout_s=0.3)
    ours = epoll_sets() - before
    idle = {fd: watched(fd) for fd in ours}
    there = tcp._decode(owner.transport.invite("nobody"))
    with contextlib.ExitStack() as stack:
        for index in range(8):
            join(writer, owner, f"writer {index}", f"owner {index}")
            assert writer.wait_batch(writer.submit_block(f"owner {index}", 0, 100)) == "ok"
        # Strangers of each kind: one says nothing, one says nonsense, and of more than 256 the oldest makes room.
        strangers = [stack.enter_context(socket.create_connection((there.host, there.port))) for _ in range(262)]
        until(lambda: transport(owner).strangers_dropped >= 6, "the oldest are sent away")
        with child_that_holds_every_descriptor():
            for stranger in strangers[::2]:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(b"x" * 32)
            for index in range(8):
                writer.close_peer(f"owner {index}")
                owner.close_peer(f"writer {index}")
            for index in range(8):
                writer.wait_closed(f"owner {index}")
                owner.wait_closed(f"writer {index}")
            until(lambda: transport(owner).strangers_dropped >= 262, "all are sent away")
            for stranger in strangers:
                stranger.settimeout(PATIENCE_S)
                with contextlib.suppress(ConnectionError):
                    assert stranger.recv(1) == b"", "it hears that it was sent away"
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(b"and goes on sending")
            assert {fd: watched(fd) for fd in ours} == idle
            join(writer, owner)
            assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
