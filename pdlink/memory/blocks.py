"""`BlockPool`: reference counts of the blocks of the paged KV cache, and the blocks with a known prefix.

A block is in exactly one of three states:
- *held*: it has references. Never handed out.
- *cached*: no references, but a name (`pdlink.kv.hashing`), so an equal prefix can find it again. Handed out when
  nothing else is free, least recently used first.
- *free*: neither.

The pool knows numbers, not memory. A lock guards it: the engine holds the blocks of running requests, the node holds
blocks in transfers or quarantine. Every operation succeeds as a whole, or raises and changes nothing.

Listeners hear which named blocks are stored and evicted, one change after the other, with no lock held.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Literal, NamedTuple

from pdlink.errors import PoolExhausted
from pdlink.events import ChangeTeller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.kv.hashing import Preimage


class BlockChange(NamedTuple):
    """A named block has come or gone."""

    kind: Literal["stored", "evicted"]
    key: bytes
    block: int
    """Which block has, or had, the KV named `key`. It may be evicted before a listener hears that it is stored: who
    wants to read it takes it with `find([key])` first."""
    preimage: Preimage | None = None
    """Of the key of a block that is stored, where the pool was told it a moment ago."""


class BlockPool:
    """Reference counts and names of `num_blocks` blocks. Thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._lock = threading.Lock()
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks))
        """A heap: low numbers first, so that the blocks of a request tend to be neighbours and travel as one run."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Named blocks nobody holds, least recently used first."""
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._announcer: ChangeTeller[BlockChange] = ChangeTeller()

    def listen(self, changed: Callable[[BlockChange], None]) -> None:
        """Call `changed` for every named block that is stored or evicted from now on, after all that are stored now.

        It runs in the thread that changed the pool, without the pool's lock: it may call the pool, and should be
        quick. Calls never overlap and keep the order of the changes. What it raises is logged and lost.
        """
        with self._lock:
            self._announcer.add(changed, [BlockChange("stored", *named) for named in self._block_of.items()])
        self._announcer.tell()

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out now, cached ones included."""
        with self._lock:
            return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds that can still be found by name."""
        with self._lock:
            return len(self._cached)

    @property
    def num_held(self) -> int:
        with self._lock:
            return self.num_blocks - len(self._free) - len(self._cached)

    def take(self, n: int) -> list[int]:
        """`n` blocks, ascending, held once each by the caller. Raises PoolExhausted, all or nothing."""
        if n < 0:
            raise ValueError(f"cannot take {n} blocks")
        with self._lock:
            available = len(self._free) + len(self._cached)
            if n > available:
                raise PoolExhausted(f"{n} blocks asked for, {available} of {self.num_blocks} are free")
            blocks = [heapq.heappop(self._free) for _ in range(min(n, len(self._free)))]
            evicts = len(blocks) < n
            while len(blocks) < n:
                block, _ = self._cached.popitem(last=False)
                self._unname(block)
                blocks.append(block)
            for block in blocks:
                self._refs[block] = 1
        if evicts:
            self._announcer.tell()
        return sorted(blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of `blocks`. Raises ValueError if one of them is not held by anybody."""
        with self._lock:
            for block in blocks:
                self._check_held(block, 1)
            for block in blocks:
                self._refs[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One reference to each of `blocks` less; at zero a block is free, a named one stays findable until taken.

        Raises ValueError if this gives back more than is held.
        """
        with self._lock:
            for block, count in Counter(blocks).items():
                self._check_held(block, count)
            # Last block first: a prefix is of no use without its beginning, so its end must be the first to go.
            for block in reversed(blocks):
                self._refs[block] -= 1
                if self._refs[block] == 0:
                    if block in self._key_of:
                        self._cached[block] = None
                    else:
                        heapq.heappush(self._free, block)

    def name(self, block: int, key: bytes, preimage: Callable[[], Preimage] | None = None) -> None:
        """Say that the held `block` now holds the KV named `key`, for all layers and tokens, and will not change.

        The first name wins: a block that has one keeps it, and a key that another block has stays there.
        preimage: makes what listeners are told; not called where there are none.
        """
        with self._lock:
            heard = bool(self._announcer.listeners)
            self._check_held(block, 1)
            if block not in self._key_of and key not in self._block_of:
                self._key_of[block] = key
                self._block_of[key] = block
                if heard:
                    told = None if preimage is None else preimage()
                    self._announcer.note(BlockChange("stored", key, block, told))
        if heard:
            self._announcer.tell()

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `keys`, each held once more by the caller."""
        with self._lock:
            found: list[int] = []
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                if self._refs[block] == 0:
                    del self._cached[block]
                self._refs[block] += 1
                found.append(block)
            return found

    def forget(self, block: int) -> None:
        """Drop the block's name, if it has one: nobody finds it again."""
        with self._lock:
            if block not in self._key_of:
                return
            self._unname(block)
            if self._refs[block] == 0:
                del self._cached[block]
                heapq.heappush(self._free, block)
        self._announcer.tell()

    def check(self) -> None:
        """Raise AssertionError that names the first broken invariant."""
        with self._lock:
            free, cached = set(self._free), set(self._cached)
            held = {block for block, refs in enumerate(self._refs) if refs > 0}
            _require(len(free) == len(self._free), "a block is free twice")
            _require(not free & cached and not free & held and not cached & held, "a block is in two states")
            _require(len(free) + len(cached) + len(held) == self.num_blocks, "a block is in no state")
            _require(min(self._refs) >= 0, "a block has less than no references")
            _require(not free & self._key_of.keys(), "a free block has a name")
            _require(cached <= self._key_of.keys(), "a cached block has no name")
            _require(
                {key: block for block, key in self._key_of.items()} == self._block_of, "names do not match blocks"
            )

    def _unname(self, block: int) -> None:
        """Caller holds the lock."""
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._announcer.note(BlockChange("evicted", key, block))

    def _check_held(self, block: int, count: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is outside the pool of {self.num_blocks}")
        if self._refs[block] < count:
            raise ValueError(f"block {block} is held {self._refs[block]} times, not {count}")


def _require(condition: bool, invariant: str) -> None:
    if not condition:
        raise AssertionError(f"block pool: {invariant}")
