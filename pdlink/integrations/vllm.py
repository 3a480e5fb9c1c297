"""`PDLinkConnector`: vLLM pushes the KV cache of a prompt layer by layer, while it is still being computed.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PDLinkConnector",
        "kv_connector_module_path": "pdlink.integrations.vllm", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"control_port": 41000}}'

vLLM makes one instance in its scheduler's process and one in every worker. The first only decides (`RequestBook`),
the others act (`WorkerHalf` on nodes of their own); a step's plan goes from one to the others with the step,
what has ended comes back with its output. This class translates vLLM's objects and does nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pdlink.integrations.vllm_parts import settings as settings_of
from pdlink.integrations.vllm_parts import versions
from pdlink.integrations.vllm_parts.rank import Rank
from pdlink.integrations.vllm_parts.requests import NOTHING, RequestBook, Scheduled, StepPlan
from pdlink.integrations.vllm_parts.stats import COUNTS, split
from pdlink.integrations.vllm_parts.worker import Results

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch

log = logging.getLogger(__name__)


@dataclass
class PDLinkMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The plan of one step on its way to the workers."""

    plan: StepPlan
    idle: bool = False
    """The step computes nothing."""


@dataclass
class PDLinkReasons(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Why loads have failed, by request, on its way from a worker to the scheduler."""

    reasons: dict[str, str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PDLinkReasons:
        return PDLinkReasons(other.reasons | self.reasons) if isinstance(other, PDLinkReasons) else self


_NOTHING, _IDLE = PDLinkMetadata(NOTHING), PDLinkMetadata(NOTHING, idle=True)

_PAUSE_S = 0.004
"""Longest wait of a step that computes nothing. While requests wait for KV, vLLM makes such steps a thousand times a
second, which takes more than a core on CPUs (0.32); a new request waits this long at most."""


class PDLinkConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both halves; vLLM calls on each instance only the methods of its role."""

    _cache_hit_source = versions.cache_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises UnsupportedVllm, UnsupportedCache, ConfigError: the server does not start then."""
        super().__init__(vllm_config, role, kv_cache_config)
        versions.share_log()
        transfer = vllm_config.kv_transfer_config
        settings = settings_of.read(transfer.kv_connector_extra_config or {})
        versions.check(vllm.__version__, accept_newer=settings.untested_vllm == "accept")
        versions.check_config(vllm_config, kv_cache_config)
        self._book = RequestBook(
            sends=transfer.is_kv_producer,
            receives=transfer.is_kv_consumer,
            shares_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
        )
        self._failed_blocks: set[int] = set()
        self._reasons: dict[str, str] = {}
        """Of failed loads that the scheduler's half has not been told of."""
        self._rank: Rank | None = None
        if role == KVConnectorRole.WORKER:
            self._rank = Rank(vllm_config, kv_cache_config, settings)

    # -- scheduler: what it is told ----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params:
            self._book.arrived(request.request_id, params, request.prompt_token_ids, versions.identity(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._book.missing(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._book.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PDLinkMetadata:
        parts = (Scheduled(*part) for part in versions.scheduled(scheduler_output))
        plan = self._book.step(parts, scheduler_output.preempted_req_ids or ())
        idle = not scheduler_output.total_num_scheduled_tokens
        if plan is NOTHING:
            return _IDLE if idle else _NOTHING
        return PDLinkMetadata(plan, idle)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        path = self._book.path(request.request_id)
        # vLLM passes it with an answer that is no stream; the proxy takes it out, and tells its client in a header.
        return self._book.ended(request.request_id), {"pdlink_kv": path} if path else None

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        reasons = told.reasons if isinstance(told, PDLinkReasons) else None
        self._book.received(connector_output.finished_recving or (), reasons)
        self._book.sent(connector_output.finished_sending or ())

    # -- worker: in the order of a step ------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._worker.allocation()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.open(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: PDLinkMetadata) -> None:
        self._worker.half.withdraw(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: PDLinkMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.half.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: what is to be received was offered before the step, and comes without a call."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request that waits for KV is in no step."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.half.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        self._worker.half.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self._results(finished_req_ids)
        self._failed_blocks |= results.failed_blocks
        return results.sent, results.received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """From vLLM 0.30 on; it falls back on `get_finished` before."""
        results = self._results(finished_req_ids)
        return versions.transfer_results(results.sent, results.received, results.failed)

    def _results(self, over: set[str]) -> Results:
        results = self._worker.half.results(over)
        metadata = self._connector_metadata
        if isinstance(metadata, PDLinkMetadata) and metadata.idle and results == Results():
            self._worker.half.pause(_PAUSE_S)
            results = self._worker.half.results(())
        self._reasons |= results.reasons
        return results

    def build_connector_worker_meta(self) -> PDLinkReasons | None:
        """Asked for in the step that reports the requests, after their results."""
        reasons, self._reasons = self._reasons, {}
        return PDLinkReasons(reasons) if reasons else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Before 0.30: what `get_finished` has told is not there."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.close()

    @property
    def _worker(self) -> Rank:
        assert self._rank is not None, "a worker's method on the scheduler's instance"
        return self._rank

    # -- what the class says about itself ----------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return settings_of.read(extra_config).layerwise

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups whose blocks are transferred: vLLM need not zero them before."""
        return versions.transfer_groups(self._kv_cache_config)

    # -- statistics --------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PDLinkStats | None:
        if self._rank is None:
            return None
        counts = self._rank.counts.take()
        return PDLinkStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PDLinkStats:
        return PDLinkStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PDLinkMetrics:
        return PDLinkMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class PDLinkStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by the names of `stats.COUNTS`, with the value of their label."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> PDLinkStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        shown = {}
        for key, value in sorted(self.data.items()):
            name, labels = split(key)
            shown[f"{name}[{labels[0]}]" if labels else name] = value
        return shown


class PDLinkMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:pdlink_NAME_total` on the server's own /metrics."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:pdlink_{name}", documentation=text, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (text, label) in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, labels = split(key)
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx], *labels).inc(value)


with contextlib.suppress(ValueError):  # registered by somebody else
    # MultiConnector looks the connectors that it is made of up by name, when their statistics reach the API server.
    KVConnectorFactory.register_connector("PDLinkConnector", __name__, "PDLinkConnector")
