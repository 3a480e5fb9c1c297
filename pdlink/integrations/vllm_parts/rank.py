"""One worker process of vLLM as an end of links: its cache described and registered, its endpoints open."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

from pdlink.endpoint.driver import Endpoint
from pdlink.errors import ConfigError
from pdlink.events import listen
from pdlink.integrations.vllm_parts import versions
from pdlink.integrations.vllm_parts.layout import LayerView, describe
from pdlink.integrations.vllm_parts.memory import SharedAllocation, regions
from pdlink.integrations.vllm_parts.shards import Shards, of_rank
from pdlink.integrations.vllm_parts.stats import Counts
from pdlink.integrations.vllm_parts.trace_file import TraceFile
from pdlink.integrations.vllm_parts.worker import WorkerHalf
from pdlink.kv.plan import warm_up
from pdlink.memory.checksums import Checksums
from pdlink.memory.host import host_id
from pdlink.protocol.messages import VERSION, Identity
from pdlink.serve.keys import as_name, load_credentials
from pdlink.transport.choice import open_transports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pdlink.integrations.vllm_parts.layout import CacheLayout
    from pdlink.integrations.vllm_parts.settings import ConnectorSettings
    from pdlink.memory.buffers import Buffer
    from pdlink.protocol import auth

log = logging.getLogger(__name__)


class Rank:
    """Acquires in `open`, ends in `close`; between the two, `half` is what vLLM's calls go to."""

    half: WorkerHalf | Shards

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        """Raises UnsupportedCache if the shards do not fit the ranks."""
        self._config, self._cache_config, self._settings = vllm_config, kv_cache_config, settings
        parallel = vllm_config.parallel_config
        self._rank: int = parallel.rank
        self._num_shards: int = settings.shards or parallel.tensor_parallel_size
        self._shards = of_rank(self._rank, parallel.tensor_parallel_size, self._num_shards)
        self.counts = Counts()
        self._allocation = SharedAllocation()
        self._endpoints: list[Endpoint] = []

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
        warm_up()
        timeline = self._settings.timeline
        self._trace = TraceFile(self._name, timeline.replace("{rank}", str(self._rank))) if timeline else None
        self._stop_counting = listen(self.counts)
        halves = [
            self._open_shard(shard, cache.shard(index, len(self._shards)), buffers, ratio)
            for index, shard in enumerate(self._shards)
        ]
        self.half = halves[0] if len(halves) == 1 else Shards(halves)

    def _open_shard(self, shard: int, cache: CacheLayout, buffers: Sequence[Buffer], ratio: int) -> WorkerHalf:
        settings = self._settings.of_shard(shard)
        transports = open_transports(
            settings.transport,
            settings.control_host,
            settings.advertise_host,
            this_host_only=not settings.reachable,
        )
        if any(buffer.fd < 0 for buffer in buffers):
            for transport in [transport for transport in transports if transport.name == "mapped"]:
                transport.close()
                transports.remove(transport)
        for transport in transports:
            for buffer in buffers:
                transport.register(buffer)
        credentials = load_credentials(settings.security)
        name = self._name_of(shard, credentials)
        endpoint = Endpoint(
            name,
            self._identity(cache),
            transports,
            settings.timeouts,
            batch_timeout_s=settings.transport.batch_timeout_s,
            sharing=settings.transport.sharing,
            require_lane=settings.transport.require,
            credentials=credentials,
            checksums=Checksums(cache.layout, list(buffers)),
            on_death=_die,
            short_of_blocks=lambda: half.short_of_blocks,
        )
        half = WorkerHalf(
            endpoint,
            cache,
            shard=shard,
            block_ratio=ratio,
            preemption_s=settings.transport.batch_timeout_s,
            insecure=settings.security.insecure,
            verify=settings.transport.verify,
        )
        try:
            endpoint.open(settings.control_host, settings.control_port, settings.advertise_host)
        except ConfigError as error:
            raise ConfigError(
                f"kv_connector_extra_config: {error}. Shard {shard} listens on control_port + {shard}; give every "
                "vLLM server of a host a range of its own"
            ) from None
        self._endpoints.append(endpoint)
        lanes = " or ".join(transport.name for transport in transports)
        log.info("%s listens on %s, KV over %s", name, endpoint.address, lanes)
        return half

    def close(self) -> None:
        """End every session. Safe to call twice."""
        endpoints, self._endpoints = self._endpoints, []
        for endpoint in endpoints:
            endpoint.close()
        if endpoints:
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

    def _identity(self, cache: CacheLayout) -> Identity:
        """What must be equal on both servers beside the layout: model, its shape, the names of its layers."""
        shape = json.dumps([versions.model_shape(self._config), list(cache.planes)], sort_keys=True, default=str)
        return Identity(
            VERSION,
            versions.model_name(self._config),
            f"{self._config.model_config.revision or 'main'} "
            f"{hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()}",
            self._num_shards,
            cache.layout,
            host_id(),
            content=versions.content(self._config),
        )


def _die() -> None:
    """A loop that this process cannot be without has ended: end the process, vLLM then ends the server.

    As a zombie it would keep blocks, and requests that wait for KV, until their deadlines.
    """
    os.kill(os.getpid(), signal.SIGTERM)
