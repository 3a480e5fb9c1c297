"""`MappedTransport`: bytes go straight into pages of a peer process on the same host, stored by this one.

The invitation names the peer's memory files by their descriptor numbers; the writer opens them through
`/proc/PID/fd`, maps them, and its native copier (`csrc/copy`) stores into them. The owner's CPU takes no part: a
transfer lands although the owner is busy, or stopped. One core's stores do not fill the memory bus, so a second
thread helps with more than a megabyte at once, unless this process computes a prefill meanwhile. What a connection
would give has to be made by hand:

- who is alive: the writer watches the owner's pidfd, since storing into a dead process's memory succeeds silently;
- who may still write: a gate page per peer (`csrc/common/gate.h`), which the owner shuts in `close_peer`. PeerClosed
  comes when the writer is in no range of a copy any more, or has ended. A writer stopped inside one holds it up;
- who has invited us: an invitation could name any process of this user. It repeats a random number out of the gate
  page, so it comes from the process that it names, and never from this one.

Opening another process's descriptors needs the rights of a debugger's reader: the same user (or root) and the same
pid namespace. Two containers need a shared one (docker `--pid`, Kubernetes `shareProcessNamespace`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec.structs import astuple

from pdlink import _copy
from pdlink.errors import ProtocolError, TransportFailure, TransportUnavailable
from pdlink.memory.buffers import Buffer
from pdlink.memory.host import boot_id, pid_namespace
from pdlink.transport.base import Probe, Site
from pdlink.transport.edge import decoded, require_this_host, translated
from pdlink.transport.native import NativeTransport

if TYPE_CHECKING:
    from pdlink.config import TransportConfig
    from pdlink.memory.buffers import HostBuffer

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Descriptor = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A memory file of the inviting process."""

    fd: _Descriptor
    device: _Number
    inode: _Number
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class _Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gate page of the invited peer."""

    fd: _Descriptor
    device: _Number
    inode: _Number
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """In the page since it was made, and told to the invited peer only."""


class _Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pdlink-mapped/2"):
    """The whole of an invitation. The tag carries the version: another one is refused by name."""

    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    """Of the kernel: equal on one host until it restarts."""
    pid_namespace: _Number
    pid: _Pid
    regions: Annotated[tuple[_File, ...], msgspec.Meta(min_length=1, max_length=4096)]
    gate: _Gate


class MappedTransport(NativeTransport[_copy.Copier, "HostBuffer"]):
    """Peers on this host, through shared pages. Lane "mapped"."""

    name: ClassVar[str] = "mapped"
    kind: ClassVar[str] = "mapped"
    reach = "host"
    memory = ("host",)
    trust = "pool"

    def __init__(self, threads: int = 2, *, within_process: bool = False) -> None:
        """threads: 2 to have a second one help with much at once while this process computes no prefill, or 1.

        within_process: peers may be in this process too, as in tests. A worker refuses them: such an invitation is
        its own, sent back by a peer to make it overwrite its own memory.
        """
        super().__init__()
        self._threads = threads
        self._within_process = within_process

    @classmethod
    def configured(cls, config: TransportConfig, site: Site) -> MappedTransport:
        return cls()

    def probe(self) -> Probe:
        """Makes one page of shared memory and invites this process to it."""
        facts = {"stores": _copy.store_kinds()[0], "kernel": os.uname().release}
        step = "memory files (memfd_create)"
        try:
            with Buffer(1, name="pdlink-probe") as page:
                step = "opening memory of a process (pidfd_open, /proc/PID/fd; seccomp may forbid them)"
                copier = _copy.Copier()
                try:
                    copier.connect("probe", os.getpid(), [astuple(_file_of(page))], copier.invite("probe-gate"))
                finally:
                    copier.close(0.0)
        except OSError as error:
            return Probe(self.name, ok=False, reason=f"{step}: {error}", facts=facts)
        return Probe(self.name, ok=True, facts=facts)

    def _start(self) -> _copy.Copier:
        probe = self.probe()
        if not probe.ok:
            raise TransportUnavailable(f"mapped memory does not work here: {probe.reason}")
        return _copy.Copier(self._threads)

    def _add(self, buffer: HostBuffer) -> int:
        """Memory that is not shared can only be sent from: see `no_invitations`."""
        return self._engine.add_region(buffer.ptr, buffer.nbytes)

    @property
    def no_invitations(self) -> str:
        heap = next((index for index, buffer in enumerate(self._buffers) if buffer.fd < 0), None)
        if heap is None:
            return ""
        return (
            f"mapped: region {heap} is borrowed memory, which no other process can map; receive over tcp or ucx "
            '(transport.kind "auto"), or into shared memory (pdlink.memory.buffers.Buffer)'
        )

    def invite(self, peer: str) -> bytes:
        copier = self._engine
        self._require_buffers()
        if self.no_invitations:
            raise TransportFailure(self.no_invitations)
        with translated(f"cannot invite peer {peer}"):
            regions = tuple(_file_of(buffer) for buffer in self._buffers)
            boot, namespace = boot_id(), pid_namespace()
            gate = _Gate(*copier.invite(peer))  # last: it is not to be made for an invitation that cannot be given
        return msgspec.msgpack.encode(_Invitation(boot, namespace, os.getpid(), regions, gate))

    def connect(self, peer: str, invitation: bytes) -> None:
        copier = self._engine
        there = decoded(invitation, _Invitation, "mapped memory")
        with translated(f"cannot map the memory of peer {peer}"):
            require_this_host(peer, there.boot_id, there.pid_namespace)
            if there.pid == os.getpid() and not self._within_process:
                raise ProtocolError(
                    f"invitation of peer {peer} names this process ({there.pid}) as the one to write to"
                )
            copier.connect(peer, there.pid, [astuple(file) for file in there.regions], astuple(there.gate))

    def memory_of(self, peer: str) -> _copy.PeerMemory:
        try:
            return self._engine.memory_of(peer)
        except RuntimeError as error:  # `PeerUnusable` of this engine
            raise TransportFailure(str(error)) from error

    def computing(self, on: bool) -> None:
        """As in the contract: while on, one thread copies."""
        if self._native is not None:
            self._native.computing(on)

    def ranges_taken(self) -> tuple[int, int]:
        """Ranges of runs, a quarter megabyte each, that the first and the second thread have copied or begun to."""
        return self._engine.ranges_taken()


def _file_of(buffer: HostBuffer) -> _File:
    status = os.fstat(buffer.fd)
    return _File(buffer.fd, status.st_dev, status.st_ino, buffer.nbytes)
