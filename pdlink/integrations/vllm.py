"""`PDLinkConnector`: vLLM pushes the KV cache of a prompt layer by layer, while it is still being computed.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PDLinkConnector",
        "kv_connector_module_path": "pdlink.integrations.vllm", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"listen": "10.0.0.1:41000"}}'

vLLM makes one instance in its scheduler's process and one in every worker. The first only decides (`RequestBook`),
the others act (`WorkerHalf` on nodes of their own); a step's plan goes from one to the others with the step,
what has ended comes back with its output. This class translates vLLM's objects and does nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pdlink.config.loading import mention_foreign
from pdlink.integrations import stats
from pdlink.integrations.vllm_parts import cache_groups, versions
from pdlink.integrations.vllm_parts import settings as settings_of
from pdlink.integrations.vllm_parts.embeddings import Embeddings
from pdlink.integrations.vllm_parts.origins import NO_TIERS, Origins
from pdlink.integrations.vllm_parts.params import Caps, source_of
from pdlink.integrations.vllm_parts.rank import Rank
from pdlink.integrations.vllm_parts.requests import NOTHING, RequestBook, Scheduled, StepPlan
from pdlink.integrations.vllm_parts.store_book import StoreBook, StorePlan
from pdlink.integrations.vllm_parts.tier_events import ServerTiers, are_told
from pdlink.integrations.vllm_parts.worker import Results
from pdlink.observe.sources import sourced

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch

    from pdlink.integrations.vllm_parts.store_book import Looked
    from pdlink.integrations.vllm_parts.weights import Sleep
    from pdlink.observe.kv_ledger import News

log = logging.getLogger(__name__)


@dataclass
class PDLinkMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The plan of one step on its way to the workers."""

    plan: StepPlan
    idle: bool = False
    """The step computes nothing."""


@dataclass
class PDLinkNews(*versions.news_bases()):  # type: ignore[misc]
    """What workers tell the scheduler beside what vLLM asks for."""

    reasons: dict[str, str]
    """Why loads have failed, by request."""
    looked: list[Looked]
    """What each rank's store has."""
    short: dict[str, int]
    """Where loads have ended that brought less than was promised, by request."""
    tiers: dict[int, list[News]] = field(default_factory=dict)
    """What the tiers of each rank have got and lost."""

    def aggregate(self, other: Any) -> PDLinkNews:
        if not isinstance(other, PDLinkNews):
            return self
        short = other.short | {name: min(end, other.short.get(name, end)) for name, end in self.short.items()}
        tiers = other.tiers | {rank: news + other.tiers.get(rank, []) for rank, news in self.tiers.items()}
        return PDLinkNews(other.reasons | self.reasons, self.looked + other.looked, short, tiers)


_NOTHING, _IDLE = PDLinkMetadata(NOTHING), PDLinkMetadata(NOTHING, idle=True)

_PAUSE_S = 0.004
"""Longest wait of a step that computes nothing. While requests wait for KV, vLLM makes such steps a thousand times a
second, which takes more than a core on CPUs (0.32); a new request waits this long at most."""


class PDLinkConnector(KVConnectorBase_V1, *versions.hybrid_bases(vllm.__version__)):  # type: ignore[misc]
    """Both halves; vLLM calls on each instance only the methods of its role."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises UnsupportedVllm, UnsupportedCache, ConfigError: the server does not start then."""
        super().__init__(vllm_config, role, kv_cache_config)
        versions.share_log()
        transfer = vllm_config.kv_transfer_config
        settings = settings_of.read(transfer.kv_connector_extra_config or {})
        version = versions.check(vllm.__version__, accept_newer=settings.untested_vllm == "accept")
        versions.check_config(vllm_config, kv_cache_config, version, tiers=settings.tiers)
        store = None
        if settings.tiers is not None and settings.tiers.max_local_cpu_size:
            store = StoreBook(
                settings.tiers.chunk_size,
                versions.place(vllm_config).num_all,
                block_tokens=vllm_config.cache_config.block_size,
                keeps_answers=settings.tiers.save_decode_cache,
                keeps_all=cache_groups.keeps_all(kv_cache_config),
            )
        self._book = RequestBook(
            sends=transfer.is_kv_producer,
            receives=transfer.is_kv_consumer,
            shares_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
            keeps_all=cache_groups.keeps_all(kv_cache_config),
            engine=versions.engine_of_port(vllm_config),
            block_tokens=vllm_config.cache_config.block_size,
            store=store,
        )
        self._tiers: ServerTiers | None = None
        if store is not None and are_told(vllm_config, kv_cache_config, settings.tiers):
            self._tiers = ServerTiers(versions.place(vllm_config).num_all, store.ask_tiers)
        self._priority_limit = settings.tiers.priority_limit if settings.tiers is not None else None
        self._origins = Origins()
        self._counts = stats.Counts()
        """Of the scheduler's half: what no rank knows."""
        self._lost_blocks: set[int] = set()
        self._news = PDLinkNews({}, [], {})
        """That the scheduler's half has not been told."""
        self._sleep: Sleep | None = None
        self._in_micro_batches = versions.in_micro_batches(vllm_config)
        self._ends_unsaid = versions.ends_unsaid(vllm_config)
        self._preempts_unsaid = versions.preempts_unsaid()
        self._news_in_stats = version < versions.WORKER_NEWS
        self._met: set[str] | None = None if versions.announces_requests() else set()
        """Requests that `on_new_request` has been told of, where that is left to us."""
        self._parked: set[str] | None = set() if versions.frees_parked() else None
        """Requests that have ended while they waited for KV, where vLLM would keep the blocks of senders alone."""
        self._rank: Rank | None = None
        if role == KVConnectorRole.WORKER:
            self._rank = Rank(vllm_config, kv_cache_config, settings)
        else:
            mention_foreign()
            versions.warn_untried(vllm.__version__)
            self._sleep = versions.watch_weights(self._weights_changed)

    @property
    def requires_kv_delivery(self) -> bool:
        """Since 0.32: whether vLLM throws the output of a preempted request away that is under way, and computes its
        prompt again to hand the KV on. A server that answers by itself gives the output, and decode computes."""
        return bool(self._kv_transfer_config.is_kv_producer and not self._kv_transfer_config.is_kv_consumer)

    # -- scheduler: what it is told ----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        params, store = request.kv_transfer_params, self._book.store
        if not params and store is None:
            return
        source, (caps, params) = source_of(params or {}), Caps.of(params or {})
        request_id, identity, given = request.request_id, versions.identity(request), Embeddings.of(request)
        if params:
            words = [*identity.words, *(given.words if given is not None else ())]
            if self._book.arrived(request_id, params, versions.prompt_of(request), words, identity.adapter):
                versions.leave_last_token(request)
        if store is not None:
            if given is not None:
                identity = identity._replace(media=tuple(sorted(identity.media + given.media(store.chunk_tokens))))
            receives = self._book.comes_from_elsewhere(request_id)
            keeps = self._priority_limit is None or request.priority <= self._priority_limit
            prompt = versions.prompt_of(request)
            store.arrived(
                request_id,
                prompt,
                *identity,
                receives=receives,
                keeps=keeps,
                caps=caps,
                session=versions.session_of(request),
                source=source,
            )

    def _meet(self, request: Any) -> None:
        """Up to 0.21 vLLM says nothing of a request before it asks what comes for it, or ends it."""
        if self._met is not None and request.request_id not in self._met:
            self._met.add(request.request_id)
            self.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._meet(request)
        self._origins.asked(request.request_id, num_computed_tokens)
        # vLLM up to 0.30 takes a promise for such a request, and answers positions that it has not computed.
        computes_all = bool(getattr(request, "skip_reading_prefix_cache", False))
        return self._book.missing(request.request_id, num_computed_tokens, computes_all=computes_all)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        mine = cache_groups.by_group(self._kv_cache_config, blocks.get_block_ids())
        request_id, store = request.request_id, self._book.store
        loaded = self._book.allocated(request_id, mine, num_external_tokens)
        chosen = NO_TIERS if store is None else store.chosen(request_id)
        told = self._origins.admitted(request_id, request.num_prompt_tokens, num_external_tokens, loaded, chosen)
        if told is not None:
            self._counts(told)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """From 0.32 on; after `update_state_after_alloc`."""
        sources = self._origins.sources(request.request_id)
        counts: Counter[Any] = Counter()
        for name, tokens in sources.items() if num_external_tokens else ():
            counts[versions.cache_hit_source(name)] += tokens
        return dict(counts)

    def build_connector_meta(self, scheduler_output: Any) -> PDLinkMetadata:
        parts = (Scheduled(*part) for part in versions.scheduled(scheduler_output, self._kv_cache_config))
        plan = self._book.step(parts, scheduler_output.preempted_req_ids or ())
        idle = not scheduler_output.total_num_scheduled_tokens
        if plan is NOTHING:
            return _IDLE if idle else _NOTHING
        return PDLinkMetadata(plan, idle)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (list(block_ids),))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._meet(request)
        request_id = request.request_id
        if self._met is not None:
            self._met.discard(request_id)
        said: dict[str, Any] = {}
        if path := self._book.path(request_id):
            said["pdlink_kv"] = path
        told, leg = self._origins.ended(request_id), self._book.leg(request_id)
        if told is not None and leg:
            said["pdlink_source"] = msgspec.to_builtins(sourced(told, leg))
        tokens = versions.computed_tokens(request) if self._book.store is not None else ()
        mine = cache_groups.by_group(self._kv_cache_config, block_ids) if tokens else ()
        parked = self._parked is not None and self._book.is_awaited(request_id)
        keeps = self._book.ended(request_id, tokens, mine)
        if self._parked is not None and parked:
            self._parked.add(request_id)
        # vLLM passes it with an answer that is no stream; the proxy takes it out, and tells its client in a header.
        return keeps or parked, said or None

    def update_connector_output(self, connector_output: Any) -> None:
        if self._news_in_stats:
            told = PDLinkStats.news_in(connector_output.kv_connector_stats)
        else:
            told = connector_output.kv_connector_worker_meta
        news = told if isinstance(told, PDLinkNews) else PDLinkNews({}, [], {})
        if self._book.store is not None:
            self._book.store.looked(news.looked)
        if self._tiers is not None:
            self._tiers.heard(news.tiers)
        for request_id, end in news.short.items():
            self._origins.fell_short(request_id, end, receives=self._book.leg(request_id) == "decode")
        self._book.received(connector_output.finished_recving or (), news.reasons)
        self._book.sent(connector_output.finished_sending or ())
        if self._parked:
            over = self._parked.intersection(connector_output.finished_recving or ())
            self._parked -= over
            connector_output.finished_recving = (connector_output.finished_recving or set()) - over
            connector_output.finished_sending = (connector_output.finished_sending or set()) | over

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._tiers is not None:
            self._tiers.watch(gpu_block_pool)

    def take_events(self) -> list[Any]:
        return self._tiers.take() if self._tiers is not None else []

    def reset_cache(self) -> bool | None:
        """vLLM's caches are of no use any more; so is what the store has of this server's KV. Where they are emptied
        because the server goes to sleep, the store keeps it: a change of weights is seen when it happens."""
        if self._sleep is None or not self._sleep.empties:
            self._weights_changed(uuid.uuid4().hex)
        return True

    def _weights_changed(self, era: str) -> None:
        if self._book.store is not None:
            self._book.store.reset(era)

    # -- worker: in the order of a step ------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._worker.allocation()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.open(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: PDLinkMetadata | set[str]) -> None:
        """Up to 0.18 vLLM says which requests, since then what the scheduler's half has planned for them."""
        if isinstance(kv_connector_metadata, PDLinkMetadata):
            plan = kv_connector_metadata.plan
        else:
            names = list(kv_connector_metadata)
            plan = StepPlan(withdrawn=names, store=StorePlan(withdrawn=names))
        self._worker.steps.withdraw(plan)

    def bind_connector_metadata(self, connector_metadata: PDLinkMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._preempts_unsaid:
            self._worker.steps.withdraw(connector_metadata.plan)
        self._worker.steps.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: what is to come was asked for before the step, and comes without a call."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request that waits for KV is in no step.

        If its load were in a step (`has_sync_kv_loads`), the whole batch would wait for a tier. And where it fails,
        vLLM's AsyncScheduler has scheduled the next step, whose token it takes for the answer's first one (0.32).
        """

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Called once for each micro-batch, of which the first has only a part of the step's tokens: then layers are
        ready when the step ends."""
        if not self._in_micro_batches:
            self._worker.steps.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        """Model runner V1 calls it while the exception of a forward pass is on its way, too."""
        if sys.exception() is not None:
            self._worker.steps.abandon()
        else:
            self._worker.steps.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self._results(finished_req_ids)
        self._lost_blocks |= results.failed_blocks | results.lost_blocks
        return results.sent, results.received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """From vLLM 0.30 on; it falls back on `get_finished` before."""
        results = self._results(finished_req_ids)
        self._lost_blocks |= results.lost_blocks
        return versions.transfer_results(results.sent, results.received, results.failed)

    def _results(self, over: set[str]) -> Results:
        if self._ends_unsaid:
            self.wait_for_save()
        results = self._worker.steps.results(over)
        metadata = self._connector_metadata
        if isinstance(metadata, PDLinkMetadata) and metadata.idle and results == Results():
            self._worker.steps.pause(_PAUSE_S)
            results = self._worker.steps.results(())
        self._news = self._news.aggregate(PDLinkNews(results.reasons, results.looked, results.short))
        return results

    def build_connector_worker_meta(self) -> PDLinkNews | None:
        """Asked for in the step that reports the requests, after their results."""
        news, self._news = self._news, PDLinkNews({}, [], {})
        news.tiers = self._worker.tier_news()
        return None if news == PDLinkNews({}, [], {}) else news

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Asked for after the results: what of them is not there."""
        blocks, self._lost_blocks = self._lost_blocks, set()
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
        """None: vLLM zeroes new blocks of models with recurrent layers, before the step's plan, with the offer in it,
        reaches a worker. It must: tokens are written, not blocks, and kernels read what is behind the last one,
        where the bytes of a state may be no number.
        """
        return ()

    # -- statistics --------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PDLinkStats | None:
        counts = (self._counts if self._rank is None else self._rank.counts).take()
        tells = self._news_in_stats and self._rank is not None
        news = self.build_connector_worker_meta() if tells else None
        if not counts and news is None:
            return None
        found = PDLinkStats(data=counts)
        found.news = news
        return found

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PDLinkStats:
        return PDLinkStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PDLinkMetrics:
        return PDLinkMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class PDLinkStats(KVConnectorStats):  # type: ignore[misc]
    """`stats.Stats` of one rank or of several."""

    news: PDLinkNews | None = None
    """Of the same ranks, where vLLM has no other way for it."""

    @staticmethod
    def news_in(found: Any) -> PDLinkNews | None:
        """found: vLLM's, with those of several connectors by name where MultiConnector has made it."""
        mine = found if isinstance(found, PDLinkStats) else getattr(found, "data", {}).get("PDLinkConnector")
        return getattr(mine, "news", None)

    def reset(self) -> None:
        self.data: stats.Stats = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> PDLinkStats:
        self.data = stats.add_up(self.data, other.data)
        others = getattr(other, "news", None)
        self.news = others if self.news is None else self.news.aggregate(others)
        return self

    def reduce(self) -> dict[str, int | float]:
        return stats.in_short(self.data)


class PDLinkMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics of a node and a store as `vllm:pdlink_...` on the server's own /metrics."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        gauge = partial(self._gauge_cls, multiprocess_mode="sum")
        made = self._counter_cls, gauge, self._histogram_cls
        self._labels = per_engine_labelvalues
        """Of each engine; vLLM up to 0.15 keeps none."""
        self._shown = stats.ShownStats("vllm", *made, labelnames, per_engine_labelvalues.values())

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._shown.add(transfer_stats_data, self._labels[engine_idx])


with contextlib.suppress(ValueError):  # registered by somebody else
    # MultiConnector looks the connectors that it is made of up by name, when their statistics reach the API server.
    KVConnectorFactory.register_connector("PDLinkConnector", __name__, "PDLinkConnector")
