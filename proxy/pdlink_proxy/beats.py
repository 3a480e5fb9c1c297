"""What the beats of workers that have joined (`discovery/register.py`) do to the pools.

A beat is a health that nobody asked for. It keeps a worker as it is. Only an answer to our own probe brings in a new
life, or takes back one that a leg found gone: the probe also finds out whether the worker takes our key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .worker import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.api.health import Health
    from pdlink.api.presence import WorkerLoad

    from .pools import Pools

_SETTLED = (State.OK, State.DRAINING, State.FAILED, State.WRONG_ROLE, State.OTHER_ROLE)
"""States that a probe has found, and that a beat may change."""


class Beats:
    """Of all workers of one proxy."""

    def __init__(self, pools: Pools, heard: Callable[[], None]) -> None:
        """heard: called when workers have been heard."""
        self._pools = pools
        self.heard_some = heard

    def heard(self, url: str, health: Health) -> None:
        """The beat of the worker at this URL."""
        for worker in self._pools.at(url):
            worker.beats = True
            known = worker.health
            theirs = (health.name, health.epoch)
            if known is None or (known.name, known.epoch) != theirs or worker.state not in _SETTLED:
                worker.poke.set()
                continue
            worker.heard(health, faults_when_asked=worker.faults)
            self._pools.heard(worker)

    def loaded(self, url: str, epoch: str, load: WorkerLoad) -> None:
        """The beat of the worker at this URL, of which only the load may have changed."""
        for worker in self._pools.at(url):
            worker.beats = True
            known = worker.health
            if known is None or known.epoch != epoch or worker.state not in _SETTLED:
                worker.poke.set()
                continue
            worker.loaded(load)
            self._pools.loaded(worker)

    def silent(self, url: str, why: str) -> None:
        """Its beats stay away: it gets no request until a probe succeeds. If none is answered, its legs are lost."""
        for worker in self._pools.at(url):
            worker.beats, worker.hushed = False, why
            worker.unreachable(why)
            worker.poke.set()

    def suspect(self, url: str) -> None:
        """Its connection has ended: ask at once."""
        for worker in self._pools.at(url):
            worker.poke.set()

    def named(self, url: str) -> str:
        """By which name the worker there has answered our probe; empty if it has not."""
        return next((worker.health.name for worker in self._pools.at(url) if worker.health is not None), "")

    def well(self, url: str) -> bool:
        """Whether it answers our probe."""
        return any(worker.state in _SETTLED for worker in self._pools.at(url))
