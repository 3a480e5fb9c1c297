"""What a worker says about itself: whether it can serve, the body of /health, and the gauges of /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlink.node.report import Report
    from pdlink.observe.metrics import Gauges
    from pdlink.serve.worker import Worker


def problem(worker: Worker, report: Report | None = None) -> str:
    """Why this worker cannot serve; empty while it can."""
    report = report or worker.node.report()
    if report.failure:
        return report.failure
    if worker.engine_is_dead:
        return "the engine's thread has died"
    if report.stalled_s > 10 * worker.config.timeouts.peer_s:
        return f"the endpoint's loop has not gone round for {report.stalled_s:.0f} s"
    return ""


def health(worker: Worker) -> tuple[bool, dict[str, object]]:
    """Whether new requests are welcome, and the body of /health. Depends on nothing but this process."""
    engine, pool, report = worker.engine, worker.pool, worker.node.report()
    reason = problem(worker, report)
    status = "failed" if reason else "draining" if worker.draining else "ok"
    return status == "ok", {
        "status": status,
        "reason": reason,
        "name": worker.name,
        "epoch": report.epoch,
        "role": worker.config.role,
        "model": worker.model.name,
        "control": worker.node.address,
        "running": engine.num_running + engine.num_awaiting_kv,
        "waiting": engine.num_waiting,
        "free_blocks": pool.num_free,
        "num_blocks": pool.num_blocks,
        "block_tokens": worker.config.cache.block_tokens,
        "peers": report.peers,
        "refused": report.refused,
    }


def gauges(worker: Worker) -> Gauges:
    """What /metrics shows of a worker, beside what it counts."""
    engine, pool, report = worker.engine, worker.pool, worker.node.report()
    num_dialed = sum(bool(refused["address"]) for refused in report.refused)
    return {
        "sender_transfers": ("Live transfers sent from here, by state", report.sending),
        "push_nbytes": (
            "KV bytes of pushes: waiting for room on their transport, and in flight",
            report.push_nbytes,
        ),
        "receiver_transfers": ("Live transfers received here, by state", report.receiving),
        "peers": ("Sessions with other workers", {"live": report.num_peers, "closing": report.num_closing}),
        "refused_peers": (
            "Refused peers (names and reasons: /health), by the side that dialed",
            {"dialed": num_dialed, "accepted": len(report.refused) - num_dialed},
        ),
        "control_nbytes": (
            "Bytes held for peers: offers whose request has not come, and frames that they do not read",
            report.control_nbytes,
        ),
        "endpoint_longest_absence_seconds": (
            "Longest time since the last scrape for which the endpoint's loop could not run",
            {"loop": worker.node.take_longest_absence_s()},
        ),
        "blocks": (
            "Blocks of the KV pool",
            {"free": pool.num_free, "held": pool.num_held, "total": pool.num_blocks},
        ),
        "engine_requests": (
            "Requests in the engine",
            {"running": engine.num_running, "awaiting_kv": engine.num_awaiting_kv, "waiting": engine.num_waiting},
        ),
        **(worker.tiers.gauges() if worker.tiers is not None else {}),
    }
