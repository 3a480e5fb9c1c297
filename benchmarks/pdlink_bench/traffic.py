"""Transfers as a cluster would see them: many at once, of every length, between nodes in processes of their own.

`Prefill` has the KV of every prompt already; `Decode` asks for it at the times of a trace, and measures how long each
transfer takes from its offer to being ready. So all times are taken by one clock, that of the process which waits.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from pdlink.config import SharingConfig, TimeoutConfig, TransportConfig
from pdlink.errors import DeadlineExceeded
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.node.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.memory.buffers import HostBuffer
    from pdlink.node.node import Incoming
    from pdlink.transport.base import Transport

TIMEOUTS = TimeoutConfig(peer_s=45.0, lease_s=90.0, request_s=600.0)
"""A process that gets little of a loaded machine is slow, not gone."""
BATCH_TIMEOUT_S = 60.0
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """The model whose KV is moved, and the longest prompt. A quarter of an 8B model by default: 32 KiB per token."""

    num_layers: int = 16
    num_heads: int = 4
    head_dim: int = 128
    max_tokens: int = 8192

    @property
    def layout(self) -> KVLayout:
        return paged_layout(
            dtype="bfloat16",
            itemsize=2,
            num_layers=self.num_layers,
            num_blocks=self.num_blocks,
            block_tokens=BLOCK_TOKENS,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
        )

    @property
    def num_blocks(self) -> int:
        return -(-self.max_tokens // BLOCK_TOKENS)

    @property
    def axes(self) -> tuple[int, ...]:
        """Of the pool: layer, part, block, token, bytes."""
        return self.num_layers, 2, self.num_blocks, BLOCK_TOKENS, self.num_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    transfer_id: str
    num_tokens: int


def lognormal(chance: random.Random, max_tokens: int) -> int:
    """Tokens of a prompt: median 1,000, one in eight above 4,000; one block at least."""
    return min(max_tokens, max(BLOCK_TOKENS, int(chance.lognormvariate(6.9, 1.2))))


def trace(name: str, seed: int, count: int, max_tokens: int, tokens_per_s: float) -> list[Arrival]:
    """Transfers that come at random, as many as make `tokens_per_s` on average."""
    chance = random.Random(seed)
    lengths = [lognormal(chance, max_tokens) for _ in range(count)]
    gap_s = sum(lengths) / count / tokens_per_s
    arrivals, at_s = [], 0.0
    for index, num_tokens in enumerate(lengths):
        at_s += chance.expovariate(1 / gap_s)
        arrivals.append(Arrival(at_s, f"{name}-{index}", num_tokens))
    return arrivals


class _Side:
    def __init__(
        self,
        name: str,
        shape: Shape,
        make_transport: Callable[[], Transport],
        sharing: SharingConfig = SharingConfig(),  # noqa: B008  (frozen)
    ) -> None:
        self.shape = shape
        transport = make_transport()
        # Transfers write to blocks of each other here, whereas a worker's block is open to one peer at a time.
        transport.guard = lambda groups: None  # type: ignore[method-assign]
        settings = TransportConfig(batch_timeout_s=BATCH_TIMEOUT_S, sharing=sharing)
        self.node = Node(name, shape.layout, transport=settings, transports=[transport], timeouts=TIMEOUTS)
        array = cast("HostBuffer", self.node.buffers[0]).array
        self.pool_LPBTE = array[: int(np.prod(shape.axes))].reshape(shape.axes)

    def close(self) -> None:
        self.node.close()

    def pattern(self, layer: int, part: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """[token, bytes] of every block: the same in all, so that transfers may share blocks on both sides."""
        random_ = np.random.default_rng(layer * 2 + part)
        return random_.integers(1, 256, self.shape.axes[3:], np.uint8)


class Prefill(_Side):
    """Sends what it is asked for, over one transport, with one way of sharing it."""

    def __init__(
        self, name: str, shape: Shape, make_transport: Callable[[], Transport], sharing: SharingConfig
    ) -> None:
        super().__init__(name, shape, make_transport, sharing)
        for layer in range(shape.num_layers):
            for part in range(2):
                self.pool_LPBTE[layer, part] = self.pattern(layer, part)
        self._chance = np.random.default_rng(7)

    def address(self) -> str:
        return self.node.address

    def publish(self, transfers: Sequence[tuple[str, int]]) -> None:
        """The KV of these is here: (transfer id, tokens)."""
        for transfer_id, num_tokens in transfers:
            blocks = self._chance.permutation(self.shape.num_blocks)[: -(-num_tokens // BLOCK_TOKENS)].tolist()
            self.node.send(transfer_id, blocks, num_tokens, num_tokens).finish(1)


@dataclass(slots=True)
class _Wait:
    """One transfer, and when it was ready."""

    incoming: Incoming
    at_s: float = 0.0

    def note(self) -> None:
        self.at_s = time.monotonic()


class Decode(_Side):
    """Asks for KV, and says how long it took."""

    def __init__(self, name: str, shape: Shape, make_transport: Callable[[], Transport]) -> None:
        super().__init__(name, shape, make_transport)
        self._chance = np.random.default_rng(11)
        self._covered = np.zeros(shape.num_blocks, np.int64)
        """Tokens of each block that some transfer has written."""
        self._ended = threading.Semaphore(0)

    def play(self, address: str, arrivals: Sequence[Arrival], timeout_s: float) -> list[float]:
        """Seconds from each offer to ready."""
        blocks = [self._draw(arrival.num_tokens) for arrival in arrivals]
        offered_s, waits = [], []
        start_s = time.monotonic()
        for arrival, mine in zip(arrivals, blocks, strict=True):
            time.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
            offered_s.append(time.monotonic())
            waits.append(self._offer(address, arrival.transfer_id, mine, arrival.num_tokens))
        self._wait(waits, timeout_s)
        return [wait.at_s - began_s for wait, began_s in zip(waits, offered_s, strict=True)]

    def stream(self, address: str, transfers: Sequence[tuple[str, int]], timeout_s: float) -> float:
        """Seconds for all of these, two at a time."""
        waits = []
        start_s = time.monotonic()
        for index, (transfer_id, num_tokens) in enumerate(transfers):
            if index >= 2 and not self._ended.acquire(timeout=timeout_s):
                raise DeadlineExceeded(f"no transfer ended within {timeout_s:g} s")
            waits.append(self._offer(address, transfer_id, self._draw(num_tokens), num_tokens))
        self._wait(waits, timeout_s, len(waits) - max(0, len(transfers) - 2))
        return time.monotonic() - start_s

    def check_and_clear(self) -> str:
        """What is wrong in the pool, "" if nothing is; afterwards it is empty. Looks at every byte."""
        wrong = ""
        for layer in range(self.shape.num_layers):
            for part in range(2):
                expected = np.where(
                    (np.arange(BLOCK_TOKENS) < self._covered[:, None])[..., None], self.pattern(layer, part), 0
                )
                if not wrong and not np.array_equal(self.pool_LPBTE[layer, part], expected):
                    wrong = f"layer {layer} part {part} holds bytes that were not sent"
        self.pool_LPBTE[...] = 0
        self._covered[:] = 0
        return wrong

    def _draw(self, num_tokens: int) -> list[int]:
        blocks = self._chance.permutation(self.shape.num_blocks)[: -(-num_tokens // BLOCK_TOKENS)]
        self._covered[blocks[:-1]] = BLOCK_TOKENS
        last = num_tokens - (len(blocks) - 1) * BLOCK_TOKENS
        self._covered[blocks[-1]] = max(self._covered[blocks[-1]], last)
        found: list[int] = blocks.tolist()
        return found

    def _offer(self, address: str, transfer_id: str, blocks: list[int], num_tokens: int) -> _Wait:
        incoming = self.node.receive(transfer_id, address, blocks, range(num_tokens), by_layer=False)
        wait = _Wait(incoming)
        incoming.done.then(wait.note)
        incoming.released.then(self._ended.release)
        return wait

    def _wait(self, waits: Sequence[_Wait], timeout_s: float, count: int | None = None) -> None:
        deadline_s = time.monotonic() + timeout_s
        for _ in range(len(waits) if count is None else count):
            if not self._ended.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                raise DeadlineExceeded(f"not all of {len(waits)} transfers ended within {timeout_s:g} s")
        for wait in waits:
            wait.incoming.wait(0.0)
