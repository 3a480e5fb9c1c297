"""One-sided puts through UCX: RDMA between hosts that have it, TCP between hosts that have not, cross-memory attach
within one.

The work is done in `csrc/ucx` by one native thread; here are the invitation's wire form and the translation between
the native engine and `base.Transport`. UCX itself has no idea of a fence, so an invited peer gets a worker of its own
that is destroyed at `close_peer` (sockets, RDMA) and a gate page it must pass (cross-memory attach). Over TCP and
cross-memory attach UCX does not check where a peer writes, and it aborts on an address or key that is made to hurt:
invite and connect to only those peers that are trusted with the whole process.
"""

from __future__ import annotations

import os
import platform
import re
import weakref
import zlib
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

import msgspec

from pdlink.cuda.driver import CudaFailure, CudaUnavailable, moves_dma_buf
from pdlink.errors import LocalError, ProtocolError, TransportFailure, TransportUnavailable
from pdlink.memory.host import host_id
from pdlink.transport import ucx_copies
from pdlink.transport.base import NotBuilt, Probe, Site
from pdlink.transport.edge import translated
from pdlink.transport.native import CLOSE_GRACE_S, NativeTransport
from pdlink.transport.ucx_copies import NEEDED_UCX

try:
    from pdlink import _ucx
except ImportError:  # a build without UCX headers; probe() says so
    _ucx = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pdlink.capabilities import Reach
    from pdlink.config import TransportConfig
    from pdlink.cuda.buffers import DeviceMemory
    from pdlink.memory.buffers import AnyBuffer

PEERMEM = ("/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem")
"""Where the kernel shows a module that lets network cards reach a GPU's memory."""

_MAGIC = b"PDUX\x04"
"""The last byte is the version of the form below."""
_CHECKSUM_NBYTES = 4

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Blob = Annotated[bytes, msgspec.Meta(min_length=1, max_length=2**16)]


class _Region(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    base: _Count
    """Address in the inviting process."""
    nbytes: _Count
    rkey: _Blob


class _Invitation(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    ucx: Annotated[str, msgspec.Meta(max_length=32)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """`host_id()`: boot id / pid namespace."""
    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    born: _Count
    """Start time of that process; a pid alone may be given to another."""
    gate_fd: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    gate_device: _Count
    gate_inode: _Count
    gate_nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """In the gate's page: proves that the process named here made this invitation (`csrc/common/gate.h`)."""
    address: _Blob
    regions: Annotated[list[_Region], msgspec.Meta(max_length=4096)]


def _pack(invitation: _Invitation) -> bytes:
    body = msgspec.msgpack.encode(invitation)
    return _MAGIC + zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big") + body


def _unpack(packed: bytes) -> _Invitation:
    """Raises ProtocolError. UCX trusts addresses and keys to be whole: damage must be found before it sees them."""
    start = len(_MAGIC) + _CHECKSUM_NBYTES
    if packed[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError(f"not a UCX invitation of version {_MAGIC[-1]}: {packed[: len(_MAGIC)]!r}…")
    body = packed[start:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big") != packed[len(_MAGIC) : start]:
        raise ProtocolError(f"UCX invitation of {len(packed)} bytes is damaged: wrong checksum")
    try:
        invitation = msgspec.msgpack.decode(body, type=_Invitation)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"UCX invitation cannot be read: {error}") from None
    for index, region in enumerate(invitation.regions):
        if not 0 < region.base < region.base + region.nbytes < 2**64:
            raise ProtocolError(f"UCX invitation: region {index} has {region.nbytes} bytes at {region.base:#x}")
    return invitation


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    if not parts or not all(part.isdecimal() for part in parts):
        raise ProtocolError(f"UCX invitation: {text!r} is not a version")
    return tuple(int(part) for part in parts)


def _load(library: str | None) -> _ucx.Library:
    """Raises TransportUnavailable."""
    if _ucx is None:
        raise NotBuilt("built without UCX headers: reinstall with libucx-cu13 present")
    if library == "off":
        raise TransportUnavailable("UCX is switched off by transport.ucx.library: off")
    try:
        loaded = None if library else _ucx.Library.loaded()
        if loaded is not None:
            return loaded
        copy = ucx_copies.chosen(library)
        if copy.problem:
            raise TransportUnavailable(copy.problem)
        return _ucx.Library.load(copy.path, hooks=bool(ucx_copies.rdma_devices()))
    except _ucx.Unavailable as error:
        raise TransportUnavailable(f"transport.ucx.library: {error}" if library else str(error)) from None


def no_rdma(library: str | None) -> str:
    """Why bytes do not travel by RDMA; empty if they do. It is asked of the copy that `_load` takes."""
    try:
        loaded = None if library or _ucx is None else _ucx.Library.loaded()
    except _ucx.Unavailable as error:
        return str(error)
    return ucx_copies.chosen(library if loaded is None else loaded.path).no_rdma


def no_gpu_direct(device_index: int) -> str:
    """Why a network card does not reach this GPU's memory; empty if nothing speaks against it. Opens no context."""
    if any(map(os.path.exists, PEERMEM)):
        return ""
    kernel = re.match(r"(\d+)\.(\d+)", platform.release())
    try:
        if kernel and tuple(map(int, kernel.groups())) >= (5, 12) and moves_dma_buf(device_index):
            return ""
    except (CudaUnavailable, CudaFailure) as error:
        return str(error)
    return "nvidia_peermem is not loaded (modprobe nvidia_peermem), and driver and kernel share no memory by dmabuf"


class UcxTransport(NativeTransport["_ucx.TransferEngine", "AnyBuffer"]):
    """Puts through UCX, on whatever lane it finds; `lane(peer)` tells which."""

    name: ClassVar[str] = "ucx"
    kind: ClassVar[str] = "ucx"
    memory = ("host", "cuda")
    trust = "process"

    def __init__(self, tls: str = "auto", library: str | None = None, devices: str = "") -> None:
        """tls: "auto", "tcp", "shm" (cross-memory attach, one host only) or a UCX_TLS list.

        library: path of libucp.so.0, "off", or None to look for one (`ucx_copies.chosen`).
        devices: a UCX_NET_DEVICES list; empty lets UCX listen on every interface it finds.
        """
        super().__init__()
        self._tls, self._devices = tls, devices
        self.reach: Reach = "host" if tls == "shm" else "network"
        self._library_choice = library
        self._library: _ucx.Library | None = None
        self._host: str | None = None
        self._regions: list[_Region] = []
        """What invitations tell of our buffers, by region index."""

    @classmethod
    def configured(cls, config: TransportConfig, site: Site) -> UcxTransport:
        devices = config.ucx.devices
        if devices == "auto":
            devices = "lo" if site.this_host_only else "all"
        return cls(config.ucx.tls, config.ucx.library, "" if devices == "all" else devices)

    @classmethod
    def last_resort(cls, config: TransportConfig, site: Site) -> bool:
        """Over sockets it is slower than tcp, and checks nothing; a card must reach the memory, too."""
        if config.ucx.library == "off" or no_rdma(config.ucx.library):
            return True
        return site.memory == "cuda" and bool(no_gpu_direct(site.device_index))

    def probe(self) -> Probe:
        """As in the contract; loads the library. Whether it has a lane for device memory is seen in `register`."""
        try:
            loaded = _load(self._library_choice)
        except TransportUnavailable as error:
            return Probe(self.name, ok=False, reason=str(error))
        missing = no_rdma(self._library_choice)
        rdma = f"no: {missing}" if missing else ", ".join(ucx_copies.rdma_devices())
        return Probe(self.name, ok=True, facts={"version": loaded.version, "library": loaded.path, "RDMA": rdma})

    def _start(self) -> _ucx.TransferEngine:
        self._library = _load(self._library_choice)
        self._host = host_id()
        try:
            engine = _ucx.TransferEngine(self._library, self._tls, self._devices)
        except RuntimeError as error:
            raise TransportUnavailable(
                f"UCX {self._library.version} ({self._library.path}) with transports {self._tls!r}"
                + (f" on {self._devices!r}" if self._devices else "")
                + f": {error}"
            ) from None
        # Also at interpreter exit: UCX's own exit handlers must not find the thread at work.
        weakref.finalize(self, engine.close, CLOSE_GRACE_S)
        return engine

    def _add(self, buffer: AnyBuffer) -> int:
        """Device memory is registered as such, with its context.

        For memory that CUDA IPC does not share UCX leaves its CUDA lanes silently: that is refused.
        """
        context = 0
        if buffer.kind == "cuda":
            device_memory = cast("DeviceMemory", buffer)
            try:
                device_memory.require_shared()
            except LocalError as error:
                raise TransportUnavailable(str(error)) from error
            context = device_memory.device.context
        try:
            index, rkey = self._engine.register_memory(buffer.ptr, buffer.nbytes, context)
        except _ucx.PeerUnusable:
            raise
        except RuntimeError as error:
            raise TransportUnavailable(f"UCX cannot register {buffer.nbytes} bytes: {error}") from None
        self._regions.append(_Region(buffer.ptr, buffer.nbytes, rkey))
        return index

    def invite(self, peer: str) -> bytes:
        engine, library, host = self._engine, self._library, self._host
        assert library is not None
        assert host is not None
        self._require_buffers()
        with self._registering:
            regions = list(self._regions)
        pid = os.getpid()
        with translated(f"UCX cannot open a worker for peer {peer}"):
            born = _ucx.process_born(pid)
            address, gate = engine.invite(peer)
        return _pack(_Invitation(library.version, host, pid, born, *gate, address, regions))

    def connect(self, peer: str, invitation: bytes) -> None:
        engine, host = self._engine, self._host
        remote = _unpack(invitation)
        if _version(remote.ucx)[:2] < NEEDED_UCX:
            needed = ".".join(map(str, NEEDED_UCX))
            raise TransportFailure(f"peer {peer} runs UCX {remote.ucx}, needed is {needed} or later")
        assert host is not None
        same_host = remote.host.partition("/")[0] == host.partition("/")[0]
        visible = remote.host == host
        sockets_only = self._tls == "tcp"
        if self._tls == "shm" and not same_host:
            raise TransportFailure(f"peer {peer} is on another host, and transport.ucx.tls is shm")
        if same_host and not visible and not sockets_only:
            # UCX would write straight into its memory, and it could not keep us out of it again.
            raise TransportFailure(
                f"peer {peer} is on this host in another pid namespace, where its gate cannot be opened; "
                "share the pid namespace or set transport.ucx.tls: tcp"
            )
        pid, born = (remote.pid, remote.born) if visible else (0, 0)
        gate = None
        if visible and not sockets_only:
            gate = (remote.gate_fd, remote.gate_device, remote.gate_inode, remote.gate_nonce)
        regions = [(region.base, region.nbytes, region.rkey) for region in remote.regions]
        with translated("UCX"):  # the engine says which peer
            engine.connect(peer, remote.address, regions, pid, born, gate)

    def lane(self, peer: str) -> str:
        return "" if self._native is None else self._native.lane(peer)
