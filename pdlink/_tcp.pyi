"""Native TCP of our own (`csrc/tcp`): what `pdlink.transport.tcp` is made of."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

_Runs: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
_Blocks: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
_Report: TypeAlias = tuple[str, str, int, str, int, float, float, str]
"""Kind ("batch_done", "peer_failed", "peer_closed"), peer, ticket, value of `Status`, nbytes, submitted_s, done_s,
detail. Times are time.monotonic seconds."""

MAX_PACK_BELOW: int
MAX_STREAMS: int
TOKEN_NBYTES: int

class PeerUnusable(RuntimeError):
    """The peer is unknown, failed or closed."""

class NameTaken(ValueError):
    """The name stands for a connection already."""

class TransferEngine:
    """One native thread with a listening socket and its connections. Any thread may call; a forked child may not."""

    def __init__(
        self,
        host: str,
        streams: int,
        congestion: str,
        connect_timeout_s: float,
        hello_timeout_s: float,
        pack_below: int = 0,
    ) -> None:
        """Listen on a free port of `host`, a numeric address. Raises OSError, ValueError.

        streams: connections to each peer. congestion: "" takes a fast one for peers on this host.
        pack_below: runs shorter than this many bytes are packed on their way; 0 packs none, most is MAX_PACK_BELOW.
        """

    def port(self) -> int: ...
    def add_region(self, ptr: int, nbytes: int) -> int:
        """Memory of this process; returns its index. It must stay mapped until `close()`."""

    def guard(self, bands: np.ndarray[tuple[int, int], np.dtype[np.int64]], num_blocks: int) -> None:
        """From now on peers may write only to blocks that are open to them.

        bands: [n, 4], rows (region, begin, stride, extent) in order, not overlapping: block b has the bytes
        [begin + b * stride, begin + b * stride + extent) of each. Once, before anybody is invited. Raises ValueError.
        """

    def open_blocks(self, peer: str, blocks: _Blocks) -> None:
        """Let a peer write to these. A block is open to one peer at most. Raises ValueError."""

    def close_blocks(self, peer: str, blocks: _Blocks) -> None:
        """No longer: when this returns nothing of the peer is being placed there. Waits for one recvmsg at most."""

    def invite(self, peer: str) -> tuple[int, bytes, list[int]]:
        """Session, token and the sizes of the regions added by now. Raises NameTaken, PeerUnusable, OSError."""

    def connect(self, peer: str, host: str, port: int, session: int, token: bytes, regions: Sequence[int]) -> None:
        """Begin to connect to a numeric address. Raises NameTaken, PeerUnusable, OSError, ValueError."""

    def submit(self, peer: str, lists: Sequence[tuple[int, int, int, int, _Runs]], timeout_s: float) -> int:
        """Queue one batch; lists are (src_region, src_base, dst_region, dst_base, runs). Returns its ticket.

        The runs are checked and copied without the GIL. Raises ValueError, PeerUnusable.
        """

    def connected(self, peer: str) -> bool: ...
    def congestion(self, peer: str) -> list[str]:
        """The congestion control of each connection to a peer."""

    def strangers_dropped(self) -> int:
        """Connections that were ended because they did not prove to be invited."""

    def poll(self) -> list[_Report]:
        """What happened since the last call; what is left can still be fetched after `close()`."""

    def fileno(self) -> int:
        """Readable while `poll()` has something to say."""

    def close_peer(self, peer: str) -> None: ...
    def close(self, grace_s: float) -> None:
        """Close every peer, wait at most `grace_s` for owners that have not read all yet, end the thread."""

def congestion_usable(name: str) -> bool:
    """Whether this process may use a congestion control."""
