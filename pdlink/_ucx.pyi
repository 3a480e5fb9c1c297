"""UCX without Python in the way: one native thread progresses it (`csrc/ucx`).

A `TransferEngine` belongs to the process that made it; in a forked child every method refuses or does nothing, so
that the parent's connections live on. No method holds the interpreter lock while it waits, and the thread never needs
it.
"""

from collections.abc import Sequence

import numpy as np

Gate = tuple[int, int, int, bytes]
"""Descriptor number in its process, st_dev, st_ino, the nonce in the page (`csrc/common/gate.h`)."""

class Unavailable(RuntimeError):
    """There is no UCX that can be used; the message names what was found, what is needed and what would help."""

class PeerUnusable(RuntimeError):
    """The peer is failed, closed, unknown or cannot be connected from here, or the engine is closed."""

class NameTaken(ValueError):
    """This side of a peer of that name is open already, or it is being closed."""

class Library:
    """A loaded libucp of version 1.20 or later. It stays loaded until the process ends."""

    @staticmethod
    def loaded() -> Library | None:
        """What another package of this process has loaded. Raises Unavailable if it is too old."""

    @staticmethod
    def load(path: str, *, hooks: bool) -> Library:
        """hooks: let UCX patch mmap and others in libc, which its cache of RDMA registrations needs.

        Raises Unavailable.
        """

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str:
        """Such as "1.22.0"."""

class TransferEngine:
    """A UCX context, its workers and the thread that progresses them."""

    def __init__(self, library: Library, tls: str, devices: str = "") -> None:
        """tls: "auto" leaves the transports to UCX, "tcp", "shm" (cross-memory attach) or any UCX_TLS list.

        devices: a UCX_NET_DEVICES list; empty leaves them to UCX, which listens on every interface it finds.

        Raises RuntimeError if UCX cannot work with these transports here.
        """

    def register_memory(self, address: int, nbytes: int, cuda_context: int = 0) -> tuple[int, bytes]:
        """Register memory that outlives the engine; its region index (0, 1, …) and packed remote key.

        cuda_context: of device memory (a CUcontext), which the progress thread then has for good; 0 for host memory.
        """

    def invite(self, peer: str) -> tuple[bytes, Gate]:
        """Open a worker for one peer: its address, and the gate. Raises NameTaken, PeerUnusable, RuntimeError."""

    def connect(
        self,
        peer: str,
        address: bytes,
        regions: Sequence[tuple[int, int, bytes]],
        pid: int,
        born: int,
        gate: Gate | None,
    ) -> None:
        """Begin to connect to an invitation's worker address.

        regions: base address, nbytes and packed key of each. pid and born: process to watch, 0 if it cannot be seen
        from here. gate: as `invite` says; None if only sockets or another host are involved.
        Raises NameTaken, and PeerUnusable if the process has ended or the gate cannot be opened. If UCX refuses the
        address or a key, the peer is reported as failed.
        """

    def submit(
        self,
        peer: str,
        lists: Sequence[tuple[int, int, int, int, np.ndarray[tuple[int, int], np.dtype[np.int64]]]],
        timeout_s: float,
    ) -> int:
        """Queue a batch; its ticket. lists: source region and base, destination region and base, runs [n, 3].

        Raises ValueError for a run outside its region (then nothing is written) and PeerUnusable.
        """

    def poll(self) -> list[tuple[str, str, int, str, int, float, float, str]]:
        """What happened since the last call, as `pdlink._copy.Copier.poll` says. Goes on working after close()."""

    def fileno(self) -> int:
        """Readable while `poll()` has something to return."""

    def lane(self, peer: str) -> str:
        """UCX transport that puts to this peer take; "" until connected."""

    def connected(self, peer: str) -> bool: ...
    def close_peer(self, peer: str) -> None:
        """Cut off what the peer was invited to and end what was submitted to it; PEER_CLOSED follows."""

    def close(self, grace_s: float) -> None:
        """End everything by force, wait at most `grace_s` for stopped writers, end the thread. Safe twice."""

def process_born(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if there is none; with the pid it names it for ever."""
