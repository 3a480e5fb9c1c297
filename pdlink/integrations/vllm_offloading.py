"""`PDLinkTier`: pdlink's store as a secondary tier of vLLM's own OffloadingConnector, from vLLM 0.32 on.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "PDLinkTier", "module_path": "pdlink.integrations.vllm_offloading",
        "tiers": {"local_disk": "/var/tmp/kv", "max_local_disk_size": 50}}]}}'

vLLM moves KV between its GPUs and rows of memory that its processes share. A row holds a chunk of one group of
layers, of all ranks. The tier lives in the scheduler's process; the scheduler's thread calls it and must not wait.

A row is a record of the store. Its key is vLLM's hash of the tokens, and all else that the bytes of a row depend on.
That hash knows a LoRA adapter by its name alone.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import vllm
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from pdlink.errors import ConfigError
from pdlink.integrations.vllm_parts import settings as settings_of
from pdlink.integrations.vllm_parts import versions
from pdlink.kv import hashing
from pdlink.store.client import RemoteStore
from pdlink.store.line import Line
from pdlink.store.opening import make_store
from pdlink.store.rows import RecordRows, row_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdlink.config import TiersConfig
    from pdlink.store.interface import AnyFetch, AnyStore
    from pdlink.store.record import RecordShape
    from pdlink.store.slots import Slot

log = logging.getLogger(__name__)

_LOOKUP_TIMEOUT_S = 1.0
"""For the answers of tiers."""
_CLOSE_S = 10.0


class _Job(NamedTuple):
    """Chunks between vLLM's rows and records."""

    number: int
    names: list[bytes]
    """vLLM's keys."""
    namespace: bytes
    rows: list[int]
    request: str
    is_load: bool
    began_s: float


@dataclass
class _Jobs:
    """How many are under way, and the results of others since vLLM asked last."""

    under_way: int = 0
    ended: list[Any] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own: a thread asks for all keys of a step at once, and each answer holds until its request has ended."""

    def __init__(self, tier_type: str, known: Callable[[Sequence[bytes]], Iterable[bool]]) -> None:
        self._known = known
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._known(keys)


class PDLinkTier(SecondaryTierManager):  # type: ignore[misc]
    """vLLM promises that it announces a request first, and that the rows of a job are nobody else's until the job is
    reported.

    The tier promises that every job is reported once; that nothing touches its rows then; that a chunk reported as
    loaded is what was stored, byte for byte; that only `drain_jobs` and `shutdown` wait. vLLM computes what fails. It
    keeps what it has when vLLM resets its caches, as vLLM's own tiers do.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """given: `settings.TierSettings`. Raises UnsupportedVllm, ConfigError, OSError: the server does not start."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        versions.share_log()
        settings = settings_of.read_tier(given)
        accepts = settings.untested_vllm == "accept"
        versions.check(vllm.__version__, accept_newer=accepts, oldest=versions.TIER)
        self.locality = Locality(settings.locality) if settings.locality is not None else None
        rows = np.asarray(primary_kv_view)
        assert rows.flags.c_contiguous, "rows follow each other"
        self._row_nbytes = self.block_size_bytes
        self._rows = RecordRows(rows.reshape(-1).view(np.uint8), self._row_nbytes)
        self._shape = row_shape(self._row_nbytes)
        self._origin = _origin(offloading_spec.config, settings.revision, self._shape)
        self._namespace = hashing.namespace(self._origin)
        """Of what is stored and found from now on."""
        self._begun: dict[str, bytes] = {}
        """By request, the namespace when it began."""
        self._jobs = _Jobs()
        self._store = _opened(settings, offloading_spec.config, self._namespace, self._shape)
        self._loading, self._storing = Line("pdlink-tier-load", 2), Line("pdlink-tier-store")
        self._lookups = _Lookups(tier_type, self._known)
        self._own_name = f"tier {id(self)}"
        versions.watch_weights(self._weights_changed, self._own_name)

    # --- The scheduler's thread

    def on_new_request(self, req_context: Any) -> Any:
        self._begun[req_context.req_id] = self._namespace
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._begun.pop(req_context.req_id, None)
        self._lookups.cleanup(req_context.req_id)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        is_there = self._lookups.lookup(key, req_context)
        if is_there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._storing, self._keep)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._loading, self._fetch)

    def _submit(self, given: Any, line: Line, do: Callable[[_Job], None]) -> None:
        names, request = list(given.keys), given.req_context.req_id
        rows = [int(row) for row in given.chunk_ids]
        namespace, is_load = self._namespace, given.is_promotion
        job = _Job(given.job_id, names, namespace, rows, request, is_load, time.monotonic())
        with self._jobs.changed:
            self._jobs.under_way += 1
        of_now = self._begun.get(request, namespace) == namespace  # else other weights have computed a part of it
        if not (of_now and line.put(partial(self._guarded, do, job))):
            self._end(job, 0)

    def get_finished_jobs(self) -> list[Any]:
        with self._jobs.changed:
            ended, self._jobs.ended = self._jobs.ended, []
        for job, result in ended:
            if job.is_load and not result.success:
                came = len(result.successful_keys or ())
                self._lookups.mark_miss(job.names[came:])  # or vLLM would ask for them again and again
        return [result for _, result in ended]

    def drain_jobs(self) -> None:
        with self._jobs.changed:
            self._jobs.changed.wait_for(lambda: not self._jobs.under_way)

    def shutdown(self) -> None:
        versions.unwatch_weights(self._own_name)
        self.drain_jobs()
        self._lookups.shutdown()
        self._loading.close(_CLOSE_S)
        self._storing.close(_CLOSE_S)
        self._store.close()
        self._rows = RecordRows(np.empty(0, np.uint8), self._row_nbytes)  # vLLM gives the memory back

    def _weights_changed(self, era: str) -> None:
        """KV that is computed from now on is other KV."""
        changed = self._origin._replace(revision=f"{self._origin.revision} changed {era}")
        self._namespace = hashing.namespace(changed)

    # --- Threads of the look-ups, of `_loading` and of `_storing`

    def _known(self, names: Sequence[bytes]) -> list[bool]:
        keys = _keys(self._namespace, names)
        return [place >= 0 for place in self._store.known_at(keys, _LOOKUP_TIMEOUT_S)]

    def _guarded(self, do: Callable[[_Job], None], job: _Job) -> None:
        try:
            do(job)
        except Exception as error:  # noqa: BLE001  a chunk is worth nothing beside a scheduler
            verb = "load" if job.is_load else "store"
            log.warning(
                "pdlink store: %s of %d chunks failed: %s: %s", verb, len(job.names), type(error).__name__, error
            )
            self._end(job, 0)

    def _keep(self, job: _Job) -> None:
        keys = _keys(job.namespace, job.names)
        row_of = dict(zip(keys, job.rows, strict=True))
        slots = self._store.reserve(list(row_of), self._shape, job.request)
        try:
            summed = self._rows.save(self._store, slots, [row_of[slot.key] for slot in slots])
            self._store.commit(slots, self._shape, summed=summed)
        except BaseException:
            self._store.abandon(slots)
            raise
        missing = set(keys).difference(slot.key for slot in slots)
        kept = -1 not in self._store.known_at(list(missing), _LOOKUP_TIMEOUT_S) if missing else True
        self._end(job, len(keys) if kept else 0)

    def _fetch(self, job: _Job) -> None:
        found = self._store.lookup(_keys(job.namespace, job.names), _LOOKUP_TIMEOUT_S)
        fetch = self._store.fetch(found, self._shape, job.request, checks=True)

        def come(_: object) -> None:
            fill = partial(self._fill, fetch)
            if not self._loading.put(partial(self._guarded, fill, job)):
                self._guarded(fill, job)

        fetch.done.add_done_callback(come)

    def _fill(self, fetch: AnyFetch, job: _Job) -> None:
        wrong: list[Slot] = []
        slots = fetch.done.result()
        try:
            wrong = self._rows.load(self._store, slots, job.rows[: len(slots)], fetch.unchecked)
        finally:
            stood = fetch.close(wrong)
        came = min([len(slots), *map(slots.index, wrong)])
        self._end(job, came if stood else 0)

    def _end(self, job: _Job, came: int) -> None:
        """came: leading chunks that are where they were to come."""
        whole, nbytes = came == len(job.names), came * self._row_nbytes
        part = tuple(job.names[:came]) if job.is_load and came and not whole else None
        took_s = time.monotonic() - job.began_s
        result = JobResult(job.number, whole, part, transfer_time=took_s, transfer_bytes=nbytes)
        with self._jobs.changed:
            self._jobs.ended.append((job, result))
            self._jobs.under_way -= 1
            self._jobs.changed.notify_all()


def _keys(namespace: bytes, names: Sequence[bytes]) -> list[bytes]:
    return hashing.named(namespace, [name.hex() for name in names])


def _origin(config: Any, revision: str, shape: RecordShape) -> hashing.Origin:
    """config: vLLM's `OffloadingConfig`."""
    parallel, cache = config.parallel, config.cache
    alike = parallel.is_parallelism_agnostic or config.replicated_layout
    ranks = () if alike else (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    groups = [(group.tokens_per_block, *group.layer_names) for group in config.groups]
    form = (
        versions.check(vllm.__version__, accept_newer=True),  # another one may lay a row out in another way
        groups,
        cache.tokens_per_hash,
        cache.blocks_per_chunk,
        ranks,
        config.replicated_layout,
        config.canonical_layout,
        config.kv_cache_layout,
    )
    content = versions.content_at(config.model.name)
    name = f"vllm offloading {content} {revision} {form}"
    return hashing.Origin(config.model.name, name, config.model.dtype, layout=shape.text)


def _opened(settings: settings_of.TierSettings, config: Any, namespace: bytes, shape: RecordShape) -> AnyStore:
    """Raises ConfigError, OSError."""
    tiers: TiersConfig = settings.tiers
    store: AnyStore
    engine = config.parallel.data_parallel_index
    name = f"{settings.name}-dp{engine}" if engine else settings.name
    if tiers.store is not None:
        store = RemoteStore(tiers.store, name=name, timeout_s=tiers.store_timeout_s)
    else:
        room_nbytes = int(tiers.max_local_cpu_size * 2**30)
        if shape.nbytes > room_nbytes:
            raise ConfigError(
                f"tiers.max_local_cpu_size: got {room_nbytes} bytes; expected {shape.nbytes} or more, a chunk of "
                "vLLM's; raise it, or lower block_size in kv_connector_extra_config"
            )
        store = make_store(tiers, name, namespace.hex()[:32], record_nbytes=shape.nbytes)
    store.open()
    return store
