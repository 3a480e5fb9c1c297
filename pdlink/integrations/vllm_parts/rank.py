"""One worker process of vLLM as an end of links: its cache described and registered, its endpoints open."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pdlink.errors import ConfigError
from pdlink.events import listen
from pdlink.integrations.loaded_weights import HERE
from pdlink.integrations.shared_allocation import SharedAllocation
from pdlink.integrations.stats import Counts, link_state
from pdlink.integrations.trace_file import TraceFile
from pdlink.integrations.vllm_parts import cache_groups, host_copy, states, versions
from pdlink.integrations.vllm_parts.adapters import LoadedAdapters
from pdlink.integrations.vllm_parts.contexts import contexts_of
from pdlink.integrations.vllm_parts.layout import CacheGroups, LayerView, UnsupportedCache, describe
from pdlink.integrations.vllm_parts.memory import regions
from pdlink.integrations.vllm_parts.shards import by_stage, shards_of
from pdlink.integrations.vllm_parts.steps import Steps
from pdlink.integrations.vllm_parts.store_half import StoreHalf
from pdlink.integrations.vllm_parts.tier_events import RankTiers, are_told
from pdlink.integrations.vllm_parts.worker import WorkerHalf
from pdlink.node.node import Node, end_process
from pdlink.peers.opening import make_link, tiers_of
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.handshake import ModelId
from pdlink.serve.admin import AdminServer
from pdlink.serve.keys import as_name, load_credentials
from pdlink.store.opening import SourceGroup, open_source
from pdlink.store.source import CallersBlocks
from pdlink.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pdlink.integrations.vllm_parts.layout import CacheLayout
    from pdlink.integrations.vllm_parts.settings import ConnectorSettings
    from pdlink.memory.buffers import AnyBuffer
    from pdlink.observe.gauges import LinkGauges, StoreGauges
    from pdlink.observe.kv_ledger import News
    from pdlink.peers.link import PeerLink
    from pdlink.protocol import auth
    from pdlink.store.source import Source

log = logging.getLogger(__name__)

_MAX_PORT = 65535


class Rank:
    """Acquires in `open`, ends in `close`; between the two, `steps` is what vLLM's calls go to."""

    steps: Steps

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        """Raises UnsupportedCache for shards or stages that do not fit the ranks, ConfigError for ranks or engines
        that share a folder, and for control ports that are none."""
        self._config, self._cache_config, self._settings = vllm_config, kv_cache_config, settings
        self._place = place = versions.place(vllm_config)
        num_parts, self._num_stages = settings.shards or place.num_ranks, settings.stages or place.num_stages
        self._contexts = contexts_of(vllm_config, settings)
        self._num_shards = num_parts * self._num_stages * self._contexts.count
        self._shards = shards_of(
            place,
            self._num_stages,
            num_parts,
            self._contexts.count,
            sends_alike=self._contexts.count > 1 and versions.sends_alike(vllm_config),
        )
        self._num_parts = 0 if num_parts % place.num_ranks else num_parts // place.num_ranks
        """Into which the heads of this rank are divided; 0 if they are not, and ranks with the same KV take turns."""
        self._engine = versions.engine_of_port(vllm_config)
        last_port = settings.listen.control_port + (self._engine + 1) * self._num_shards - 1
        if settings.listen.control_port and last_port > _MAX_PORT:
            raise ConfigError(
                f"kv_connector_extra_config: listen: got port {settings.listen.control_port}, which makes "
                f"{last_port} the last port of data-parallel engine {self._engine}; ports end at {_MAX_PORT}; take a "
                "lower one"
            )
        disks = settings.tiers.disks if settings.tiers is not None else ()
        shared = next((directory for directory in disks if "{name}" not in directory), None)
        index = versions.data_parallel_index(vllm_config)
        if shared is not None and (place.num_all > 1 or index):
            what = f"{place.num_all} ranks" if place.num_all > 1 else f"data-parallel engine {index}"
            raise ConfigError(
                f"kv_connector_extra_config: tiers.local_disk: got {shared!r} for {what}; "
                "expected one each; put {name} into it"
            )
        lends = settings.tiers is not None and (settings.tiers.peers or settings.tiers.peer_port is not None)
        if lends and (place.num_all > 1 or index):
            raise ConfigError(
                "kv_connector_extra_config: tiers.peer_port: got it, or tiers.peers, for several ranks or "
                "data-parallel engines, each with a store of its own; expected one store; set tiers.store, and give "
                "both to that process"
            )
        self._adapters = LoadedAdapters(versions.content_at)
        versions.watch_adapters(vllm_config, self._adapters)
        self.counts = Counts()
        self._allocation = SharedAllocation()
        self._nodes: list[Node] = []
        self._buffers: list[AnyBuffer] = []
        self._store: StoreHalf | None = None
        self._peers: PeerLink | None = None
        self._admin: AdminServer | None = None
        self._stop_counting: Callable[[], None] | None = None
        self._content = ""
        """Digest of the model's files."""
        self._stop_watching: Callable[[], None] = lambda: None

    def allocation(self) -> AbstractContextManager[Any] | None:
        """The context in which vLLM allocates its cache. None on a device: vLLM takes ours instead of the pool that
        sleep mode discards, and would copy the cache to the host whenever it sleeps."""
        return self._allocation if versions.is_on_cpu(self._config) else None

    def open(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """vLLM has allocated its cache: describe it, register it, and listen.

        On a GPU every layer is pushed behind an event of vLLM's own stream (`endpoint/marks.py`).
        Raises UnsupportedCache, ConfigError, TransportUnavailable, CudaUnavailable, CudaFailure, OSError.
        """
        self._content = versions.content(self._config)
        self._stop_watching = HERE.when_changed(self._weights_changed)
        stays, on_device = not versions.sleeps(self._config), tensors
        through_host = host_copy.is_needed(tensors.values(), versions.buffer_device(self._config))
        if through_host:
            tensors = host_copy.mirror(tensors, self._allocation)
        buffers, places = regions(list(tensors.values()), self._allocation.buffers, stays=stays)
        views = {
            name: LayerView(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), *place)
            for (name, tensor), place in zip(tensors.items(), places, strict=True)
        }
        self._buffers = buffers
        if buffers[0].kind == "cuda":
            self._check_gpu()
        kinds = cache_groups.kinds(self._config, self._cache_config, list(tensors))
        caches = [describe([views[name] for name in kind.names], kind) for kind in kinds]
        if any(kind.dtype.endswith(" amx") for kind in kinds):
            torch.cpu._init_amx()  # vLLM does not ask for AMX, and died where a step of one token came first (0.32)
        num_blocks = self._cache_config.num_blocks
        timeline, rank = self._settings.timeline, str(self._number)
        self._trace = TraceFile(self._name, timeline.replace("{rank}", rank)) if timeline else None
        self._stop_counting = listen(self.counts)
        shards: list[tuple[int, Node, CacheGroups]] = []
        for number, cache in self._parts(caches, list(tensors)):
            node = self._open_shard(number, cache, buffers)
            self._nodes.append(node)
            shards.append((number, node, cache))
        news, zeroed = threading.Event(), cache_groups.are_zeroed(self._cache_config)
        whole = CacheGroups.of(caches, num_blocks)
        half = WorkerHalf(
            shards,
            shards[0][2] if shards else whole,
            preemption_s=self._settings.transport.batch_timeout_s,
            news=news,
            adapters=self._adapters,
            held_steps=self._place.num_stages if zeroed else 0,
        )
        for node in self._nodes:
            node.short_of_blocks = lambda: half.short_of_blocks
        store = None
        source = self._open_source(caches, buffers)
        if source is not None:
            assert self._settings.tiers is not None
            if self._settings.admin is not None:
                assert isinstance(source.store, Store)
                self._admin = AdminServer(self._name, source.store, self._settings.admin, self._number)
            store = self._store = StoreHalf(
                source,
                whole,
                news=news,
                adapters=self._adapters,
                load_if_faster=self._settings.tiers.load_if_faster,
                recomputes=versions.recomputes(self._config),
                by_blocks=cache_groups.is_plain(self._cache_config),
                zeroed=zeroed,
                tiers=self._tell_tiers(source),
            )
        host = None
        if through_host:
            mine = [self._contexts.part(cache, 0) for cache in caches] if self._contexts.is_ours else caches
            layerwise = self._settings.layerwise
            host = host_copy.HostCopy(on_device, tensors, CacheGroups.of(mine, num_blocks), layerwise=layerwise)
        waits = buffers[0].kind == "cuda" and versions.frees_early()  # other memory is written in the step's order
        self.steps = Steps(news, half, store, host, settle=_wait_for_kernels if waits else None)
        self.counts.look = self._look

    def _parts(self, caches: Sequence[CacheLayout], names: Sequence[str]) -> list[tuple[int, CacheGroups]]:
        """Number and cache of each shard; none of a rank that has another's KV. Raises UnsupportedCache."""
        if not self._shards:
            return []
        stages = sorted({shard.stage for shard in self._shards})
        layers = by_stage(names, stages, self._num_stages, partial(versions.stage_of, self._config))
        num_blocks = self._cache_config.num_blocks
        opened = self._settings.shards is not None
        if not self._num_parts and not all(cache.is_latent for cache in caches):
            raise UnsupportedCache(
                f"shards: got {self._settings.shards} for {self._place.num_ranks} ranks that share heads out; "
                f"expected multiples of {self._place.num_ranks}; set the larger number of both servers on both"
            )
        found = []
        for shard in self._shards:
            mine = frozenset(layers[shard.stage])
            parts = [
                self._contexts.part(part, shard.context)
                for cache in caches
                for part in states.shard(cache.of_layers(mine), shard.part, self._num_parts, opened=opened)
            ]
            found.append((shard.number, CacheGroups.of(parts, num_blocks)))
        return found

    def _check_gpu(self) -> None:
        """Raises ConfigError for what host memory alone can have."""
        verify = self._settings.transport.verify
        if verify != "off":
            raise ConfigError(
                f"kv_connector_extra_config: transport.verify: got {verify!r} for a KV cache on a GPU; checksums are "
                "made of host memory alone: set it to off"
            )

    def settings_of(self, shard: int) -> ConnectorSettings:
        """Of one endpoint: engines behind one HTTP port have ports after each other."""
        return self._settings.of_shard(shard, first_port=self._engine * self._num_shards)

    def _open_shard(self, shard: int, cache: CacheGroups, buffers: Sequence[AnyBuffer]) -> Node:
        settings = self.settings_of(shard)
        credentials = load_credentials(settings.security)
        try:
            node = Node(
                self._name_of(shard, credentials),
                cache.groups,
                buffers,
                listen=settings.listen,
                model=self._model_id(cache.planes),
                transport=settings.transport,
                deadlines=Deadlines.of(settings.timeouts),
                credentials=credentials,
                insecure=settings.security.insecure,
                on_death=end_process,
            )
        except ConfigError as error:
            raise ConfigError(
                f"kv_connector_extra_config: {error}. Shard {shard} of data-parallel engine {self._engine} listens "
                f"on the port of listen + {self._engine * self._num_shards + shard}; give every vLLM server of a "
                "host a range of its own"
            ) from None
        log.info("%s listens on %s, KV over %s", node.name, node.address, " or ".join(node.transports))
        return node

    def _open_source(self, caches: Sequence[CacheLayout], buffers: Sequence[AnyBuffer]) -> Source | None:
        """This rank's way into the store that the settings describe: one of its own, or a process.

        Ranks that share a store fill records of all heads together, whatever their number, unless only a kernel knows
        which heads a block holds. A store of its own has the rank's heads, in records that no other rank can take for
        its own. All ranks of a latent cache have the same. A state is a rank's own.
        """
        tiers = self._settings.tiers
        if tiers is None:
            return None
        name = self._store_name
        groups = [self._source_group(cache) for cache in caches]
        model = versions.model_name(self._config)
        settings = self._settings.of_shard(self._shards[0].number if self._shards else 0)
        peers = self._peers = make_link(
            tiers,
            settings.listen,
            settings.transport,
            name,
            load_credentials(settings.security),
            insecure=settings.security.insecure,
            deadlines=Deadlines.of(settings.timeouts),
        )
        others = tiers_of(peers, tiers)
        source = open_source(tiers, name, groups, buffers, CallersBlocks(), model=model, peers=others)
        if peers is not None and source is not None and isinstance(source.store, Store):
            peers.open(source.store)
            log.info("%s lends what it keeps in memory, asked at %s", name, peers.address)
        return source

    def _tell_tiers(self, source: Source) -> RankTiers | None:
        tiers = self._settings.tiers
        if tiers is None or not are_told(self._config, self._cache_config, tiers):
            return None
        return RankTiers(source, tiers, self._store_name)

    def tier_news(self) -> dict[int, list[News]]:
        """What this rank's tiers have got and lost, by the rank's number; a part of it."""
        tiers = self._store.tiers if self._store is not None else None
        news = tiers.take() if tiers is not None else []
        return {self._place.of_all: news} if news else {}

    def _source_group(self, cache: CacheLayout) -> SourceGroup:
        tiers, model = self._settings.tiers, self._model_id(cache.planes)
        revision = f"{model.revision} {model.content} {versions.precision(self._config)}"
        heads, num_heads = versions.heads(self._config, cache.layout.num_heads)
        if tiers is None or tiers.store is None or cache.layout.position_tokens > 1 or cache.layout.state:
            revision, heads, num_heads = f"{revision} rank {self._place.rank} of {self._place.num_ranks}", None, None
        return SourceGroup(cache.layout, revision, cache.record_orders, heads, num_heads)

    def _look(self, link: LinkGauges, kept: StoreGauges) -> None:
        link.set(link_state(node.report() for node in self._nodes))
        if self._store is not None:
            store = self._store.source.store
            kept.set(store.gauges(), store.health(), store.problems())

    def _weights_changed(self) -> None:
        for node in self._nodes:
            node.change_content(HERE.named(self._content))

    def close(self) -> None:
        """End every session. Safe to call twice."""
        self._stop_watching()
        nodes, self._nodes = self._nodes, []
        for node in nodes:
            node.close()
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()
        store, self._store = self._store, None
        if store is not None:
            store.close()
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            if buffer.borrowed:
                buffer.close()
        stop_counting, self._stop_counting = self._stop_counting, None
        if stop_counting is not None:
            stop_counting()
            if self._trace is not None:
                self._trace.close()

    @property
    def _number(self) -> int:
        """Of this rank among those of all engines behind one HTTP port."""
        return versions.data_parallel_index(self._config) * self._place.num_all + self._place.of_all

    @property
    def _name(self) -> str:
        """Of this server's engine. vLLM puts the data-parallel rank into the id that it makes up; a name that is
        configured is that of all ranks."""
        named = self._settings.name
        return as_name(str(self._config.kv_transfer_config.engine_id)) if named is None else self._of_engine(named)

    @property
    def _store_name(self) -> str:
        place = self._place
        return f"{self._name}/{place.of_all}" if place.num_all > 1 else self._name

    def _of_engine(self, name: str) -> str:
        index = versions.data_parallel_index(self._config)
        return f"{name}/dp{index}" if index else name

    def _name_of(self, shard: int, credentials: auth.Credentials | None) -> str:
        """Every endpoint has a name of its own, also where several share a key: of two of one name a peer refuses
        the second."""
        owner = None if credentials is None else credentials.owner
        if owner is None:
            return f"{self._name}/{shard}"
        name = self._of_engine(owner)
        shared = self._num_shards > 1 and "{shard}" not in (self._settings.security.key_file or "")
        return f"{name}/{shard}" if shared else name

    def _model_id(self, planes: Iterable[str]) -> ModelId:
        """Its revision tells the model's shape and the names of these layers, too."""
        shape = json.dumps([versions.model_shape(self._config), list(planes)], sort_keys=True, default=str)
        digest = hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()
        revision = f"{self._config.model_config.revision or 'main'} {digest}"
        return ModelId(versions.model_name(self._config), revision, HERE.named(self._content), self._num_shards)


def _wait_for_kernels() -> None:
    """Of the steps that vLLM's thread has launched."""
    torch.cuda.current_stream().synchronize()
