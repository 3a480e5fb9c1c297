"""`Cache`: the front door of the store. It keeps the KV of prompts, and brings it back into an engine's pages.

    cache = pdlink.Cache(layout, [pages], nbytes=8 << 30, tiers=["file:///mnt/kv"], model="name")
    num_tokens = cache.retrieve(prompt, blocks)      # of the prompt's first tokens; the rest is to be computed
    cache.store(prompt, blocks)

KV is kept in *chunks* of `chunk_tokens` tokens, whatever the engine's block size and order of axes; a partial last
chunk is not kept. A tier that fails or stalls is a miss, never an exception.
"""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar, cast

import numpy as np

from pdlink.config import state_directory
from pdlink.errors import ConfigError, InvalidRequest
from pdlink.kv import hashing
from pdlink.kv.groups import KVGroups
from pdlink.kv.plan import warm_up
from pdlink.memory.borrowed import buffers_of
from pdlink.memory.numa import node_of
from pdlink.store.cleared import places_of
from pdlink.store.eviction import Adaptive
from pdlink.store.gpu_pages import GpuPages
from pdlink.store.groups import Blocks, RecordGroup
from pdlink.store.holds import Holds
from pdlink.store.interface import MEMORY
from pdlink.store.line import Line
from pdlink.store.slots import USUAL, tenant_of
from pdlink.store.source import CallersBlocks, Source
from pdlink.store.store import Store
from pdlink.store.tiers.opening import open_tier
from pdlink.store.tiers.striped import Striped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdlink.cuda.buffers import DeviceMemory
    from pdlink.kv.layout import KVLayout
    from pdlink.store.groups import Chunks
    from pdlink.store.interface import AnyFetch, Forgotten
    from pdlink.store.slots import Retention
    from pdlink.store.tiers.base import Tier

_LOOKUP_S = 1.0
"""Longest wait for what tiers have."""

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


Tokens: TypeAlias = "Sequence[int] | np.ndarray[Any, Any]"
"""Ids in [0, 2**32). An array or a CPU tensor is read without a loop in Python."""


class ChunkSpan(NamedTuple):
    """Which full chunks of a prompt a call is about, and where they are in an engine's pages."""

    keys: Sequence[bytes]
    """Of all full chunks of the prompt."""
    first: int
    """Number of the first chunk that the call is about."""
    blocks: Blocks


class Hit(NamedTuple):
    num_tokens: int
    """From the front of the prompt."""
    lookup_id: str
    """Names what is kept for a `retrieve`; empty if nothing is."""


class Cache:
    """Open from the constructor on until `close`; also a context manager. Every method may be called from any thread.

    Arguments that methods share:
    tokens: the whole prompt.
    begin: tokens before it are left alone: a multiple of `chunk_tokens`, or of `block_tokens` where KV is loaded.
    blocks: the first one holds token `begin`, and each of them `block_tokens` tokens, for all full chunks. The caller
        keeps them during the call.
    salt: keeps tenants apart: KV is found only under the salt it was stored with.
    retention: its priority in eviction, and how long it is found; the tenant is the salt.
    Errors: InvalidRequest for arguments that cannot be meant; nothing has happened then.
    """

    def __init__(
        self,
        layout: KVLayout,
        buffers: Sequence[Any] | None = None,
        *,
        nbytes: int,
        disk: str | Path | None = None,
        disk_nbytes: int = 0,
        tiers: Sequence[str | Tier] = (),
        codec: Mapping[str, str] = MappingProxyType({}),
        ttl_s: float = float("inf"),
        salt_quota_nbytes: int = 0,
        model: str = "",
        revision: str = "",
        chunk_tokens: int = 256,
        pin_quota_nbytes: int = 0,
        reserve_nbytes: int = 0,
        tier_deadline_s: float = 10.0,
        lease_s: float = 60.0,
    ) -> None:
        """Open the tiers, reserve the arena (its memory comes in steps, when needed) and start the threads.

        layout: where each byte of the engine's KV cache lies (`paged_layout`).
        buffers: memory for region 0, 1, ... of the layout, as `Node` takes it; borrowed. None allocates the host's.
            Of one GPU: copies follow what the calling thread has launched on its current stream, and are over when a
            call returns. `run` is made in another thread: synchronise before it.
        nbytes: of the arena, the tier in memory. reserve_nbytes: of the host's memory, which are never taken.
        disk: directory of the tier below, made if it is not there; one process has it at a time. disk_nbytes: of it.
        tiers: further ones, searched in order: URLs as in `open_tier` (file:///DIRECTORY, redis://HOST,
            s3://BUCKET, path.to.module:name), or tiers, which `close` closes.
        codec: how chunks are packed in a tier, by its name: "zstd" (extra `store`) or "raw".
        ttl_s: how long KV is found, here and in the tiers. salt_quota_nbytes: of the arena for one salt; 0: no limit.
        model, revision: whose KV it is; others never find it. chunk_tokens: must be equal where KV is shared.
        pin_quota_nbytes: most bytes that `pin` keeps.
        tier_deadline_s: longest wait for what tiers bring.
        lease_s: longest life of what `lookup(pin=True)` and `prefetch` keep.
        Raises ConfigError, LayoutMismatch, InvalidRequest (buffers), OSError (not enough memory), CudaFailure,
        CudaUnavailable. Calls raise TransferFailed when the GPU has failed.
        """
        layout.check("own")
        if chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens: got {chunk_tokens}; expected 1 or more; 256 suits most models")
        self.layout, self.chunk_tokens = layout, chunk_tokens
        self._group = group = RecordGroup(layout, model=model, revision=revision, chunk_tokens=chunk_tokens)
        self._shape = group.shape
        if nbytes < self._shape.nbytes:
            raise ConfigError(
                f"nbytes: got {nbytes}; expected {self._shape.nbytes} or more, a chunk of {chunk_tokens} tokens; "
                "raise it, or lower chunk_tokens"
            )
        self._tier_deadline_s, self._lease_s = tier_deadline_s, lease_s
        self._holds, self._closed = Holds(lease_s), False
        with ExitStack() as opened:
            self.buffers = buffers_of(KVGroups((layout,)), buffers, opened)
            kinds = {buffer.kind for buffer in self.buffers}
            if len(kinds) > 1:
                raise InvalidRequest(
                    "buffers: got memory of the host and of a GPU; expected one kind; copy the pages to one of them"
                )
            gpu = node = None
            if kinds == {"cuda"}:
                pages = cast("list[DeviceMemory]", self.buffers)
                gpu, node = GpuPages(pages), node_of(pages[0].device.pci_address)
                opened.callback(gpu.close)
            namespace = hashing.namespace(self._group.origin).hex()[:32]
            made: list[Tier] = []
            if disk is not None:
                made.append(Striped([Path(disk)], namespace, disk_nbytes))
                opened.callback(made[-1].close)
            for tier in tiers:
                made.append(open_tier(tier) if isinstance(tier, str) else tier)
                opened.callback(made[-1].close)
            self._store = Store(
                nbytes,
                Adaptive(),
                made,
                codec=codec,
                ttl_s=ttl_s,
                tenant_quota_nbytes=salt_quota_nbytes,
                pin_quota_nbytes=pin_quota_nbytes,
                reserve_nbytes=reserve_nbytes,
                cleared=places_of(None if disk is None else Path(disk), state_directory(None)),
                tier_deadline_s=tier_deadline_s,
                lease_s=lease_s,
                numa_node=node,
            )
            warm_up()
            self._store.open()
            opened.callback(self._store.close)
            self._source = Source(self._store, [group], self.buffers, CallersBlocks(), gpu=gpu)
            opened.callback(self._source.close)
            self._askers = Line("pdlink-cache-ask")
            opened.callback(self._askers.close, tier_deadline_s)
            self._opened = opened.pop_all()

    # --- Storing

    def store(
        self,
        tokens: Tokens,
        blocks: Sequence[int],
        *,
        begin: int = 0,
        salt: str = "",
        retention: Retention = USUAL,
    ) -> int:
        """Keep the KV of the prompt's full chunks; returns the number of tokens in new chunks.

        Tiers get their copy in the background. Chunks after the first that does not fit are not stored.
        Cost: one hash of the prompt, one copy of what is new, in the calling thread, without the GIL.
        """
        mine = self._span(tokens, blocks, begin, salt)
        slots = self._reserved(mine.keys, mine.first, _of(salt, retention))
        copied = False
        try:
            tokens = self._tokens(mine, slots)
            copied = self._source.copy_now(self._group, slots, mine.blocks, *tokens, loading=False)
        finally:
            if not copied and self._source.quiet():
                self._store.abandon([slot for _, slot in slots])
        if not copied:
            return 0
        self._store.commit([slot for _, slot in slots], self._shape)
        return len(slots) * self.chunk_tokens

    # --- Loading

    def retrieve(
        self,
        tokens: Tokens,
        blocks: Sequence[int],
        *,
        begin: int = 0,
        salt: str = "",
        lookup_id: str = "",
    ) -> int:
        """Fill `blocks` with the longest prefix (from `begin` on) that is known; returns its number of tokens.

        What blocks hold of later tokens is undefined then. lookup_id: take what a `lookup` or `prefetch` keeps.
        Cost: one hash of the prompt, reads of the tiers, one copy in the calling thread, without the GIL.
        """
        mine = self._span(tokens, blocks, begin, salt, distinct=True)
        held = self._holds.take(lookup_id) if lookup_id else None
        loaded = 0 if held is None else self._load(mine, held, 0)
        return loaded or self._load(mine, self._fetch(mine.keys[mine.first :], salt), mine.first)

    # --- Before a load

    def lookup(self, tokens: Tokens, *, salt: str = "", pin: bool = False, lookup_id: str = "") -> Hit:
        """How many leading tokens are known here or in a tier; waits a second at most for the tiers.

        pin: bring them into the arena and keep them for a `retrieve` with the lookup id (made up if not given), until
        `release` or for `lease_s`.
        """
        found = self._store.lookup(self._keys(tokens, salt), _LOOKUP_S)
        if pin:
            lookup_id = lookup_id or uuid.uuid4().hex
            fetch: Future[AnyFetch] = Future()
            fetch.set_result(self._store.fetch(found, self._shape, lookup_id, retention=_of(salt, USUAL)))
            self._holds.add(lookup_id, fetch)
        return Hit(len(found.keys) * self.chunk_tokens, lookup_id if pin else "")

    def prefetch(self, tokens: Tokens, *, salt: str = "", lookup_id: str = "") -> str:
        """`lookup` with pin that returns at once: its lookup id, for `state`, `retrieve` and `release`."""
        keys, name = self._keys(tokens, salt), lookup_id or uuid.uuid4().hex
        self._holds.add(name, self._askers.submit(partial(self._fetch, keys, salt, name)))
        return name

    def state(self, lookup_id: str) -> Literal["ongoing", "done", "not_found"]:
        """Of a prefetch. "done": a part of the prompt is in the arena. "not_found": nothing is, or nobody asked."""
        return self._holds.state(lookup_id)

    def release(self, lookup_id: str) -> bool:
        """Nobody will retrieve it: keep it no longer, also if it is still on its way. Returns whether it was kept."""
        return self._holds.drop(lookup_id)

    # --- Keeping and dropping

    def pin(self, tokens: Tokens, name: str, *, salt: str = "") -> int:
        """Bring the known prefix into the arena and keep it from eviction until `unpin(name)`; its tokens.

        As many as `pin_quota_nbytes` allows.
        """
        keys = self._keys(tokens, salt)
        fetch = self._fetch(keys, salt)
        try:
            fetch.done.result()
            return self._store.pin(keys, name) * self.chunk_tokens
        finally:
            fetch.close()

    def unpin(self, name: str) -> int:
        """Take back all pins of that name; their tokens."""
        return self._store.unpin(name) * self.chunk_tokens

    def move(self, tokens: Tokens, source: str, destination: str, *, copy: bool = True, salt: str = "") -> int:
        """Put the prefix that `source` has into `destination`, too; its tokens. `places` has the names of both.

        copy: whether `source` keeps it.
        """
        self._check_places([source, destination])
        if source == destination:
            raise InvalidRequest(
                f"destination: got {destination!r}, the source; expected another place; name another one"
            )
        keys = self._keys(tokens, salt)
        return self._store.move(keys, self._shape, source, destination, copy=copy) * self.chunk_tokens

    def clear(
        self,
        tokens: Tokens | None = None,
        *,
        begin: int = 0,
        places: Sequence[str] | None = None,
        salt: str = "",
    ) -> Forgotten:
        """Forget this prompt, or everything, in these places, or everywhere; the chunks that were in the arena.

        Tiers forget in the background; not `durable`, what they have still can be found again by the next process.
        Who reads or writes a chunk finishes first.
        """
        self._check_places(places or ())
        if tokens is None:
            return self._store.clear(None, places)
        _check_begin(begin, len(tokens), "chunk_tokens", self.chunk_tokens)
        return self._store.clear(self._keys(tokens, salt)[begin // self.chunk_tokens :], places)

    def compress(self, tokens: Tokens, method: str, place: str, *, salt: str = "") -> int:
        """Pack the prefix that a tier has by `method` ("zstd"), in place, or unpack it ("raw"); its tokens.

        Who reads meanwhile finds a chunk or misses it. Chunks in memory are read as they are, and never packed.
        """
        self._check_places([place])
        if place == MEMORY:
            raise InvalidRequest(
                f"place: got {place!r}; expected tiers: chunks in memory are read as they are; name one"
            )
        try:
            return self._store.repack(self._keys(tokens, salt), self._shape, place, method) * self.chunk_tokens
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None

    @property
    def frozen(self) -> bool:
        """While set nothing new is kept, nothing is evicted and tiers are not asked."""
        return self._store.frozen

    def freeze(self, enabled: bool = True) -> None:
        self._store.frozen = enabled

    @property
    def places(self) -> tuple[str, ...]:
        """ "memory" and the names of the tiers, in the order of search."""
        return self._store.places

    def health(self) -> dict[str, bool]:
        """By place: whether what keeps memory in order works, and whether a tier answers."""
        return self._store.health()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the tiers were offered what is stored; whether that took no longer than `timeout_s`."""
        return self._store.flush(timeout_s)

    # --- Life

    async def run(self, verb: Callable[_Args, _Result], /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """`await cache.run(cache.retrieve, tokens, blocks)`: any method in a thread of the loop's executor.

        One that is cancelled returns when the method has: nothing touches the blocks then.
        """
        working = asyncio.ensure_future(asyncio.to_thread(verb, *args, **kwargs))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def close(self) -> None:
        """End. What waits for the tiers is written first, as far as `tier_deadline_s` lets it. Safe to call twice.

        No method may be running.
        """
        self._closed = True
        self._holds.close()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- Inside

    def _keys(self, tokens: Tokens, salt: str) -> Sequence[bytes]:
        if self._closed:
            raise InvalidRequest("cache: it is closed; open another one")
        try:
            return self._source.keys(_ids_of(tokens), salt).by_group[0]
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"tokens: {error}; expected integers in [0, 2**32); pass the ids of a prompt"
            ) from None

    def _span(
        self,
        tokens: Tokens,
        blocks: Sequence[int],
        begin: int,
        salt: str,
        *,
        distinct: bool = False,
    ) -> ChunkSpan:
        """What a call is about. distinct: blocks are written to.

        Raises InvalidRequest for blocks that cannot hold it.
        """
        keys, units, block_tokens = (
            self._keys(tokens, salt),
            {"chunk_tokens": self.chunk_tokens},
            self.layout.block_tokens,
        )
        if distinct:  # a load: of the first chunk a part may be left alone
            units["block_tokens"] = block_tokens
        _check_begin(begin, len(tokens), *min(units.items(), key=itemgetter(1)))
        end = max(begin, len(keys) * self.chunk_tokens)
        needed = -(-end // block_tokens) - begin // block_tokens
        if len(blocks) < needed:
            raise InvalidRequest(
                f"blocks: got {len(blocks)}; expected {needed} or more, for tokens [{begin}, {end}); pass all"
            )
        used = np.asarray(blocks[:needed], dtype=np.int64)
        num_blocks = self.layout.num_blocks
        if (wrong := used[(used < 0) | (used >= num_blocks)]).size:
            raise InvalidRequest(f"blocks: got {wrong[0]}; expected [0, {num_blocks}); correct the table")
        if distinct and len(np.unique(used)) < len(used):
            raise InvalidRequest(
                "blocks: got one block twice; expected distinct ones, or KV is overwritten; correct it"
            )
        return ChunkSpan(keys, begin // self.chunk_tokens, Blocks(tuple(used.tolist()), begin))

    def _check_places(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.places:
                raise InvalidRequest(f"place: got {name!r}; expected {', '.join(self.places)}; use one of them")

    def _fetch(self, keys: Sequence[bytes], salt: str, request: str = "cache") -> AnyFetch:
        found = self._store.lookup(keys, _LOOKUP_S)
        return self._store.fetch(found, self._shape, request, retention=_of(salt, USUAL))

    def _reserved(self, keys: Sequence[bytes], first: int, retention: Retention) -> Chunks:
        """Slots for what is not here yet of chunks from `first` on."""
        number = {key: chunk for chunk, key in enumerate(keys)}
        slots = self._store.reserve(keys[first:], self._shape, retention=retention)
        return [(number[slot.key], slot) for slot in slots]

    def _arrived(self, mine: ChunkSpan, fetch: AnyFetch, first: int) -> Chunks:
        """The leading chunks of the span that a fetch of chunks from `first` on has brought. Waits for it."""
        numbered = enumerate(fetch.done.result(), first)
        known = takewhile(lambda one: one[0] < len(mine.keys) and one[1].key == mine.keys[one[0]], numbered)
        return [one for one in known if one[0] >= mine.first]

    def _load(self, mine: ChunkSpan, fetch: AnyFetch, first: int) -> int:
        """Copy what a fetch of chunks from `first` on has brought, and close it; the tokens that are right."""
        try:
            slots = self._arrived(mine, fetch, first)
            begin, end = self._tokens(mine, slots)
            copied = self._source.copy_now(self._group, slots, mine.blocks, begin, end, loading=True)
        finally:
            stood = fetch.close()
        return end - begin if stood and copied else 0

    def _tokens(self, mine: ChunkSpan, slots: Chunks) -> tuple[int, int]:
        """Begin and end of what is copied."""
        begin = mine.blocks.begin
        if not slots:
            return begin, begin
        return max(begin, slots[0][0] * self.chunk_tokens), (slots[-1][0] + 1) * self.chunk_tokens


def _of(salt: str, retention: Retention) -> Retention:
    return retention._replace(tenant=tenant_of(salt))


def _ids_of(tokens: Tokens) -> Sequence[int]:
    """What `hashing.chain` takes. Raises ValueError for an array of anything else."""
    if not hasattr(tokens, "__array__"):
        return tokens
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"got {ids.dtype} {list(ids.shape)}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**32:
        raise ValueError(f"got {ids.min()} to {ids.max()}")
    return cast("Sequence[int]", np.ascontiguousarray(ids, dtype=np.uint32))


def _check_begin(begin: int, num_tokens: int, unit: str, unit_tokens: int) -> None:
    """unit: name of what a call may begin with. Raises InvalidRequest."""
    if not 0 <= begin <= num_tokens or begin % unit_tokens:
        raise InvalidRequest(
            f"begin: got {begin} of {num_tokens} tokens; expected multiples of {unit} ({unit_tokens}); round it down"
        )
