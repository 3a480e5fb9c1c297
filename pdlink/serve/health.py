"""What a worker says about itself: whether it can serve, the body of /health, and what /metrics shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdlink import __version__
from pdlink.api.health import Health, WorkerRefusal
from pdlink.observe.gauges import LinkState
from pdlink.observe.metrics import WorkerMetrics
from pdlink.store.client import RemoteStore

if TYPE_CHECKING:
    from pdlink.node.report import NodeReport
    from pdlink.serve.worker import Worker


def problem(worker: Worker, report: NodeReport | None = None) -> str:
    """Why this worker cannot serve; empty while it can."""
    report = report or worker.node.report()
    if report.failure:
        return report.failure
    if worker.engine_is_dead:
        return "the engine's thread has died"
    if report.stalled_s > 10 * worker.config.timeouts.peer_s:
        return f"the endpoint's loop has not gone round for {report.stalled_s:.0f} s"
    return ""


def health(worker: Worker) -> Health:
    """The body of /health; new requests are welcome while its status is "ok". Depends on nothing but this process."""
    engine, pool, report = worker.engine, worker.pool, worker.node.report()
    reason, store = problem(worker, report), worker.source.store if worker.source is not None else None
    return Health(
        status="failed" if reason else "draining" if worker.draining else "ok",
        reason=reason,
        name=worker.name,
        epoch=report.epoch,
        role=worker.role,
        model=worker.model.name,
        version=f"pdlink {__version__}",
        revision=worker.model.revision,
        control=worker.node.address,
        store=store.lends_at if store is not None else "",
        store_stays=isinstance(store, RemoteStore),
        running=engine.num_running + engine.num_awaiting_kv,
        waiting=engine.num_waiting,
        load_tokens=_load_tokens(worker),
        free_blocks=pool.num_free,
        num_blocks=pool.num_blocks,
        block_tokens=worker.config.cache.block_tokens,
        peers=tuple(report.peers),
        refused=msgspec.convert(report.refused, tuple[WorkerRefusal, ...]),
        kv_events=_publishers(worker),
        fingerprint=report.fingerprint,
        problems=_problems(worker),
    )


def _load_tokens(worker: Worker) -> int | None:
    """What routers weigh requests of others with; a worker of both roles does not say which of the two it is."""
    if worker.role == "both":
        return None
    return worker.engine.tokens_to_compute if worker.role == "prefill" else worker.engine.tokens_held


def _problems(worker: Worker) -> dict[str, str]:
    """Of the places that keep less KV than their settings say."""
    if worker.source is None:
        return {}
    return {place: why for place, why in worker.source.store.problems().items() if why}


def _publishers(worker: Worker) -> tuple[str, ...]:
    """Of this worker's KV: its own, and that of a store process while it answers, with what that calls this model."""
    own = (worker.kv_events.address,) if worker.kv_events is not None else ()
    if worker.source is None or not (events := worker.source.store.events):
        return own
    endpoint, _, replay = events.partition(",")
    return (*own, f"{endpoint},{replay},{worker.source.scope}")


def metrics_of(worker: Worker) -> WorkerMetrics:
    """All metrics of a worker. Nobody listens to events with its `counting` yet."""
    store = worker.source.store if worker.source is not None else None
    roles = ("prefill", "decode", "both") if worker.role == "both" else (worker.role,)
    lanes = tuple(name for name in worker.node.transports if name != "ucx")  # UCX names its lanes itself
    metrics = WorkerMetrics(roles=roles, transports=lanes, store=store is not None)
    if metrics.store is not None and store is not None:
        metrics.store.tiers(store.places[1:])

    def update() -> None:
        report, pool = worker.node.report(), worker.pool
        queue_tokens = worker.engine.tokens_to_compute if worker.role != "decode" else 0
        metrics.link.set(link_state(report, worker.node.longest_absence_s()))
        metrics.engine.set(
            free=pool.num_free,
            held=pool.num_held,
            capacity=pool.num_blocks,
            requests={
                "running": worker.engine.num_running,
                "awaiting_kv": worker.engine.num_awaiting_kv,
                "waiting": worker.engine.num_waiting,
            },
            role=worker.role,
            queue_tokens=queue_tokens,
            queue_s=worker.engine.pace.prefill_of(queue_tokens),
        )
        if metrics.sizes is not None and store is not None:
            metrics.sizes.set(store.gauges(), store.health(), store.problems())

    metrics.before_reading(update)
    return metrics


def link_state(report: NodeReport, longest_absence_s: float) -> LinkState:
    return LinkState(
        sending=report.sending,
        receiving=report.receiving,
        quarantined_blocks=report.quarantined_blocks,
        push_nbytes=report.push_nbytes,
        control_nbytes=report.control_nbytes,
        live=report.num_peers,
        closing=report.num_closing,
        peers=report.peers,
        refused=report.refused,
        longest_absence_s=longest_absence_s,
    )
