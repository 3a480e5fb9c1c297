"""One worker process of vLLM as an end of links: its cache described and registered, its endpoints open."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from pdlink.errors import ConfigError
from pdlink.events import listen
from pdlink.integrations.vllm_parts import versions
from pdlink.integrations.vllm_parts.layout import LayerView, describe, of_rank
from pdlink.integrations.vllm_parts.memory import SharedAllocation, regions
from pdlink.integrations.vllm_parts.stats import Counts
from pdlink.integrations.vllm_parts.trace_file import TraceFile
from pdlink.integrations.vllm_parts.worker import WorkerHalf
from pdlink.node.node import Node, end_process
from pdlink.serve.keys import as_name, load_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pdlink.integrations.vllm_parts.layout import CacheLayout
    from pdlink.integrations.vllm_parts.settings import ConnectorSettings
    from pdlink.memory.buffers import HostBuffer
    from pdlink.protocol import auth

log = logging.getLogger(__name__)


class Rank:
    """Acquires in `open`, ends in `close`; between the two, `half` is what vLLM's calls go to."""

    half: WorkerHalf

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        """Raises UnsupportedCache if the shards do not fit the ranks."""
        self._config, self._cache_config, self._settings = vllm_config, kv_cache_config, settings
        parallel = vllm_config.parallel_config
        self._rank: int = parallel.rank
        self._num_shards: int = settings.shards or parallel.tensor_parallel_size
        self._shards = of_rank(self._rank, parallel.tensor_parallel_size, self._num_shards)
        self.counts = Counts()
        self._allocation = SharedAllocation()
        self._nodes: list[Node] = []

    def allocation(self) -> AbstractContextManager[Any]:
        """The context in which vLLM allocates its cache."""
        return self._allocation

    def open(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """vLLM has allocated its cache: describe it, register it, and listen.

        Raises UnsupportedCache, ConfigError, TransportUnavailable, OSError.
        """
        buffers, places = regions(list(tensors.values()), self._allocation.buffers)
        views = [
            LayerView(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), *place)
            for (name, tensor), place in zip(tensors.items(), places, strict=True)
        ]
        cache = describe(views, **versions.geometry(self._config, self._cache_config, list(tensors)))
        ratio = cache.layout.num_blocks // self._cache_config.num_blocks
        timeline = self._settings.timeline
        self._trace = TraceFile(self._name, timeline.replace("{rank}", str(self._rank))) if timeline else None
        self._stop_counting = listen(self.counts)
        parts = [cache.shard(index, len(self._shards)) for index in range(len(self._shards))]
        for shard, part in zip(self._shards, parts, strict=True):
            self._nodes.append(self._open_shard(shard, part, buffers))
        half = self.half = WorkerHalf(
            self._nodes,
            parts[0],
            first_shard=self._shards.start,
            block_ratio=ratio,
            preemption_s=self._settings.transport.batch_timeout_s,
        )
        for node in self._nodes:
            node.short_of_blocks = lambda: half.short_of_blocks

    def _open_shard(self, shard: int, cache: CacheLayout, buffers: Sequence[HostBuffer]) -> Node:
        settings = self._settings.of_shard(shard)
        credentials = load_credentials(settings.security)
        try:
            node = Node(
                self._name_of(shard, credentials),
                cache.layout,
                buffers,
                host=settings.control_host,
                port=settings.control_port,
                advertise_host=settings.advertise_host,
                **self._identity(cache),
                transport=settings.transport,
                timeouts=settings.timeouts,
                credentials=credentials,
                insecure=settings.security.insecure,
                on_death=end_process,
            )
        except ConfigError as error:
            raise ConfigError(
                f"kv_connector_extra_config: {error}. Shard {shard} listens on control_port + {shard}; give every "
                "vLLM server of a host a range of its own"
            ) from None
        log.info("%s listens on %s, KV over %s", node.name, node.address, " or ".join(node.transports))
        return node

    def close(self) -> None:
        """End every session. Safe to call twice."""
        nodes, self._nodes = self._nodes, []
        for node in nodes:
            node.close()
        if nodes:
            self._stop_counting()
            if self._trace is not None:
                self._trace.close()

    @property
    def _name(self) -> str:
        """Of this server's engine. vLLM puts the data-parallel rank into the id that it makes up; a name that is
        configured is that of all ranks."""
        named = self._settings.name
        return as_name(str(self._config.kv_transfer_config.engine_id)) if named is None else self._of_engine(named)

    def _of_engine(self, name: str) -> str:
        index = versions.data_parallel_index(self._config)
        return f"{name}/dp{index}" if index else name

    def _name_of(self, shard: int, credentials: auth.Credentials | None) -> str:
        """Every endpoint has a name of its own, also where several share a key: of two of one name a peer refuses
        the second."""
        if credentials is None:
            return f"{self._name}/{shard}"
        name = self._of_engine(credentials.keys.name)
        shared = self._num_shards > 1 and "{shard}" not in (self._settings.security.key_file or "")
        return f"{name}/{shard}" if shared else name

    def _identity(self, cache: CacheLayout) -> dict[str, Any]:
        """What must be equal on both servers beside the layout: model, its shape, the names of its layers."""
        shape = json.dumps([versions.model_shape(self._config), list(cache.planes)], sort_keys=True, default=str)
        digest = hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()
        return {
            "model": versions.model_name(self._config),
            "revision": f"{self._config.model_config.revision or 'main'} {digest}",
            "content": versions.content(self._config),
            "num_ranks": self._num_shards,
        }
