"""Native copies into memory that peers on this host have opened to us (`csrc/copy`).

`Copier` is what `pdlink.transport.mapped` is made of; the functions below copy in the calling thread.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

_Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
_Runs: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
_Indices: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
_Sums: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
_File: TypeAlias = tuple[int, int, int, int]
"""Descriptor number in its process, st_dev, st_ino, nbytes."""
_Gate: TypeAlias = tuple[int, int, int, bytes]
"""Descriptor number in its process, st_dev, st_ino, the nonce in the page (`csrc/common/gate.h`)."""
_Report: TypeAlias = tuple[str, str, int, str, int, float, float, str]
"""Kind ("batch_done", "peer_failed", "peer_closed"), peer, ticket, value of `Status`, nbytes, submitted_s, done_s,
detail. Times are time.monotonic seconds."""

class PeerUnusable(RuntimeError):
    """The peer is unknown, failed or closed."""

class NameTaken(ValueError):
    """The name stands for a connection already."""

class PeerMemory:
    """A peer's regions, mapped here while this exists, for one who stores there himself: a GPU."""

    @property
    def regions(self) -> list[tuple[int, int]]:
        """Address and bytes that have memory now, of each."""

    def enter(self) -> bool:
        """Before something begins to store there; False: the peer has shut us out, and nothing may."""

    def leave(self) -> None:
        """It has ended. Once for each `enter` that was True; until then the peer's end is not told to it."""

class Copier:
    """A native thread that copies, or two. Usable from any thread; a forked child is refused."""

    def __init__(self, num_threads: int = 1) -> None:
        """Start them. Raises OSError, ValueError if it is not 1 or 2."""

    def add_region(self, ptr: int, nbytes: int) -> int:
        """Memory of this process, as source; returns its index. It must stay mapped until `close()`."""

    def invite(self, peer: str) -> _Gate:
        """Make a gate for a peer that will write here. Raises NameTaken, PeerUnusable, OSError."""

    def connect(self, peer: str, pid: int, regions: Sequence[_File], gate: _Gate) -> None:
        """Map another process's files. Their pages are entered into our page table in the background.

        Raises OSError if the process or a file is gone or may not be opened, ValueError if a file or the gate is not
        what it is said to be, NameTaken, PeerUnusable.
        """

    def memory_of(self, peer: str) -> PeerMemory:
        """Of a peer that this side is connected to. Raises PeerUnusable."""

    def submit(self, peer: str, lists: Sequence[tuple[int, int, int, int, _Runs]], timeout_s: float) -> int:
        """Queue one batch; lists are (src_region, src_base, dst_region, dst_base, runs). Returns its ticket.

        The runs are checked and copied without the GIL. Raises ValueError, PeerUnusable.
        """

    def computing(self, on: bool) -> None:
        """While on, the second thread begins nothing."""

    def ranges_taken(self) -> tuple[int, int]:
        """Ranges of runs, a quarter megabyte each, that the first and the second thread have copied or begun to."""

    def connected(self, peer: str) -> bool: ...
    def poll(self) -> list[_Report]:
        """What happened since the last call; what is left can still be fetched after `close()`."""

    def fileno(self) -> int:
        """Readable while `poll()` has something to say."""

    def close_peer(self, peer: str) -> None: ...
    def close(self, grace_s: float) -> None:
        """Close every peer, wait at most `grace_s` for writers that are in the middle of a range, end the threads."""

def memcpy_runs(dst: _Bytes, src: _Bytes, runs: _Runs) -> None:
    """Copy every run with memcpy in the calling thread, without the GIL. Raises ValueError for a run outside."""

def nt_runs(dst: _Bytes, src: _Bytes, runs: _Runs, kind: str = "") -> None:
    """The same with non-temporal stores of `kind` (one of `store_kinds()`), "" for the best."""

def store_kinds() -> list[str]:
    """Kinds of stores this CPU can run ("avx512", "avx2", "neon", "portable"), best first."""

def nt_runs_summed(
    dst: _Bytes,
    src: _Bytes,
    runs: _Runs,
    ends: _Indices,
    starts: _Indices,
    sums: _Sums,
    into_records: bool,
    kind: str = "",
) -> None:
    """As `nt_runs`, and add to `sums` what `sum_bytes` gives for the same bytes of a layer (`csrc/copy/sums.h`).

    Runs of several records follow each other: of record i those up to `ends[i]`, in a layer that begins at
    `starts[i]` of `dst` if `into_records`, else of `src`. There they are whole lines of 64 bytes. Raises ValueError
    for others.
    """

def sum_bytes(data: _Bytes, kind: str = "") -> tuple[int, int]:
    """The two sums of a layer. Reads it once, without the GIL."""

def sum_kinds() -> list[str]:
    """Kinds of sums this CPU can run ("avx2", "portable"), best first; all give the same."""
