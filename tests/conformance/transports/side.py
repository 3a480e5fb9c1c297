"""One end of a conversation, with the verbs the tests speak; a test process and a helper process use the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdlink.kv.layout import KVLayout, LayerLayout, Part, RunArray, RunList
from pdlink.kv.plan import bind, template
from pdlink.memory.buffers import AnyBuffer, Buffer, Bytes
from pdlink.transport.base import BatchDone, Occurrence, PeerClosed, PeerFailed, Transport
from tests.waiting import readable

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 60.0
"""How long anything may take before a test gives up; nothing is expected to take that long."""

LONG_NBYTES = 4 << 20
LONG_PASSES = 2048
"""Bytes and rounds of the batch that is still in flight when something happens to it: 8 GiB if nothing did."""


SHORT_NBYTES = 512
SHORT_PASSES = 512
"""The same with runs that are packed on their way, where a transport does that: 2 GiB."""


class SeenBuffer(AnyBuffer, Protocol):
    """Memory of a side, whose bytes the tests look at, if it is a GPU's, through a copy."""

    @property
    def array(self) -> Bytes: ...


def host_memory(contents: Bytes) -> Buffer:
    buffer = Buffer(len(contents))
    buffer.array[: len(contents)] = contents
    return buffer


class Side:
    """A transport, its buffers, and everything it has reported."""

    def __init__(
        self, transport: Transport, shorter: float = 1, memory: Callable[[Bytes], SeenBuffer] = host_memory
    ) -> None:
        """shorter: divides the bytes of long batches, for a transport that takes longer for each, or below 1 for one
        that takes less. memory: makes a buffer that holds these bytes."""
        self.transport, self._shorter, self._memory = transport, shorter, memory
        self.buffers: list[SeenBuffer] = []
        self.happened: list[Occurrence] = []
        self._by_plan = False
        transport.open()

    def add_buffer(self, nbytes: int, seed: int) -> int:
        """Register a buffer of random bytes."""
        buffer = self._memory(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))
        self.buffers.append(buffer)
        return self.transport.register(buffer)

    def invite(self, peer: str) -> str:
        return self.transport.invite(peer).hex()

    def connect(self, peer: str, invitation: str) -> None:
        self.transport.connect(peer, bytes.fromhex(invitation))

    def submit(self, peer: str, *lists: RunList, timeout_s: float = PATIENCE_S) -> int:
        return self.transport.submit(peer, lists, timeout_s)

    def submit_block(self, peer: str, offset: int, nbytes: int, timeout_s: float = PATIENCE_S) -> int:
        """Bytes between equal offsets of the first regions: by turns a run, and a plan of one block."""
        self._by_plan = not self._by_plan
        if not self._by_plan or not nbytes:
            return self.submit(peer, run_list([[offset, offset, nbytes]]), timeout_s=timeout_s)
        layer = LayerLayout((Part(0, offset),), nbytes, nbytes, nbytes)
        layout = KVLayout("uint8", 1, 1, 1, nbytes, (layer,))
        plan = bind(template(layout, layout), [0], [0], 0, 1)
        return self.transport.submit_plan(peer, plan, range(1), timeout_s)

    def submit_long(self, peer: str, timeout_s: float = PATIENCE_S, *, short: bool = False) -> int:
        """Write the first `LONG_NBYTES` of the peer's first region again and again, each time other bytes.

        short: in short runs, no two of which are neighbours.
        """
        page, passes = (SHORT_NBYTES, SHORT_PASSES) if short else (32 << 10, LONG_PASSES)
        passes = int(passes / self._shorter)
        if not short and self._shorter < 1:
            page = int(page / self._shorter)  # as many runs, which are what submitting them costs
        starts = np.arange(0, LONG_NBYTES, page, dtype=np.int64)
        if short:
            starts = np.concatenate([starts[::2], starts[1::2]])
        rounds = np.arange(passes, dtype=np.int64)
        runs = np.empty((passes, len(starts), 3), dtype=np.int64)
        runs[:, :, 0] = starts + 64 * (rounds[:, None] % LONG_PASSES)
        runs[:, :, 1] = starts
        runs[:, :, 2] = page
        return self.submit(peer, RunList(0, 0, 0, 0, runs.reshape(-1, 3)), timeout_s=timeout_s)

    def submit_short(self, peer: str) -> int:
        """`submit_long` in short runs."""
        return self.submit_long(peer, short=True)

    def poll(self) -> None:
        self.happened.extend(self.transport.poll())

    def wait_until(self, true: Callable[[], bool], what: str) -> None:
        """Fetch occurrences until a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        self.poll()
        while not true():
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"waited {PATIENCE_S} s for {what}; happened: {self.happened}"
            readable(self.transport.fileno(), timeout_s=left_s)
            self.poll()

    def done(self, ticket: int) -> list[BatchDone]:
        return [one for one in self.happened if isinstance(one, BatchDone) and one.ticket == ticket]

    def wait_batch(self, ticket: int) -> str:
        """The status of a batch once it is reported."""
        self.wait_until(lambda: bool(self.done(ticket)), f"batch {ticket}")
        return self.done(ticket)[0].status.value

    def wait_failed(self, peer: str) -> str:
        """The reason a peer failed for, once it has."""

        def failed() -> list[PeerFailed]:
            return [one for one in self.happened if isinstance(one, PeerFailed) and one.peer == peer]

        self.wait_until(lambda: bool(failed()), f"failure of {peer}")
        return failed()[0].reason

    def wait_closed(self, peer: str) -> None:
        self.wait_until(lambda: PeerClosed(peer) in self.happened, f"end of {peer}")

    def closed_within(self, peer: str, timeout_s: float) -> bool:
        """Whether the end of a peer is reported within a time that is meant to be too short in some runs."""
        deadline = time.monotonic() + timeout_s
        while PeerClosed(peer) not in self.happened and (left_s := deadline - time.monotonic()) > 0:
            readable(self.transport.fileno(), timeout_s=left_s)
            self.poll()
        return PeerClosed(peer) in self.happened

    def wait_changed(self, before: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Return as soon as the first bytes of the first buffer are not these any more."""
        deadline = time.monotonic() + PATIENCE_S
        while np.array_equal(self.buffers[0].array[: len(before)], before):
            assert time.monotonic() < deadline, "no byte has arrived"
            time.sleep(0.0005)

    def snapshot(self) -> list[bytes]:
        return [buffer.array.tobytes() for buffer in self.buffers]

    def digest_of(self, offset: int, nbytes: int) -> str:
        """Of a part of the first buffer."""
        return hashlib.sha256(self.buffers[0].array[offset : offset + nbytes].tobytes()).hexdigest()

    def close_peer(self, peer: str) -> None:
        self.transport.close_peer(peer)

    def close(self) -> None:
        self.transport.close()
        for buffer in self.buffers:
            buffer.close()


def runs_array(rows: list[list[int]]) -> RunArray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def run_list(rows: list[list[int]], src_region: int = 0, dst_region: int = 0) -> RunList:
    return RunList(src_region, 0, dst_region, 0, runs_array(rows))


def join(writer: Side, owner: Side, writer_name: str = "writer", owner_name: str = "owner") -> None:
    """Let `writer` write into `owner`'s buffers."""
    writer.connect(owner_name, owner.invite(writer_name))


def assert_cut_off(statuses: list[str], *by: str) -> None:
    """The last batch was cut off by one of these, and each after the first that was.

    Not all: a slow tester may come after the first batches have ended.
    """
    assert statuses[-1] in by, statuses
    assert set(dropwhile("ok".__eq__, statuses)) <= set(by), statuses


def wait_until_sockets_are_full() -> None:
    """Return when bytes that nobody takes wait in a socket of this process."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ours = set[str]()
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                ours.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
        for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in ours and int(fields[4].partition(":")[0], 16) > 0:
                return
        time.sleep(0.001)
    raise AssertionError("the peer takes everything")
