"""Kernels that reshape paged KV and store into peers' memory (`csrc/cuda`).

Nothing here but `KernelLauncher` and `GpuCopier` calls CUDA: launches are planned, and run by loops on this CPU if
asked. Addresses are taken on trust, as a kernel does; `pdlink.cuda.ops` and `pdlink.transport.mapped_cuda` are the
checked ways in.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Gate = tuple[int, int, int, bytes]
"""Descriptor number in its process, st_dev, st_ino, the nonce in the page (`csrc/common/gate.h`)."""

_Slot = tuple[int, int, int, int, int]
"""Pinned memory for the list of a launch: its address here and for kernels, and its bytes; as much memory of the GPU
for a long list, or 0; an event."""

_Shape = tuple[int, int, int, int, int, int, int, int, int, int]
"""`Strided` of `pdlink.kv.plan`."""

THREADS: int
"""Of a block, in every kernel."""

class Rows:
    """Where the rows of one side lie. Strides and addresses in bytes.

    The byte of (layer, part, slot, head) is at base + layer * layer_stride + part * part_stride + (slot //
    block_tokens) * block_stride + (slot % block_tokens) * token_stride + head * head_stride.
    """

    def __init__(
        self,
        *,
        base: int = 0,
        table: int = 0,
        alignment: int = 0,
        layer_stride: int = 0,
        part_stride: int = 0,
        block_stride: int,
        token_stride: int,
        head_stride: int = 0,
        block_tokens: int,
        slots: int = 0,
        slot_step: int = 8,
        first_slot: int = 0,
        num_slots: int,
    ) -> None:
        """table: address of one base per (layer, part), used instead of `base`; all are multiples of `alignment`, as
        are, where it is given without a table, all blocks.
        slots: address of one int64 slot per token, every `slot_step` bytes; 0 takes first_slot, first_slot + 1, …
        Slot -1 is skipped.
        """

class Launch:
    @property
    def kernel(self) -> str: ...
    @property
    def grid(self) -> tuple[int, int]:
        """Blocks in x and y."""

    @property
    def argument(self) -> bytes:
        """The kernel's only argument."""

def plan_reshape(
    src: Rows,
    dst: Rows,
    *,
    num_tokens: int,
    num_layers: int = 1,
    num_parts: int = 1,
    num_heads: int = 1,
    head_nbytes: int,
    refused: int = 0,
    max_strands: int = 0x7FFFFFFF,
    max_blocks: int = ...,
) -> list[Launch]:
    """The launches (one, unless there are very many tokens) that move num_tokens rows of every plane.

    refused: address of a uint32 that is set to 1 if a slot is outside its place (nothing is moved for it).
    max_strands: most strands (what a thread does) of one launch and plane. max_blocks: of a grid. Raises ValueError.
    """

def run_on_cpu(launch: Launch) -> None:
    """Do it here, with the same code, without the GIL."""

def kernel_names() -> list[str]: ...
def fatbin() -> bytes:
    """The kernels for GPUs, as `cuModuleLoadData` takes them; empty in a build without nvcc."""

def divide(divisor: int, n: int) -> int:
    """n // divisor as the kernels do it."""

class Moves:
    """What is to be copied in one launch, or a few that share a list (`csrc/cuda/moves.h`)."""

    def __init__(
        self,
        lists: Sequence[tuple[int, int, int, int, NDArray[np.int64]]],
        local: Sequence[tuple[int, int]],
        remote: Sequence[tuple[int, int]],
    ) -> None:
        """lists: as in `_copy.Copier.submit`; local, remote: address and bytes of each region. Neighbours are joined.

        Raises ValueError for a run outside its region.
        """

    @property
    def num_launches(self) -> int:
        """At least: one for each length of runs."""

    @staticmethod
    def of_plan(
        pairs: NDArray[np.int32],
        unit_tokens: int,
        skip: int,
        num_tokens: int,
        layers: Sequence[tuple[_Shape, list[tuple[int, int, int, int]]]],
        local: Sequence[tuple[int, int]],
        remote: Sequence[tuple[int, int]],
    ) -> Moves:
        """As `GpuCopier.submit_plan`, of one part. Raises ValueError for a unit outside its region."""

    @staticmethod
    def of_pairs(
        src: Rows,
        dst: Rows,
        pairs: NDArray[np.int64],
        *,
        unit_tokens: int,
        skip: int,
        num_tokens: int,
        num_parts: int,
        num_heads: int,
        head_nbytes: int,
    ) -> Moves:
        """Tokens between units of `pairs` [n, 2], C-contiguous. Addresses are taken on trust. Raises ValueError."""

class KernelLauncher:
    """Launches, each with everything it asks of the driver in one call; any thread may call.

    Streams and events are handles of the driver.
    """

    def __init__(self, library: str, context: int, kernels: Sequence[tuple[str, int]], max_blocks: int = ...) -> None:
        """kernels: each by name. max_blocks: of a launch. Raises RuntimeError if `library` has not what is needed."""

    def launch(self, moves: Moves, slot: _Slot, work: int) -> tuple[str, int, bool]:
        """Launch it in the stream `work`, keep its list in the slot, record the slot's event.

        Returns the call that failed and its number, or "" and 0, and whether a kernel was launched. Raises ValueError
        for a list that the slot has no room for.
        """

    def ring_after(self, event: int, fd: int, bell: int) -> tuple[str, int]:
        """Make an eventfd readable when `event` is reached; not after a fault. Returns what failed.

        bell: a stream for this alone.
        """

class PeerUnusable(RuntimeError):
    """The peer is unknown, failed or closed, or the GPU has failed."""

class NameTaken(ValueError):
    """The name stands for a connection already."""

class GpuCopier:
    """Kernels that store into peers' device memory, and a native thread that sees them end (`csrc/cuda/copier.h`)."""

    def __init__(
        self,
        launcher: KernelLauncher,
        slots: Sequence[_Slot],
        streams: Sequence[tuple[int, int]],
        launch_nbytes: int,
    ) -> None:
        """launcher, slots, streams: stay until `close`. streams: for launches, each with one for host functions; the
        first is for launches that wait for nothing. launch_nbytes: about the most bytes of one launch.

        Raises OSError.
        """

    def add_region(self, ptr: int, nbytes: int) -> int:
        """Memory that kernels read, by its address for them; returns its index. It stays until `close`."""

    def invite(self, peer: str) -> _Gate:
        """Make a gate for a peer that will write into our memory. Raises NameTaken, PeerUnusable, OSError."""

    def connect(self, peer: str, pid: int, regions: Sequence[tuple[int, int]], gate: _Gate) -> None:
        """regions: address here and bytes of the peer's memory, which stays mapped until PeerClosed.

        Raises OSError if the gate cannot be opened or has a writer, ValueError if it is another one, NameTaken,
        PeerUnusable.
        """

    def submit(
        self, peer: str, lists: Sequence[tuple[int, int, int, int, NDArray[np.int64]]], timeout_s: float
    ) -> int:
        """As `_copy.Copier.submit`."""

    def submit_plan(
        self,
        peer: str,
        pairs: NDArray[np.int32],
        unit_tokens: int,
        skip: int,
        num_tokens: int,
        layers: Sequence[
            tuple[tuple[int, int, int, int, int, int, int, int, int, int], list[tuple[int, int, int, int]]]
        ],
        timeout_s: float,
        after: Sequence[tuple[int, int]],
    ) -> int:
        """The same of layers (`LayerTemplate.strided`): tokens between units of `pairs` [n, 2], C-contiguous.

        after: events that the GPU waits for before it reads, each with the stream it was recorded in. timeout_s
        counts from when all are reached. They must stay as they are until the batch is reported.
        """

    def connected(self, peer: str) -> bool: ...
    def poll(self) -> list[tuple[str, str, int, str, int, float, float, str]]: ...
    def fileno(self) -> int: ...
    def close_peer(self, peer: str) -> None: ...
    def close(self, grace_s: float) -> bool:
        """Close every peer, wait at most `grace_s` for kernels and for others, end the thread.

        False if a kernel may still be running: what it uses must not be freed. False in a forked child.
        """
