"""Anchors: bare native loops that do nothing but move the same runs (`csrc/anchors`).

They show what UCX and the kernel's TCP can do on this machine when nothing is checked, queued, fenced or shared, and
so what is left to gain under a transport that does all of that. A push is one blocking call.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, ClassVar

from pdlink.errors import TransportFailure
from pdlink.transport.base import Probe
from pdlink.transport.ucx import UcxTransport

from .foreign import ForeignTransport

try:
    from . import _anchors

    BUILT, BUILT_WITH_UCX = True, hasattr(_anchors, "PutSource")
except ImportError:  # a source tree without its native modules; probe() says so
    BUILT = BUILT_WITH_UCX = False

if TYPE_CHECKING:
    from pdlink.kv.layout import RunArray

NOT_BUILT = "built without the anchors: pip install ./benchmarks builds them"


class _Anchor(ForeignTransport):
    def __init__(self) -> None:
        super().__init__()
        self._reader: Any = None
        self._writer: Any = None

    def open(self) -> None: ...

    def prepare(self, runs: RunArray) -> int:
        number: int = self._writer.declare(runs)
        return number

    def push(self, ticket: int, peer: str, nbytes: int, prepared: int, timeout_s: float) -> None:
        started_s = time.monotonic()
        try:
            self._writer.push(prepared, timeout_s)
        except (OSError, RuntimeError) as error:
            raise TransportFailure(f"{self.name}: {error}") from None
        self.done(ticket, peer, nbytes, started_s)

    def fileno(self) -> int:
        raise NotImplementedError("nothing to wait for: a push has landed when submit returns")

    def close(self) -> None:
        self._reader = self._writer = None  # their threads end here, before the buffer goes


class SocketPair(_Anchor):
    """sendmsg of 64 runs at a time, recvmsg straight into the pages; one thread each side."""

    name: ClassVar[str] = "bare sockets"

    def __init__(self, congestion: str = "cubic") -> None:
        super().__init__()
        self._congestion = congestion

    @classmethod
    def probe(cls) -> Probe:
        return Probe(cls.name, ok=BUILT, reason="" if BUILT else NOT_BUILT)

    def invite(self, peer: str) -> bytes:
        self._reader = _anchors.SocketReader(self.buffer.ptr, self.buffer.nbytes, self._congestion)
        return str(self._reader.port).encode()

    def connect(self, peer: str, invitation: bytes) -> None:
        self._writer = _anchors.SocketWriter(self.buffer.ptr, self.buffer.nbytes, int(invitation), self._congestion)

    def lane(self, peer: str) -> str:
        return f"tcp, {self._writer.congestion}"


class PutLoop(_Anchor):
    """ucp_put_nbx in a loop and one flush, polled without a rest, with pdlink's settings of UCX."""

    name: ClassVar[str] = "bare puts"

    def __init__(self, tls: str) -> None:
        super().__init__()
        self._tls = tls
        self._library = ""

    @classmethod
    def probe(cls) -> Probe:
        if not BUILT_WITH_UCX:
            return Probe(cls.name, ok=False, reason=NOT_BUILT)
        return UcxTransport().probe()

    def open(self) -> None:
        self._library = UcxTransport().probe().facts["library"]

    def invite(self, peer: str) -> bytes:
        self._reader = _anchors.PutTarget(self._library, self._tls, self.buffer.ptr, self.buffer.nbytes)
        target = {"address": self._reader.address.hex(), "rkey": self._reader.rkey.hex(), "base": self.buffer.ptr}
        return json.dumps(target).encode()

    def connect(self, peer: str, invitation: bytes) -> None:
        target = json.loads(invitation)
        self._writer = _anchors.PutSource(
            self._library,
            self._tls,
            self.buffer.ptr,
            self.buffer.nbytes,
            bytes.fromhex(target["address"]),
            bytes.fromhex(target["rkey"]),
            target["base"],
        )

    def lane(self, peer: str) -> str:
        return "cma" if self._tls == "shm" else self._tls
