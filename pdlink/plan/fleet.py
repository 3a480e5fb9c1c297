"""A fleet in virtual time behind the proxy's real placement, queue and breakers.

The workers are those of `workers.py`; here each request goes where a policy of the proxy sends it. Prefix caches
forget the least recently used. No HTTP. Workers fail and drain by a schedule (`outages.py`); the proxy's breakers
find out who fails.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from time import process_time, thread_time
from typing import TYPE_CHECKING

from pdlink._index import HeldKV
from pdlink_proxy.fleet import PlacementRequest
from pdlink_proxy.placement import Pair
from pdlink_proxy.queue import Waiting
from pdlink_proxy.steps import Leg

from .closed_form import prefill_times
from .curves import Curves
from .outages import FAIL_S, Outages
from .router import MODEL, SimulatedRouter
from .traffic import KEY_TOKENS
from .workers import SimulatedWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink_proxy.worker import Worker

    from .traffic import Tokens, Traffic
    from .workers import Played, SimulatedRequest

REPORT_S = 0.5
"""Between two reports of a worker, as `ProxyConfig.health_interval_s`."""
MANY_REPORT_S = 0.1
"""The same where several routers share the workers."""
FAR = 20
"""Times as long for KV to another rack."""
TIMED = 16
"""One placement of so many has its CPU measured: asking for it may cost more than the placement."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way."""

    number: int
    wanted: PlacementRequest
    router: SimulatedRouter
    came_s: float
    seen: tuple[Worker, Worker] | None = None
    """The workers in its router's eyes."""
    calls: tuple[int, int] = (0, 0)
    """At their breakers."""
    work: tuple[int, int] = (0, 0)
    """Tokens said to the two workers' states."""


class _Cache:
    """Of one worker, beginnings of prompts. What is placed there counts at once: prefill computes in that order."""

    def __init__(self, max_tokens: int) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._max = max_tokens // KEY_TOKENS

    def cached(self, keys: Sequence[int], tokens: int) -> int:
        held, there = self._held, 0
        for key in keys:
            if key not in held:
                break
            there += 1
        # The last token is always computed.
        return min(there * KEY_TOKENS, tokens - 1)

    def keep(self, keys: Sequence[int]) -> None:
        held = self._held
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._max:
            held.popitem(last=False)


@dataclass(frozen=True, slots=True, eq=False)
class PolicyOutcome:
    """One policy before one fleet."""

    played: Played
    cached: float
    """Share of all prompt tokens that prefill found in its cache."""
    place_us: float
    """CPU of one decision, without hashing (the trace has keys) and without the index of published KV."""
    cpu_s: float
    """Of all."""
    failed_legs: int = 0
    """Each made its request start again elsewhere."""
    outages: int = 0

    @property
    def ttft_s(self) -> list[float]:
        """Of each request, in order of arrival."""
        return self.played.ttft_s.tolist()


class Simulation:
    """Plays requests through a fleet. The same arguments give the same outcome, but for the CPU that it takes."""

    def __init__(
        self,
        policies: tuple[str, str],
        num_prefill: int,
        num_decode: int,
        *,
        curves: Curves | None = None,
        slow: float = 0.0,
        publish: bool = False,
        routers: int = 1,
        away: float = 0.0,
        racks: int = 1,
        cache_tokens: tuple[int, int] | None = None,
        seed: int = 1,
    ) -> None:
        """slow: share of the workers of each leg that take twice as long. publish: workers say what KV they have.
        routers: that get the requests in turn, and know what they sent and what workers report. away: mean share of
        the workers that fail or drain at any time, by a schedule of this seed. racks: over which the workers are
        dealt out; KV takes `FAR` times as long between two. cache_tokens: of prompts, that a worker of each leg
        keeps; None for all that its memory holds."""
        self._curves = curves = curves or Curves()
        kept = cache_tokens or (curves.pool_tokens, curves.pool_tokens)
        self._caches = [
            [_Cache(tokens) for _ in range(num)] for tokens, num in zip(kept, (num_prefill, num_decode), strict=True)
        ]
        self._nums, self._slow, self._publish = (num_prefill, num_decode), slow, publish
        self._report_s = REPORT_S if routers == 1 else MANY_REPORT_S
        keys = [f"p{number}#" for number in range(num_prefill)], [f"d{number}#" for number in range(num_decode)]
        self._keys = keys
        self._routers = [
            SimulatedRouter(
                policies, keys, pool_tokens=curves.pool_tokens, publish=publish, number=number, routers=routers
            )
            for number in range(routers)
        ]
        self._news: tuple[set[int], set[int]] = set(), set()
        """By leg, numbers of the workers that have changed since their last report."""
        self._turns = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._place_s, self._num_places, self._cached_tokens = 0.0, 0, 0
        self._away, self._seed, self._failed_legs, self._racks = away, seed, 0, racks

    def run(self, traffic: Traffic, cached_tokens: Tokens | None = None) -> PolicyOutcome:
        """Every request to its end. cached_tokens: of each prompt, that every prefill worker has; None leaves that to
        the caches of the workers."""
        began_s = process_time()
        self._core = core = SimulatedWorkers(self._curves, *self._nums, traffic.prompt_tokens, traffic.answer_tokens)
        for side in (core.prefills, core.decodes):
            for one in side[: math.ceil(self._slow * len(side))]:
                one.slow = 2.0
        self._given = None if cached_tokens is None else cached_tokens.tolist()
        self._jobs: dict[int, _Job] = {}
        self._unfinished = len(traffic)
        self._outages = Outages([*self._keys[0], *self._keys[1]], self._away, self._seed, float(traffic.at_s[-1]))
        for leg, of_leg in zip(Leg, self._keys, strict=True):
            for number, key in enumerate(of_leg):
                for at_s, drains in self._outages.drained(key):
                    self._at(at_s, lambda leg=leg, number=number, drains=drains: self._drains(leg, number, drains))  # type: ignore[misc]
        self._report()
        columns = traffic.at_s.tolist(), traffic.prompt_tokens.tolist(), traffic.answer_tokens.tolist()
        keys = traffic.keys or itertools.repeat(())
        for number, (at_s, prompt, answer, chain) in enumerate(zip(*columns, keys, strict=False)):
            self._until(at_s)
            wanted = PlacementRequest(MODEL, prompt, answer, key_tokens=KEY_TOKENS, chain=chain)
            self._arrive(_Job(number, wanted, self._routers[next(self._turns) % len(self._routers)], at_s))
        self._until(math.inf)
        if self._unfinished:
            raise RuntimeError(f"{self._unfinished} requests were lost")
        return PolicyOutcome(
            core.outcome(traffic.at_s),
            self._cached_tokens / int(traffic.prompt_tokens.sum()),
            self._place_s / -(-self._num_places // TIMED) * 1e6,
            process_time() - began_s,
            self._failed_legs,
            self._outages.num,
        )

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    def _until(self, end_s: float) -> None:
        """All that happens until then, but for arrivals."""
        while self._unfinished:
            event_s = self._events[0][0]
            waits = any(len(router.queue) for router in self._routers)
            ended = self._core.advance(min(event_s, end_s), first=waits)
            for at_s, done, leg in ended:
                self._now = at_s
                self._ended(done, leg)
            if waits and ended:
                self._serve()
            elif event_s > end_s:
                break
            else:
                self._now, _, event = heapq.heappop(self._events)
                event()
        self._now = end_s

    def _report(self) -> None:
        prefills, decodes = self._core.prefills, self._core.decodes
        for router in self._routers:
            for number in self._news[1]:
                state, to = router.worker(Leg.DECODE, number).work, decodes[number]
                free = self._curves.pool_tokens - to.held
                if len(self._routers) == 1:
                    state.heard(state.requests, free)
                else:
                    state.heard(to.requests, free, to.load)
            for number in self._news[0] if len(self._routers) > 1 else ():
                one = prefills[number]
                router.worker(Leg.PREFILL, number).work.heard(one.requests, None, one.load)
            router.compare(self._now)
        for news in self._news:
            news.clear()
        self._serve()
        self._at(self._now + self._report_s, self._report)

    # ---- the routers

    def _arrive(self, job: _Job) -> None:
        router = job.router
        if len(router.queue) or not self._place(router, job):
            router.queue.put(Waiting("", MODEL, job.wanted.total_tokens, self._now, job))
            self._serve()

    def _serve(self) -> None:
        for router in self._routers:
            while len(router.queue) and router.queue.serve(
                lambda waiting, router=router: self._place(router, waiting.item),  # type: ignore[misc]
                self._now,
            ):
                pass

    def _place(self, router: SimulatedRouter, job: _Job) -> bool:
        wanted, now = job.wanted, self._now
        keys: Sequence[int] = wanted.keys
        if self._publish:
            wanted.held = HeldKV(
                [
                    (router.worker(leg, number).work.number, tokens, 0.0)
                    for leg, caches in zip(Leg, self._caches, strict=True)
                    for number, cache in enumerate(caches)
                    if (tokens := cache.cached(keys, wanted.num_tokens))
                ]
            )
        self._num_places += 1
        timed = self._num_places % TIMED == 1
        started_s = thread_time() if timed else 0.0
        placed = router.placer.place(wanted, router.fleet(now))
        if isinstance(placed, Pair) and placed.prefill is not None:
            for leg, work in (("prefill", placed.prefill), ("decode", placed.decode)):
                if (note := router.placer.noting.get(leg)) is not None:
                    note(wanted, work)
        if timed:
            self._place_s += thread_time() - started_s
        if not isinstance(placed, Pair) or placed.prefill is None:
            return False
        one, to = placed.prefill.row, placed.decode.row
        job.seen = seen = router.worker(Leg.PREFILL, one), router.worker(Leg.DECODE, to)
        job.calls = seen[0].breaker.begin(now), seen[1].breaker.begin(now)
        job.work = max(1, wanted.num_tokens - placed.cached_tokens), wanted.total_tokens
        placed.prefill.sent(job.work[0], now)
        placed.decode.sent(job.work[1], now)
        if self._away and any(self._outages.fails(each.url, now) for each in seen):
            self._at(now + FAIL_S, lambda: self._failed(router, job))
            return True
        self._news[0].add(one)
        self._news[1].add(to)
        new, moved = wanted.num_tokens, wanted.num_tokens
        if keys:
            here, there = self._caches[0][one], self._caches[1][to]
            new -= here.cached(keys, wanted.num_tokens)
            moved -= there.cached(keys, wanted.num_tokens)
            self._cached_tokens += wanted.num_tokens - new
            here.keep(keys)
            there.keep(keys)
        if self._given is not None:
            new = max(1, wanted.num_tokens - self._given[job.number])
        self._jobs[job.number] = job
        moved *= 1 if one % self._racks == to % self._racks else FAR
        self._core.enter(job.number, one, to, new, moved, now)
        return True

    def _drains(self, leg: Leg, number: int, drains: bool) -> None:
        for router in self._routers:
            router.drains(leg, number, drains=drains)

    def _failed(self, router: SimulatedRouter, job: _Job) -> None:
        """Its legs broke. It begins again elsewhere."""
        assert job.seen is not None
        for seen, call, tokens in zip(job.seen, job.calls, job.work, strict=True):
            failed = self._outages.fails(seen.url, self._now - FAIL_S)
            self._failed_legs += failed
            if failed:
                seen.breaker.end(call, self._now, failed=True)
                job.wanted.avoid |= {seen.work.key}
            seen.breaker.drop(call)
            seen.judged()
            seen.work.finished(tokens, self._now, served=False)
        if not self._place(router, job):
            router.queue.put(Waiting("", MODEL, job.wanted.total_tokens, job.came_s, job))

    def _ended(self, done: SimulatedRequest, leg: int) -> None:
        job = self._jobs.pop(done.number) if leg else self._jobs[done.number]
        self._unfinished -= leg
        assert job.seen is not None
        seen = job.seen[leg]
        seen.work.finished(job.work[leg], self._now, served=True)
        seen.breaker.end(job.calls[leg], self._now, failed=False)
        seen.judged()
        if leg and job.wanted.answer_tokens > 1:
            (one, to), took_s = job.seen, done.began_s - done.prefilled_s
            job.router.pair_times.took(one.work.key, to.work.key, job.wanted.num_tokens, took_s, self._now)
        self._news[leg].add(seen.work.row)


def at_load(traffic: Traffic, load: float, num_prefill: int, curves: Curves) -> Traffic:
    """The same requests, so fast that prefill without any cache would be busy for this share of the time."""
    work_s = float(prefill_times(curves, traffic.prompt_tokens, None).sum())
    span_s = float(traffic.at_s[-1] - traffic.at_s[0]) or 1.0
    return replace(traffic, at_s=(traffic.at_s - traffic.at_s[0]) * (work_s / load / num_prefill / span_s))
