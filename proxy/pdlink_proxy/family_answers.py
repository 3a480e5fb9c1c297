"""What a process of a proxy tells the others of the same proxy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from pdlink.config import ProxyConfig

from .records import RequestRecord  # noqa: TC001  (msgspec reads the annotation at run time)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .app import Router


class Beside(msgspec.Struct, frozen=True):
    """What one process does now."""

    running: int
    queued: int
    in_flight: dict[str, int]
    """Legs, by side and id of the worker."""
    records: list[RequestRecord] = []


def answers_of(router: Router) -> dict[str, Callable[[Any], object]]:
    """By question, what answers it."""

    def numbers(_: Any) -> object:
        return router.metrics.numbers()

    def now(records: Any) -> object:
        in_flight = {f"{worker.side.value} {worker.id}": worker.in_flight for worker in router.pools.all}
        return Beside(router.num_running, router.num_queued, in_flight, list(router.records) if records else [])

    def take(asked: Any) -> object:
        key, tokens = asked
        return 0.0 if router.entry.limits is None else router.entry.limits.take(key, tokens, time.monotonic())

    def members(_: Any) -> object:
        router.membership.read_kept()
        return True

    def adopt(said: Any) -> object:
        router.adopt(ProxyConfig.model_validate(said))
        return True

    def route_ended(transfer_id: Any) -> object:
        return router.decider is not None and router.decider.ended(transfer_id)

    return {
        "numbers": numbers,
        "now": now,
        "take": take,
        "members": members,
        "adopt": adopt,
        "route_ended": route_ended,
        "decisions": lambda request_id: router.decisions.of(request_id),
        "told": lambda request_id: router.decisions.told_of(request_id),
    }
