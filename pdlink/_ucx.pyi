"""UCX without Python in the way: one progress thread, commands in, events out (`csrc/ucx`).

An `Engine` belongs to the process that made it; in a forked child every method refuses or does nothing, so that the
parent's connections live on. No method holds the interpreter lock while it waits, and the thread never needs it.
"""

import enum
from collections.abc import Mapping, Sequence

import numpy as np

MAX_STAGE_BELOW: int
RING_NBYTES: int

class Unavailable(RuntimeError):
    """There is no UCX that can be used; the message names what was found, what is needed and what would help."""

class PeerError(RuntimeError):
    """The peer is failed, closed, unknown or cannot be connected from here, or the engine is closed."""

class Library:
    """A loaded libucp of version 1.20 or later. It stays loaded until the process ends."""

    @staticmethod
    def load(chosen: str, wheel: str) -> Library:
        """Find and load UCX.

        chosen: path of the libucp.so.0 to use, "off" for none, "" to take the one already loaded, the system's where
        the user prefers it (RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY) or InfiniBand is there, the wheel's, the system's.
        wheel: path of libucp.so.0 in the libucx package, "" if there is none.
        Raises Unavailable.
        """

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str:
        """Such as "1.22.0"."""

class Event:
    """One thing that happened, in order per peer."""

    class Kind(enum.Enum):
        BATCH_DONE = 0
        PEER_FAILED = 1
        PEER_CLOSED = 2

    class Status(enum.Enum):
        OK = 0
        TIMEOUT = 1
        PEER_FAILED = 2
        CANCELLED = 3

    @property
    def kind(self) -> Kind: ...
    @property
    def peer(self) -> str: ...
    @property
    def ticket(self) -> int:
        """This and the next four only for BATCH_DONE."""
    @property
    def status(self) -> Status: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def submitted_s(self) -> float:
        """On the clock of time.monotonic(), as `done_s`."""
    @property
    def done_s(self) -> float: ...
    @property
    def detail(self) -> str:
        """Why a batch or a peer failed."""

class Engine:
    """A UCX context, its workers and the thread that progresses them."""

    def __init__(self, library: Library, tls: str, devices: str = "", stage_below: Mapping[str, int] = {}) -> None:
        """tls: "auto" leaves the transports to UCX, "tcp", "shm" (cross-memory attach) or any UCX_TLS list.

        devices: a UCX_NET_DEVICES list; empty leaves them to UCX, which listens on every interface it finds.

        stage_below: runs shorter than this many bytes are packed on their way if a batch has a few, per lane; "" is
        for lanes that are not named, 0 packs none.

        Raises ValueError for more than MAX_STAGE_BELOW, RuntimeError if UCX cannot work with these transports here.
        """

    def register_memory(self, address: int, nbytes: int, cuda_context: int = 0) -> tuple[int, bytes]:
        """Register memory that outlives the engine; its region index (0, 1, …) and packed remote key.

        cuda_context: of device memory (a CUcontext), which the progress thread then has for good; 0 for host memory.
        """

    def invite(self, peer: str) -> tuple[bytes, tuple[int, int, int, bytes], tuple[int, int, bytes]]:
        """Open a worker for one peer: worker address; descriptor, device, inode and nonce of its gate page
        (csrc/gate.h); address, nbytes and packed key of its ring of slots (csrc/ucx/staging.h)."""

    def connect(
        self,
        peer: str,
        address: bytes,
        regions: Sequence[tuple[int, int, bytes]],
        pid: int,
        born: int,
        gate: tuple[int, int, int, bytes] | None,
        ring: tuple[int, int, bytes],
    ) -> None:
        """Begin to connect to an invitation's worker address.

        regions: base address, nbytes and packed key of each. pid and born: process to watch, 0 if it cannot be seen
        from here. gate: as `invite` says; None if only sockets or another host are involved.
        ring: of slots, as `invite` says.
        Raises PeerError if the process has ended, the gate cannot be opened or UCX refuses.
        """

    def submit(
        self,
        peer: str,
        pieces: Sequence[tuple[int, int, int, int, np.ndarray[tuple[int, int], np.dtype[np.int64]]]],
        timeout_s: float,
    ) -> int:
        """Queue a batch; its ticket. pieces: source region and base, destination region and base, runs [n, 3].

        Raises ValueError for a run outside its region (then nothing is written) and PeerError.
        """

    def poll(self) -> list[Event]:
        """What happened since the last call. Goes on working after close()."""

    def fileno(self) -> int:
        """Readable while `poll()` has something to return."""

    def notes_refused(self) -> int:
        """Notes about packed runs (csrc/ucx/staging.h) that made no sense; each has failed its peer."""

    def lane(self, peer: str) -> str:
        """UCX transport that puts to this peer take; "" until connected."""

    def close_peer(self, peer: str) -> None:
        """Cut off what the peer was invited to and end what was submitted to it; PEER_CLOSED follows."""

    def close(self) -> None:
        """End everything by force within two seconds. Safe twice."""

def process_born(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if there is none; with the pid it names it for ever."""
