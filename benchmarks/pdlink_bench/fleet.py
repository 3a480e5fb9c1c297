"""A fleet in virtual time behind the proxy's real placement and queue: what a policy does to the time to first token.

Prefill workers compute one prompt after the other; decode workers advance all their sequences together. Their speeds
are a curve each (`Curves`), their prefix caches forget the least recently used. No HTTP. Workers fail and
drain by a schedule (`outages.py`); the proxy's breakers find out who fails.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from time import thread_time
from typing import TYPE_CHECKING

from pdlink_proxy.fleet import PlacementRequest
from pdlink_proxy.placement import Placed
from pdlink_proxy.queue import Waiting
from pdlink_proxy.steps import Leg

from .fleet_requests import KEY_TOKENS
from .fleet_router import MODEL, Router
from .outages import FAIL_S, Outages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink_proxy.worker import Worker

    from .fleet_requests import Request

REPORT_S = 0.5
"""Between two reports of a worker, as `ProxyConfig.health_interval_s`."""
MANY_REPORT_S = 0.1
"""The same where several routers share the workers."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Seconds, by tokens; roughly a model of 8B parameters on one H100 with a link of 25 GB/s."""

    prompt_s: float = 5e-3
    token_s: float = 45e-6
    attention_s: float = 7e-10
    step_s: float = 6e-3
    sequence_s: float = 5e-5
    context_s: float = 4e-8
    transfer_s: float = 5e-6
    num_layers: int = 32
    pool_tokens: int = 400_000
    """KV a worker holds, cached prefixes included."""

    def prefill_s(self, new: int, cached: int) -> float:
        return self.prompt_s + self.token_s * new + self.attention_s * new * (cached + new / 2)

    def decode_step_s(self, sequences: int, tokens: float) -> float:
        return self.step_s + self.sequence_s * sequences + self.context_s * tokens

    def tail_s(self, tokens: int, prefill_s: float) -> float:
        """From the end of prefill to the last byte: layers are sent while later ones are computed."""
        whole, last = self.transfer_s * tokens, 1 / self.num_layers
        return max(whole * last, whole - prefill_s * (1 - last))


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    wanted: PlacementRequest
    prefill: _Prefill | None = None
    decode: _Decode | None = None
    router: Router | None = None
    seen: tuple[Worker, Worker] | None = None
    """The workers in its router's eyes."""
    calls: tuple[int, int] = (0, 0)
    """At their breakers."""
    work: tuple[int, int] = (0, 0)
    """Tokens said to the two workers' states."""
    ready_s: float | None = None
    """The KV is at decode."""
    admitted: bool = False
    ttft_s: float | None = None


class _Cache:
    def __init__(self, max_tokens: int) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._max = max_tokens // KEY_TOKENS

    def cached(self, request: Request) -> int:
        found = itertools.takewhile(self._held.__contains__, request.keys)
        # The last token is always computed.
        return min(sum(1 for _ in found) * KEY_TOKENS, request.prompt_tokens - 1)

    def keep(self, request: Request) -> None:
        for key in reversed(request.keys):
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._max:
            self._held.popitem(last=False)


@dataclass(slots=True, eq=False)
class _Prefill:
    key: str
    slowdown: float
    cache: _Cache
    waiting: deque[_Job] = field(default_factory=deque)
    busy: bool = False
    load: int = 0
    """Tokens that it has to compute."""


@dataclass(slots=True, eq=False)
class _Decode:
    key: str
    slowdown: float
    cache: _Cache
    free: int
    requests: int = 0
    load: int = 0
    """Tokens of its requests."""
    waiting: deque[_Job] = field(default_factory=deque)
    running: list[tuple[float, int, _Job]] = field(default_factory=list)
    """(step after which it ends, number, job): a heap."""
    tokens: float = 0.0
    steps: float = 0.0
    since_s: float = 0.0
    version: int = 0


@dataclass(slots=True)
class Outcome:
    """One policy before one fleet."""

    ttft_s: list[float]
    cached: float
    """Share of all prompt tokens that prefill found in its cache."""
    place_us: float
    """CPU of one decision, without hashing (the trace has keys) and without the index of published KV."""
    failed_legs: int = 0
    """Each made its request start again elsewhere."""
    outages: int = 0


class Simulation:
    """Plays requests through a fleet. The same arguments give the same outcome, but for `place_us`."""

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
        seed: int = 1,
    ) -> None:
        """slow: share of the workers of each leg that take twice as long. publish: workers say what KV they have.
        routers: that get the requests in turn, and know what they sent and what workers report. away: mean share of
        the workers that fail or drain at any time, by a schedule of this seed."""
        self._curves = curves = curves or Curves()
        prefill = [
            _Prefill(f"p{i}#", 2.0 if i < slow * num_prefill else 1.0, _Cache(curves.pool_tokens))
            for i in range(num_prefill)
        ]
        decode = [
            _Decode(f"d{i}#", 2.0 if i < slow * num_decode else 1.0, _Cache(curves.pool_tokens), curves.pool_tokens)
            for i in range(num_decode)
        ]
        self._prefill, self._decode, self._publish = prefill, decode, publish
        self._report_s = REPORT_S if routers == 1 else MANY_REPORT_S
        keys = [each.key for each in prefill], [each.key for each in decode]
        self._routers = [
            Router(policies, keys, pool_tokens=curves.pool_tokens, publish=publish, number=number, routers=routers)
            for number in range(routers)
        ]
        self._news: tuple[set[int], set[int]] = set(), set()
        """By leg, numbers of the workers that have changed since their last report."""
        self._turns = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._unfinished = 0
        self._place_s, self._cached_tokens = 0.0, 0
        self._away, self._seed, self._failed_legs = away, seed, 0

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Every request to its end."""
        jobs = [_Job(each, self._wanted(each)) for each in requests]
        self._unfinished = len(jobs)
        keys = [each.key for each in self._prefill] + [each.key for each in self._decode]
        self._outages = Outages(keys, self._away, self._seed, max(each.at_s for each in requests))
        for leg, of_leg in zip(Leg, (keys[: len(self._prefill)], keys[len(self._prefill) :]), strict=True):
            for number, key in enumerate(of_leg):
                for at_s, drains in self._outages.drained(key):
                    self._at(at_s, lambda leg=leg, number=number, drains=drains: self._drains(leg, number, drains))  # type: ignore[misc]
        for job in jobs:
            self._at(job.request.at_s, lambda job=job: self._arrive(job))  # type: ignore[misc]
        self._report()
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        ttft_s = [job.ttft_s for job in jobs if job.ttft_s is not None]
        if len(ttft_s) != len(jobs):
            raise RuntimeError(f"{len(jobs) - len(ttft_s)} requests were lost")
        prompt_tokens = sum(each.prompt_tokens for each in requests)
        return Outcome(
            ttft_s,
            self._cached_tokens / prompt_tokens,
            self._place_s / len(jobs) * 1e6,
            self._failed_legs,
            self._outages.num,
        )

    def _wanted(self, request: Request) -> PlacementRequest:
        return PlacementRequest(
            MODEL, request.prompt_tokens, request.answer_tokens, key_tokens=KEY_TOKENS, chain=request.keys
        )

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    def _report(self) -> None:
        for router in self._routers:
            for number in self._news[1]:
                state, decode = router.worker(Leg.DECODE, number).work, self._decode[number]
                if len(self._routers) == 1:
                    state.heard(state.requests, decode.free)
                else:
                    state.heard(decode.requests, decode.free, decode.load)
            for number in self._news[0] if len(self._routers) > 1 else ():
                prefill = self._prefill[number]
                busy = len(prefill.waiting) + prefill.busy
                router.worker(Leg.PREFILL, number).work.heard(busy, None, prefill.load)
            router.compare()
        for news in self._news:
            news.clear()
        self._serve()
        if self._unfinished:
            self._at(self._now + self._report_s, self._report)

    # ---- the routers

    def _arrive(self, job: _Job) -> None:
        job.router = router = self._routers[next(self._turns) % len(self._routers)]
        if len(router.queue) or not self._place(router, job):
            router.queue.put(Waiting("", MODEL, job.wanted.total_tokens, self._now, job))
            self._serve()

    def _serve(self) -> None:
        for router in self._routers:
            while router.queue.serve(lambda waiting, router=router: self._place(router, waiting.item), self._now):  # type: ignore[misc]
                pass

    def _place(self, router: Router, job: _Job) -> bool:
        if self._publish:
            caches = [(each.key, each.cache) for each in self._prefill] + [
                (each.key, each.cache) for each in self._decode
            ]
            job.wanted.held = {key: tokens for key, cache in caches if (tokens := cache.cached(job.request))}
        started_s = thread_time()
        placed = router.placer.place(job.wanted, router.fleet(self._now))
        if isinstance(placed, Placed) and placed.prefill is not None:
            router.placer.sent(job.wanted, "prefill", placed.prefill)
            router.placer.sent(job.wanted, "decode", placed.decode)
        self._place_s += thread_time() - started_s
        if not isinstance(placed, Placed) or placed.prefill is None:
            return False
        rows = placed.prefill.row, placed.decode.row
        job.prefill, job.decode = self._prefill[rows[0]], self._decode[rows[1]]
        job.seen = seen = router.worker(Leg.PREFILL, rows[0]), router.worker(Leg.DECODE, rows[1])
        job.calls = seen[0].breaker.begin(self._now), seen[1].breaker.begin(self._now)
        job.work = (max(1, job.wanted.num_tokens - placed.cached_tokens), job.wanted.total_tokens)
        placed.prefill.sent(job.work[0], self._now)
        placed.decode.sent(job.work[1], self._now)
        if any(self._outages.fails(each.url, self._now) for each in seen):
            self._at(self._now + FAIL_S, lambda: self._failed(router, job))
            return True
        for news, row in zip(self._news, rows, strict=True):
            news.add(row)
        job.decode.requests += 1
        job.prefill.load += job.work[0]
        job.decode.load += job.work[1]
        job.prefill.waiting.append(job)
        job.decode.waiting.append(job)
        self._compute(job.prefill)
        self._admit(job.decode)
        return True

    def _drains(self, leg: Leg, number: int, drains: bool) -> None:
        for router in self._routers:
            router.drains(leg, number, drains=drains)

    def _failed(self, router: Router, job: _Job) -> None:
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
            router.queue.put(Waiting("", MODEL, job.wanted.total_tokens, job.request.at_s, job))

    def _served(self, job: _Job, leg: int) -> None:
        assert job.seen is not None
        seen = job.seen[leg]
        seen.work.finished(job.work[leg], self._now, served=True)
        seen.breaker.end(job.calls[leg], self._now, failed=False)
        seen.judged()
        self._news[leg].add(seen.work.row)

    # ---- workers

    def _compute(self, worker: _Prefill) -> None:
        if worker.busy or not worker.waiting:
            return
        job, worker.busy = worker.waiting.popleft(), True
        cached = worker.cache.cached(job.request)
        self._cached_tokens += cached
        took_s = self._curves.prefill_s(job.request.prompt_tokens - cached, cached) * worker.slowdown
        self._at(self._now + took_s, lambda: self._computed(worker, job, took_s))

    def _computed(self, worker: _Prefill, job: _Job, took_s: float) -> None:
        worker.busy = False
        worker.cache.keep(job.request)
        self._served(job, 0)
        worker.load -= job.work[0]
        decode = job.decode
        assert decode is not None
        missing = job.request.prompt_tokens - decode.cache.cached(job.request)
        job.ready_s = self._now + self._curves.tail_s(missing, took_s)
        self._at(job.ready_s, lambda: self._start(decode, job))
        self._compute(worker)

    def _admit(self, worker: _Decode) -> None:
        while worker.waiting:
            job = worker.waiting[0]
            need = min(job.wanted.total_tokens, self._curves.pool_tokens)
            if worker.free < need:
                return
            worker.free -= need
            worker.waiting.popleft()
            job.admitted = True
            self._start(worker, job)

    def _start(self, worker: _Decode, job: _Job) -> None:
        """Its first step, once it is admitted and its KV is there."""
        if not job.admitted or job.ready_s is None or self._now < job.ready_s or job.ttft_s is not None:
            return
        self._advance(worker)
        worker.tokens += job.request.prompt_tokens
        heapq.heappush(worker.running, (worker.steps + job.request.answer_tokens, next(self._numbers), job))
        job.ttft_s = self._now + self._step_s(worker) - job.request.at_s
        self._plan(worker)

    def _step_s(self, worker: _Decode) -> float:
        return self._curves.decode_step_s(len(worker.running), worker.tokens) * worker.slowdown

    def _advance(self, worker: _Decode) -> None:
        if worker.running:
            steps = (self._now - worker.since_s) / self._step_s(worker)
            worker.steps += steps
            worker.tokens += steps * len(worker.running)
        worker.since_s = self._now

    def _plan(self, worker: _Decode) -> None:
        worker.version += 1
        version = worker.version
        if worker.running:
            left = max(0.0, worker.running[0][0] - worker.steps)
            self._at(self._now + left * self._step_s(worker), lambda: self._end(worker, version))

    def _end(self, worker: _Decode, version: int) -> None:
        if version != worker.version:
            return
        self._advance(worker)
        _, _, job = heapq.heappop(worker.running)
        worker.tokens -= job.request.prompt_tokens + job.request.answer_tokens
        worker.free += min(job.wanted.total_tokens, self._curves.pool_tokens)
        worker.cache.keep(job.request)
        self._served(job, 1)
        worker.requests -= 1
        worker.load -= job.work[1]
        self._unfinished -= 1
        self._plan(worker)
        self._admit(worker)
        self._serve()
