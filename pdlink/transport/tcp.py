"""`TcpTransport`: kernel TCP of our own, for hosts without RDMA and for peers not trusted with memory.

A native thread (`csrc/tcp`) gathers runs with sendmsg and receives them straight into the invited pages with recvmsg;
short ones are packed before and unpacked after, since the kernel takes as long for one as for a kilobyte.
An invitation is an address, a session and a secret that is good for one connection (of each stream). Every frame
names its session and where each of its runs goes, and the owner checks all of that before a byte is placed: a peer
can write to the blocks that it is offered, as long as it is, and nowhere else. An answer to each frame tells the
writer that its bytes are in the pages.

Nothing is encrypted: bytes, and the secret of an invitation when it is used, cross the network in the clear. Closing
is exact on the owner's side, where it matters: what is in a socket when `close_peer` ends it is gone. A writer's
PeerClosed waits for the owner to have ended the connection, at most ten seconds if it is stopped.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from pdlink import _tcp
from pdlink.errors import TransportFailure, TransportUnavailable
from pdlink.kv.groups import bands
from pdlink.transport.base import Probe, Site
from pdlink.transport.edge import decoded, numeric, require_numeric, translated
from pdlink.transport.native import NativeTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.config import TransportConfig
    from pdlink.kv.groups import Bands, KVGroups
    from pdlink.memory.buffers import AnyBuffer

CONNECT_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 5.0
"""How long a connection may take to say who it is."""
_Word = Annotated[int, msgspec.Meta(ge=0)]
_Nbytes = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class _Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pdlink-tcp/1"):
    """The whole of an invitation. The tag carries the version: another one is refused by name."""

    host: Annotated[str, msgspec.Meta(max_length=64)]
    """Numeric, so that connecting never waits for a name server."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    session: _Word
    token: Annotated[bytes, msgspec.Meta(min_length=_tcp.TOKEN_NBYTES, max_length=_tcp.TOKEN_NBYTES)]
    regions: Annotated[tuple[_Nbytes, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """Sizes."""


class TcpTransport(NativeTransport[_tcp.TransferEngine, "AnyBuffer"]):
    """Peers anywhere, through sockets. Lane "tcp"."""

    name: ClassVar[str] = "tcp"
    kind: ClassVar[str] = "tcp"
    reach = "network"
    memory = ("host",)
    trust = "blocks"

    def __init__(
        self,
        host: str = "127.0.0.1",
        streams: int = 1,
        congestion: str | None = None,
        advertise: str | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        pack_below_nbytes: int = 1024,
    ) -> None:
        """host: address or name to listen on; advertise: the one that peers are told, `host` if None.

        streams: connections to each peer. congestion: of the connections made here; None takes cubic (or reno, where
        that is not allowed) for peers on this host and the system's default for others.
        pack_below_nbytes: shorter runs are packed on their way, 0 packs none.
        """
        super().__init__()
        self._host = host
        self._advertise = advertise
        self._streams = streams
        self._congestion = congestion
        self._hello_timeout_s = hello_timeout_s
        self._pack_below = pack_below_nbytes
        self._advertised = ""
        self._on_loopback = True
        self._to_guard: KVGroups | None = None
        """Guarded before the first invitation: a worker that invites nobody needs no writable layout."""
        self._bands: Bands | None = None
        """What is guarded."""

    @classmethod
    def configured(cls, config: TransportConfig, site: Site) -> TcpTransport:
        return cls(site.host, config.tcp.streams, advertise=site.advertise_host)

    def probe(self) -> Probe:
        default = "system default"
        fast = next((name for name in ("cubic", "reno") if _tcp.congestion_usable(name)), default)
        return Probe(self.name, ok=True, facts={"congestion on one host": fast, "congestion else": default})

    def _start(self) -> _tcp.TransferEngine:
        """Looks up host names."""
        if not 1 <= self._streams <= _tcp.MAX_STREAMS:
            raise TransportUnavailable(f"tcp: {self._streams} streams, possible are 1 to {_tcp.MAX_STREAMS}")
        if not 0 <= self._pack_below <= _tcp.MAX_PACK_BELOW:
            raise TransportUnavailable(
                f"tcp: runs are packed below {self._pack_below} bytes, possible are 0 to {_tcp.MAX_PACK_BELOW}"
            )
        if self._congestion is not None and not _tcp.congestion_usable(self._congestion):
            raise TransportUnavailable(
                f"tcp: congestion control {self._congestion!r} cannot be used here; see "
                "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
            )
        listen = numeric(self._host, self.name)
        self._advertised = numeric(self._advertise, self.name) if self._advertise else listen
        if ipaddress.ip_address(self._advertised).is_unspecified:
            raise TransportUnavailable(f"tcp: nobody can connect to {self._advertised}; set listen.advertise")
        self._on_loopback = ipaddress.ip_address(listen).is_loopback
        try:
            return _tcp.TransferEngine(
                listen,
                self._streams,
                self._congestion or "",
                CONNECT_TIMEOUT_S,
                self._hello_timeout_s,
                self._pack_below,
            )
        except OSError as error:
            raise TransportUnavailable(f"tcp: {error}") from error

    def _add(self, buffer: AnyBuffer) -> int:
        return self._engine.add_region(buffer.ptr, buffer.nbytes)

    def guard(self, groups: KVGroups) -> None:
        """As in the contract, for every byte: a frame for a block that is not open ends its session."""
        self._to_guard = groups

    def open_blocks(self, peer: str, blocks: Sequence[Sequence[int]]) -> None:
        if self._native is not None and self._bands is not None:
            self._native.open_blocks(peer, self._bands.numbers(blocks))

    def close_blocks(self, peer: str, blocks: Sequence[Sequence[int]]) -> None:
        if self._native is not None and self._bands is not None:
            self._native.close_blocks(peer, self._bands.numbers(blocks))

    def invite(self, peer: str) -> bytes:
        engine = self._engine
        self._require_buffers()
        with translated(f"cannot invite peer {peer}"):
            with self._registering:
                if self._to_guard is not None:
                    found = bands(self._to_guard)
                    engine.guard(found.table, found.num_blocks)
                    self._bands, self._to_guard = found, None
            session, token, regions = engine.invite(peer)
        return msgspec.msgpack.encode(_Invitation(self._advertised, engine.port(), session, token, tuple(regions)))

    def connect(self, peer: str, invitation: bytes) -> None:
        engine = self._engine
        there = _decode(invitation)
        if self._on_loopback and not ipaddress.ip_address(there.host).is_loopback:
            raise TransportFailure(
                f"peer {peer} is at {there.host}, and this side's data port is for this host only; "
                "set listen.data to the address that others reach"
            )
        with translated(f"cannot connect to peer {peer}"):
            engine.connect(peer, there.host, there.port, there.session, there.token, there.regions)

    def details(self, peer: str) -> dict[str, str]:
        """How the bytes to a peer travel, for reports."""
        used = [] if self._native is None else self._native.congestion(peer)
        return {"streams": str(len(used)), "congestion": ", ".join(sorted(set(used)))}

    @property
    def strangers_dropped(self) -> int:
        """Connections that were ended because they did not prove to be invited."""
        return 0 if self._native is None else self._native.strangers_dropped()


def _decode(invitation: bytes) -> _Invitation:
    there = decoded(invitation, _Invitation, "tcp")
    require_numeric(there.host, "tcp")
    return there
