"""What a native engine does to the process that it runs in: forks, signals, descriptors."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdlink.errors import TransportFailure
from pdlink.transport.native import NativeTransport
from tests.conformance.transports.side import LONG_NBYTES, Side, join, run_list
from tests.transport.standing import native_threads, wait_for_threads

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def pair(make_side: Callable[[], Side]) -> tuple[Side, Side]:
    """A writer that has written to its owner once."""
    writer, owner = make_side(), make_side()
    if not isinstance(writer.transport, NativeTransport):
        pytest.skip("no native engine")
    writer.add_buffer(LONG_NBYTES, seed=0)
    owner.add_buffer(LONG_NBYTES, seed=1)
    join(writer, owner)
    assert writer.wait_batch(writer.submit_block("owner", 0, 100)) == "ok"
    return writer, owner


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is what it is about (Python 3.12)
def test_a_forked_child_is_refused_and_leaves_the_parents_connections_alone(pair: tuple[Side, Side]) -> None:
    """What a child closes is shared with the parent: sockets, an epoll set, a UCX worker. It destroys no engine: the
    fork may have met a thread of one amid a change (ASan: a double free)."""
    writer, owner = pair
    if writer.buffers[0].kind == "cuda":
        pytest.skip("a driver does not live through a fork, nor does its double; tests/cuda has a child of its own")
    long = writer.submit("owner", run_list([[0, 0, LONG_NBYTES]] * 100))
    child = os.fork()
    if child == 0:
        try:
            refused = 0
            for action in (lambda: writer.submit_block("owner", 0, 1), lambda: owner.transport.invite("x")):
                try:
                    action()
                except TransportFailure as failure:
                    refused += "fork" in str(failure)
            heard = writer.transport.poll()
            counts: list[int] = [getattr(writer.transport, "strangers_dropped", 0)]
            counts += getattr(writer.transport, "ranges_taken", tuple)()
            writer.transport.close_peer("owner")
            for side in (writer, owner):
                side.transport.close()
                side.transport._native = None  # type: ignore[attr-defined]
            gc.collect()
            os._exit(0 if refused == 2 and not heard and not any(counts) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert writer.wait_batch(long) == "ok"
    assert writer.wait_batch(writer.submit_block("owner", 1000, 5000)) == "ok"
    np.testing.assert_array_equal(owner.buffers[0].array[1000:6000], writer.buffers[0].array[1000:6000])


def test_connections_come_and_go_without_growth(pair: tuple[Side, Side]) -> None:
    """Of descriptors, and of mapped memory files: peers' regions and gates."""
    writer, owner = pair

    def once(attempt: int) -> tuple[int, int]:
        names = f"writer {attempt}", f"owner {attempt}"
        join(writer, owner, *names)
        assert writer.wait_batch(writer.submit_block(names[1], 0, 100)) == "ok"
        for side, peer in ((writer, names[1]), (owner, names[0])):
            side.close_peer(peer)
            side.wait_closed(peer)
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:")

    # A closed socket, and a peer's memory file, may still be in the hands of UCX's own thread, so a count is off
    # by a few. One that a connection leaves behind adds fifteen from the first counts to the last.
    counts = [once(attempt) for attempt in range(20)]
    for what in zip(*counts, strict=True):
        assert min(what[-5:]) - min(what[:5]) < 8, counts


@pytest.mark.usefixtures("pair")
def test_no_native_thread_takes_signals() -> None:
    """A signal that lands there would not wake Python's main thread."""
    native = native_threads()
    assert native
    for tid in native:
        status = Path(f"/proc/self/task/{tid}/status").read_text()
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        assert blocked & 1 << signal.SIGINT - 1
        assert blocked & 1 << signal.SIGTERM - 1


def test_close_ends_the_thread_though_signals_come_meanwhile(pair: tuple[Side, Side]) -> None:
    before, (writer, _) = native_threads(), pair
    former = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        writer.transport.close()
        wait_for_threads(lambda now: now.keys() < before.keys())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_an_engine_that_was_closed_takes_no_peer(make_side: Callable[[], Side], pair: tuple[Side, Side]) -> None:
    """Another thread may be about to invite or connect while the transport is closed."""
    _, owner = pair
    side = make_side()
    side.add_buffer(4096, seed=0)
    assert isinstance(side.transport, NativeTransport)
    invitation = owner.transport.invite("late")
    side.transport._engine.close(0.0)  # the transport does not know
    with pytest.raises(TransportFailure, match="the transport is closed"):
        side.transport.invite("late")
    with pytest.raises(TransportFailure, match="the transport is closed"):
        side.transport.connect("late", invitation)
