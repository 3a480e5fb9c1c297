"""Tells those who read vLLM's KV events what the tiers hold, so that a router knows what is loaded and not computed.

Each rank notes what its store's memory and disk get and lose (`RankTiers`), and tells the scheduler's half some of it
with each step; that half tells vLLM what all ranks have (`ServerTiers`). A block of an event is a chunk of the store,
under the store's name: a store cannot load a part of a chunk, and vLLM's blocks are smaller. What waits is a state
and no history (`Ledger`): a store that fills faster than steps are made costs no memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pdlink.integrations.vllm_parts import cache_groups
from pdlink.observe.kv_ledger import BlockStored, Ledger, events_of
from pdlink.serve.kv_events import tell_shared_records
from pdlink.store.opening import disk_directory
from pdlink.store.preimages import PreimageFile
from pdlink.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdlink.config import TiersConfig
    from pdlink.kv.hashing import Preimage
    from pdlink.observe.kv_ledger import BlockPlace, Event, News
    from pdlink.store.source import Source

_MAX_CHUNKS = 256
"""Of one rank in one step: some 300 KB where chunks have 256 tokens, and more than a step computes."""


def are_told(vllm_config: Any, kv_cache_config: Any, tiers: TiersConfig | None) -> bool:
    """Whether this server tells what its tiers hold. A store process tells it itself (`kv_events`). With windows or
    recurrent layers chunks do not say whether a prefix can be loaded, so nobody tells."""
    config = getattr(vllm_config, "kv_events_config", None)
    asked = config is not None and config.enable_kv_cache_events
    own = tiers is not None and tiers.max_local_cpu_size and tiers.store is None
    return bool(asked and own and cache_groups.keeps_all(kv_cache_config))


class RankTiers:
    """What one rank's store holds, and what of it the scheduler's half has not been told."""

    def __init__(self, source: Source, tiers: TiersConfig, name: str) -> None:
        """name: as of `open_source`."""
        self._lock, self._ledger = threading.Lock(), Ledger()
        self._file: PreimageFile | None = None
        assert isinstance(source.store, Store)
        if (directory := disk_directory(tiers, name, source.scope)) is not None:
            self._file = PreimageFile(directory / "preimages")
        tell_shared_records(self, source.store, self._file)

    def stored(self, place: BlockPlace, key: bytes, preimage: Preimage | None = None) -> None:
        if preimage is not None and (origin := preimage.origin) is not None:
            lora, _, _ = origin.lora.rpartition(" ")  # its content is not of the name that clients say
            preimage = preimage._replace(
                extra=tuple(filter(None, (lora, origin.salt))), origin=origin._replace(lora=lora)
            )
        with self._lock:
            self._ledger.stored(place, key, preimage)

    def removed(self, place: BlockPlace, key: bytes) -> None:
        with self._lock:
            self._ledger.removed(place, key)

    def take(self) -> list[News]:
        """The oldest that the scheduler's half has not been told, each chunk behind the one before it."""
        with self._lock:
            return self._ledger.take(_MAX_CHUNKS) if self._ledger.has_news else []

    def tell_again(self) -> None:
        """All that is there."""
        with self._lock:
            self._ledger.tell_again()

    def close(self) -> None:
        """After the store."""
        if self._file is not None:
            self._file.close()


class ServerTiers:
    """What all ranks' stores hold, for the scheduler's half."""

    def __init__(self, num_ranks: int, ask_again: Callable[[], None]) -> None:
        """ask_again: has the ranks tell all that is there."""
        self._all, self._ask_again = (1 << num_ranks) - 1, ask_again
        self._ranks: dict[tuple[BlockPlace, bytes], int] = {}
        """A bit for each rank that has it."""
        self._waiting: list[News] = []

    def heard(self, by_rank: Mapping[int, Iterable[News]]) -> None:
        for rank, news in by_rank.items():
            for one in news:
                place, key, known = one
                before = self._ranks.get((place, key), 0)
                now = before | 1 << rank if known is not None else before & ~(1 << rank)
                if now:
                    self._ranks[place, key] = now
                else:
                    self._ranks.pop((place, key), None)
                if (now == self._all) != (before == self._all):
                    self._waiting.append(one)

    def watch(self, block_pool: Any) -> None:
        """vLLM's `AllBlocksCleared`, which it tells when it has emptied its own cache, is of the whole server."""
        reset = block_pool.reset_prefix_cache

        def watched() -> Any:
            done = reset()
            if done:
                self._ranks.clear()
                self._waiting.clear()
                self._ask_again()
            return done

        block_pool.reset_prefix_cache = watched

    def take(self) -> list[Any]:
        """vLLM's events of what it was not told."""
        news, self._waiting = self._waiting, []
        made = map(_as_vllms, events_of(news))
        return [event for event in made if event is not None]


def _as_vllms(event: Event) -> Any:
    """Versions differ in what an event says; None where LoRA and salt cannot be said. vLLM's first group of layers is
    that of the records' tokens."""
    from vllm.distributed import kv_events

    made = getattr(kv_events, type(event).__name__)
    said: dict[str, Any] = {name: getattr(event, name) for name in event.__struct_fields__}
    said["block_hashes"] = [_name(key) for key in said["block_hashes"]]
    said["group_idx"] = 0
    if isinstance(event, BlockStored):
        if event.extra_keys and "extra_keys" not in made.__struct_fields__:
            return None
        said["parent_block_hash"] = _name(event.parent_block_hash) if event.parent_block_hash is not None else None
    return made(**{name: what for name, what in said.items() if name in made.__struct_fields__})


def _name(key: bytes) -> Any:
    """As vLLM names its blocks: in bytes, or in 64 bits."""
    from vllm.v1.core import kv_cache_utils

    return kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(key))
