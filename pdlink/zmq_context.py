"""The end of a ZeroMQ context, which libzmq does not always come to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pdlink import threads

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

_LIMIT_S = 1.0
"""Beside the linger. An end takes less than a millisecond where nothing lingers."""


def end(context: zmq.Context[Any], *, linger_ms: int = 0, limit_s: float = _LIMIT_S) -> bool:
    """Close the sockets of `context`, which no thread uses any more, and end it. Whether it ended in time.

    linger_ms: how long messages that wait may still be sent.

    `zmq_ctx_term` of libzmq 4.3.5 sometimes never returns: where a socket sends to a peer that is just going away
    and is closed at once. Seen with PUB and ROUTER, without linger, once in some 1,000 ends. The sockets are closed
    by then; a thread and a few descriptors stay until the process ends.
    """
    thread = threads.guarded("pdlink-zmq-end", lambda: context.destroy(linger_ms), lambda _: None)
    thread.start()
    thread.join(linger_ms / 1000 + limit_s)
    if thread.is_alive():
        log.debug("a ZeroMQ context did not end within %.1f s; it stays until the process ends", limit_s)
    return not thread.is_alive()


def take_ipv6(socket: zmq.Socket[Any], place: str) -> None:
    """Before a socket is bound or connected to this place, HOST or an endpoint: have it take an IPv6 address, which
    stands in brackets. libzmq has none else, and looks names up as IPv4."""
    socket.ipv6 = "[" in place
