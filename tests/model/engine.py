"""An engine without a model: it takes blocks, writes bytes that tell whose they are, and calls the real legs.

The KV of (transfer, layer, part, token) is eight bytes that name all four, so that any byte of another transfer, of
another position or of an earlier use of the block is seen. What the engine has written or received must be there,
unchanged, until it gives the blocks back.

In half of the worlds a cache has two more groups, of a layer each (`kept.py`): what they keep changes while a prompt
is computed, so bytes that were read too early or too late are seen, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import PoolExhausted, RequestAborted
from pdlink.memory.blocks import BlockPool
from pdlink.serve.stream import DecodeLeg, PrefillLeg

from .kept import NO_BLOCKS, NUM_KEPT, KeptBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.errors import PdlinkError
    from pdlink.kv.layout import KVLayout
    from pdlink.node.port import EnginePort

    from .kept import Kept

KV = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
NUM_LAYERS, NUM_PARTS, ROW_NBYTES, MAX_TOKENS = 2, 2, 8, 9


class Violation(AssertionError):
    """Something that must never happen has happened."""


@lru_cache(maxsize=64)
def content(number: int) -> KV:
    """[layer, part, token, bytes] of the prompt of transfer `number`."""
    out = np.empty((NUM_LAYERS, NUM_PARTS, MAX_TOKENS, ROW_NBYTES), np.uint8)
    out[...] = (number >> 8 & 255, number & 255, 0, 0, 0, 0xA5, number * 37 & 255, 0x5A)
    out[..., 2] = np.arange(1, NUM_LAYERS + 1)[:, None, None]
    out[..., 3] = np.arange(1, NUM_PARTS + 1)[None, :, None]
    out[..., 4] = np.arange(1, MAX_TOKENS + 1)
    return out


def transfer_number(row: KV) -> int:
    """Whose bytes these are, going by their beginning."""
    return int(row[0]) << 8 | int(row[1])


@dataclass(eq=False)
class Request:
    """One leg of a transfer in an engine."""

    transfer_id: str
    number: int
    """Names the content."""
    num_tokens: int
    num_cached: int
    chunk: int
    leg: PrefillLeg | DecodeLeg | None = None
    blocks: list[int] = field(default_factory=list)
    """Of the first group."""
    kept: KeptBlocks = NO_BLOCKS
    """Of the others."""
    state: str = "waiting"
    position: int = 0
    """Prefill: tokens of the current chunk's beginning. Decode: passes since it runs."""
    layer: int = 0
    recomputed: bool = False
    skips: bool = False
    """Fault: the hook of the last layer does not run."""


class Engine:
    """Requests of one worker life. `step` is one pass; everything from outside is posted, as in the real one."""

    def __init__(self, layout: KVLayout, order: str, memory: KV, kept: Kept | None = None) -> None:
        """kept: the other groups, if there are any."""
        self.kept, self.num_layers = kept, NUM_LAYERS + (NUM_KEPT if kept is not None else 0)
        sizes = {"L": NUM_LAYERS, "P": NUM_PARTS, "B": layout.num_blocks, "T": layout.block_tokens, "H": 1}
        shaped = memory[: layout.extent(0)].reshape([sizes[axis] for axis in order] + [ROW_NBYTES])
        self.kv_LPBTE = shaped.transpose([order.index(axis) for axis in "LPBTH"] + [5])[:, :, :, :, 0]
        self.block_tokens = layout.block_tokens
        self.pool = BlockPool(layout.num_blocks)
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, str] = {}
        """By transfer id: "kv", "recomputed", "sent" or the code of the error."""
        self.num_early_layers = 0
        """Layers that were read before all had come."""
        self._posted: deque[Callable[[], None]] = deque()
        self.port: EnginePort

    # -- what legs call ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """The next step looks at everything anyway."""

    def abort(self, request_id: str) -> None:
        self._posted.append(partial(self._on_abort, request_id))

    @property
    def num_running(self) -> int:
        return sum(request.state == "running" for request in self.requests.values())

    def soon(self, call: Callable[[], None]) -> None:
        self._posted.append(call)

    # -- the pass ----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """What was posted, admissions in order, then one layer or one token of every running request."""
        busy = bool(self._posted)
        while self._posted:
            self._posted.popleft()()
        for request in [item for item in self.requests.values() if item.state == "waiting"]:
            if not self._admit(request):
                break
            busy = True
        for request in list(self.requests.values()):
            if request.state == "running":
                busy = True
                if isinstance(request.leg, PrefillLeg):
                    self._prefill(request)
                else:
                    self._decode(request)
            elif request.state == "awaiting_kv":
                self._early_pass(request)
        return busy

    def _admit(self, request: Request) -> bool:
        is_prefill = isinstance(request.leg, PrefillLeg)
        try:
            count = -(-(request.num_tokens + (not is_prefill)) // self.block_tokens)
            taken = self.pool.take(count * 2 + 1 if self.kept is not None else count)
        except PoolExhausted:
            return False
        request.blocks = taken[:count]
        written = request.num_tokens if request.recomputed else request.num_cached
        if self.kept is not None:
            request.kept = KeptBlocks(tuple(taken[count:-1]), taken[-1])
        self.write(request, range(self.num_layers), 0, written)
        request.position = request.num_cached if is_prefill else 0
        request.state = "running" if is_prefill or request.recomputed else "awaiting_kv"
        tables: list[Sequence[int]] = [request.blocks]
        if self.kept is not None:
            tables += [request.kept.window, (request.kept.state,)]
        self.port.admitted(request.transfer_id, tables, request.num_cached)
        return True

    def _prefill(self, request: Request) -> None:
        start, end = request.position, min(request.num_tokens, request.position + request.chunk)
        if start < end:
            self.write(request, [request.layer], start, end)
            if not (request.skips and request.layer == self.num_layers - 1):
                self.port.layer_written(request.layer, [(request.transfer_id, start, end)])
            request.layer += 1
            if request.layer < self.num_layers:
                return
            request.layer, request.position = 0, end
            if end < request.num_tokens:
                return
        self.check(request, 0, request.num_tokens, "a prompt in the making")
        self.port.finished(request.transfer_id, first_token(request.number))
        self._end(request, None, "sent")

    def _decode(self, request: Request) -> None:
        request.position += 1
        if request.position >= 3:
            self.check(request, 0, request.num_tokens, "a running request")
            self._end(request, None, "recomputed" if request.recomputed else "kv")

    def _early_pass(self, request: Request) -> None:
        """Read each layer that is said to be here; the first one that is not ends the pass."""
        for layer in range(self.num_layers):
            if not self.port.layer_needed(request.transfer_id, layer, 0.0):
                return
            self.num_early_layers += 1
            if not self.has(request, 0, request.num_tokens, layer):
                raise Violation(f"{request.transfer_id}: layer {layer} is said to be here and holds other bytes")

    def _end(self, request: Request, error: PdlinkError | None, how: str) -> None:
        del self.requests[request.transfer_id]
        self.ended[request.transfer_id] = how
        self._give_back(request)
        self.port.ended(request.transfer_id, error.reason if error else None)

    def _give_back(self, request: Request) -> None:
        blocks, request.blocks = request.blocks, []
        kept, request.kept = request.kept, NO_BLOCKS
        if blocks:
            self.pool.give_back([*blocks, *kept.all])

    def _on_abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, RequestAborted("aborted"), "aborted")

    def _check_token(self, request: Request, token: int) -> None:
        if token != first_token(request.number):
            raise Violation(f"{request.transfer_id}: first token {token} is another transfer's")

    # -- what legs have called soon ----------------------------------------------------------------------------------

    def kv_coming(self, request_id: str, _upto: int, token: int) -> None:
        request = self.requests.get(request_id)
        if request is not None and request.state == "awaiting_kv":
            self._check_token(request, token)

    def kv_arrived(self, request_id: str, _upto: int, token: int) -> None:
        request = self.requests.get(request_id)
        if request is None or request.state != "awaiting_kv":
            return
        self._check_token(request, token)
        self.check(request, 0, request.num_tokens, "a delivered prompt")
        request.state = "running"

    def kv_failed(self, request_id: str, *, recompute: bool, error: PdlinkError) -> None:
        request = self.requests.get(request_id)
        if request is None or request.state not in ("awaiting_kv", "waiting"):
            return
        if not recompute:
            self._end(request, error, error.code)
            return
        self._give_back(request)
        request.state, request.recomputed = "waiting", True

    # -- bytes -------------------------------------------------------------------------------------------------------

    def write(self, request: Request, layers: Sequence[int], start: int, end: int) -> None:
        tokens = np.arange(start, end)
        blocks = np.asarray(request.blocks)[tokens // self.block_tokens]
        for layer in layers:
            if layer >= NUM_LAYERS:
                assert self.kept is not None
                self.kept.write(layer - NUM_LAYERS, request.kept, request.number, start, end)
                continue
            self.kv_LPBTE[layer][:, blocks, tokens % self.block_tokens] = content(request.number)[layer][:, start:end]

    def check(self, request: Request, start: int, end: int, what: str) -> None:
        """Raise Violation unless tokens [start, end) are as they must be."""
        if not all(self.has(request, start, end, layer) for layer in range(self.num_layers)):
            raise Violation(f"{request.transfer_id}: {what} holds bytes that are not its own")

    def has(self, request: Request, start: int, end: int, layer: int) -> bool:
        """Whether this layer holds what it keeps of tokens [start, end) of the request."""
        if layer < NUM_LAYERS:
            return self.holds(request.blocks, request.number, start, end, slice(layer, layer + 1))
        return self.kept is not None and self.kept.holds(layer - NUM_LAYERS, request.kept, request.number, start, end)

    def holds(self, blocks: Sequence[int], number: int, start: int, end: int, layers: slice = slice(None)) -> bool:
        """Whether these blocks (from token 0 on) hold tokens [start, end) of transfer `number` in `layers`."""
        if start == end:
            return True
        tokens = np.arange(start, end)
        found = self.kv_LPBTE[layers][
            :, :, np.asarray(blocks)[tokens // self.block_tokens], tokens % self.block_tokens
        ]
        return bool((found == content(number)[layers, :, start:end]).all())


def first_token(number: int) -> int:
    return 1000 + number
