"""A worker ends although libzmq does not: its contexts are ended within a limit."""

from __future__ import annotations

import threading

import zmq

from pdlink import zmq_context


def test_a_context_ends_with_its_sockets() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    assert zmq_context.end(context, linger_ms=10)
    assert socket.closed
    assert context.closed


def test_a_context_that_does_not_end_holds_nobody_up() -> None:
    freed = threading.Event()

    class Stuck(zmq.Context[zmq.Socket[bytes]]):
        """`zmq_ctx_term` does not return, as libzmq's at times."""

        def term(self) -> None:
            freed.wait()
            super().term()

    context = Stuck()
    socket = context.socket(zmq.PUB)
    try:
        assert not zmq_context.end(context, limit_s=0.05)
        assert socket.closed
    finally:
        freed.set()
