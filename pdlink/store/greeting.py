"""`greet`: how a client of a store process begins a connection: who it is, and what it gets."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from pdlink.errors import ProtocolError
from pdlink.store import wire
from pdlink.store.socket_path import peer_of

if TYPE_CHECKING:
    from pathlib import Path

_CONNECT_S = 5.0


class Greeted(NamedTuple):
    end: socket.socket
    frames: wire.Frames[wire.Reply]
    """Of what comes after the welcome."""
    welcome: wire.Welcome
    arena: int
    """Its descriptor."""


def greet(path: Path, hello: wire.Hello) -> Greeted:
    """Connect to the store at `path`, if it is of this user and version. The caller closes socket and descriptor.

    Raises OSError, ProtocolError.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(_CONNECT_S)
        end.connect(str(path))
        _, uid = peer_of(end)
        if uid not in (os.geteuid(), 0):
            raise ProtocolError(f"user: got {uid}; expected {os.geteuid()}, this process's; run both as one user")
        end.sendall(wire.frame(hello))
        frames = wire.Frames(wire.REPLIES)
        welcome, arena = _welcomed(end, frames)
        if welcome.version != hello.version:
            os.close(arena)
            raise ProtocolError(f"version: got {welcome.version}; expected {hello.version}; install one version")
    except BaseException:
        end.close()
        raise
    return Greeted(end, frames, welcome, arena)


def _welcomed(end: socket.socket, frames: wire.Frames[wire.Reply]) -> tuple[wire.Welcome, int]:
    """The store's answer to a hello, and the arena's descriptor, for the caller to close."""
    descriptors: list[int] = []
    try:
        while True:
            more, fds, _, _ = socket.recv_fds(end, 65536, 4)
            descriptors += fds
            if not more:
                raise ProtocolError("welcome: the connection ended before it; look at the store's log")
            for reply in frames.take(more):
                if isinstance(reply, wire.Refused):
                    raise ProtocolError(f"it refuses this client: {reply.reason}")
                if not isinstance(reply, wire.Welcome) or len(descriptors) != 1:
                    raise ProtocolError(f"welcome: got {type(reply).__name__}; expected Welcome; is it a store?")
                return reply, descriptors.pop()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
