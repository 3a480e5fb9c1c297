"""Bare native loops that transports are compared with (csrc/anchors); nothing in pdlink itself imports this.

Every object must be dropped before the buffer that it was given. Missing libraries, refused connections and missed
deadlines are OSError or RuntimeError. `push` releases the GIL and returns when the bytes lie in the other process.
"""

import numpy as np
from numpy.typing import NDArray

class SocketReader:
    """Places what a `SocketWriter` sends, in a thread of its own."""

    def __init__(self, base: int, nbytes: int, congestion: str) -> None:
        """congestion: TCP's congestion control by name, "" for the system's default."""

    @property
    def port(self) -> int:
        """On 127.0.0.1."""

class SocketWriter:
    def __init__(self, base: int, nbytes: int, port: int, congestion: str) -> None: ...
    def declare(self, runs: NDArray[np.int64]) -> int:
        """The number of a batch. runs: [n, 3] source and destination offset from `base`, length."""

    def push(self, batch: int, timeout_s: float) -> None: ...
    @property
    def congestion(self) -> str:
        """What the kernel really uses."""

class PutTarget:
    """Memory that a `PutSource` may write; a thread gives UCX the turns it needs. Only in builds with UCX headers."""

    def __init__(self, library: str, tls: str, base: int, nbytes: int) -> None:
        """library: path of libucp; tls: as `transport.ucx.tls`."""

    @property
    def address(self) -> bytes: ...
    @property
    def rkey(self) -> bytes: ...

class PutSource:
    """Only in builds with UCX headers. Used by one thread."""

    def __init__(
        self, library: str, tls: str, base: int, nbytes: int, address: bytes, rkey: bytes, remote_base: int
    ) -> None: ...
    def declare(self, runs: NDArray[np.int64]) -> int:
        """As `SocketWriter.declare`."""

    def push(self, batch: int, timeout_s: float) -> None: ...
