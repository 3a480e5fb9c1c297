"""Workers and requests for tests of policies and placement."""

from __future__ import annotations

import random

from pdlink_proxy.fleet import PlacementRequest
from pdlink_proxy.table import WorkerState


def worker(key: str, load: int = 0, **more: int | float | None) -> WorkerState:
    """A worker with so many tokens to do."""
    made = WorkerState(key)
    if load:
        made.sent(load, 0.0)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def pool(*loads: int) -> list[WorkerState]:
    return [worker(f"http://w{i}#e1", load) for i, load in enumerate(loads)]


def request(*keys: int, model: str = "m", **more: object) -> PlacementRequest:
    """A request whose prompt has these keys, of 100 tokens each."""
    return PlacementRequest(
        model,
        100 * max(1, len(keys)),
        50,
        key_tokens=100,
        chain=keys,
        **more,  # type: ignore[arg-type]
    )


def some_request(rng: random.Random) -> PlacementRequest:
    """With one of a few beginnings and one of a few sessions."""
    beginning = rng.randrange(8)
    keys = [beginning * 1000 + i for i in range(rng.randrange(1, 20))]
    return request(*keys, session=rng.choice(["", "a", "b", "c"]))
