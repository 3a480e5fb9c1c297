"""One router of a simulated fleet (`fleet.py`): the proxy's placement, queue and breakers, and what it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.api.health import Health
from pdlink_proxy.fleet import Fleet
from pdlink_proxy.pair_times import PairTimes
from pdlink_proxy.placement import Placer
from pdlink_proxy.queue import Queue
from pdlink_proxy.side import Side
from pdlink_proxy.steps import Leg
from pdlink_proxy.table import WorkerState, compare, mean_speed
from pdlink_proxy.worker import State, Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = "m"
_WELL = Health("ok", "", "", None, MODEL, None)


class SimulatedRouter:
    """Worker n of a leg has number n."""

    def __init__(
        self,
        policies: tuple[str, str],
        keys: tuple[Sequence[str], Sequence[str]],
        *,
        pool_tokens: int,
        publish: bool,
        number: int,
        routers: int,
    ) -> None:
        """policies, keys: of prefill and of decode. number: of this router, of so many."""
        self.placer = Placer(*policies, routers=routers, salt=1000 * number)
        self.queue = Queue(1_000_000)
        self.pair_times = PairTimes()
        self._sides = {leg: Side() for leg in Leg}
        for leg, of_leg in zip(Leg, keys, strict=True):
            states = [WorkerState(key, pool_tokens=pool_tokens, publishes=publish) for key in of_leg]
            self._sides[leg].replace(
                [Worker(each.key, leg, state=State.OK, health=_WELL, work=each) for each in states]
            )

    def fleet(self, now_s: float) -> Fleet:
        """Who may get requests now."""
        prefill, decode = self._sides[Leg.PREFILL], self._sides[Leg.DECODE]
        pairs = prefill.usable(MODEL, now_s).pair, decode.usable(MODEL, now_s).pair
        return Fleet(*pairs, behind=self.pair_times.behind)

    def worker(self, leg: Leg, number: int) -> Worker:
        return self._sides[leg].workers[number]

    def compare(self, now_s: float) -> None:
        for leg in Leg:
            compare(self._sides[leg].table.states)
        self.pair_times.compare(mean_speed(self._sides[Leg.PREFILL].table.states), now_s)

    def drains(self, leg: Leg, number: int, *, drains: bool) -> None:
        """The worker takes no new requests, or takes them again."""
        worker = self.worker(leg, number)
        worker.listed_as_draining = drains
        if worker.changed is not None:
            worker.changed()
