"""What a worker is doing, for `pdlink top` and the proxy's page: made when it is asked for, and only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pdlink.observe.series import Registry
    from pdlink.observe.timeline import Timeline
    from pdlink.serve.worker import Worker

_LIVE = 16
_ENDED = 32


def state(worker: Worker, metrics: Registry, timeline: Timeline) -> dict[str, Any]:
    """The body of GET /pdlink/state. Durations only: no time of this host's clock leaves it."""
    engine, pool, report = worker.engine, worker.pool, worker.node.report()
    return {
        "name": worker.name,
        "role": worker.role,
        "epoch": report.epoch,
        "model": worker.model.name,
        "requests": {
            "running": engine.num_running,
            "awaiting_kv": engine.num_awaiting_kv,
            "waiting": engine.num_waiting,
        },
        "blocks": {"free": pool.num_free, "total": pool.num_blocks},
        "peers": report.peers,
        "refused": report.refused,
        "live": [transfer._asdict() for transfer in worker.node.transfers(_LIVE)],
        "ended": [msgspec.structs.asdict(transfer) for transfer in timeline.ended(_ENDED)],
        "sampled": engine.num_sampled,
        "totals": metrics.totals(),
    }
