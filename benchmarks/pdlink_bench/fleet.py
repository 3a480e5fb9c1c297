"""A fleet in virtual time behind the proxy's real placement and queue: what a policy does to the time to first token.

Prefill workers compute one prompt after the other; decode workers advance all their sequences together. Their speeds
are a curve each (`Curves`), their prefix caches forget the least recently used. No HTTP, no failures.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError
from pdlink_proxy.fleet import Fleet, PlacementRequest, WorkerState, compare
from pdlink_proxy.placement import Placed, Placer
from pdlink_proxy.queue import Queue, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

KEY_TOKENS = 512
"""Tokens of one `hash_ids` entry of a Mooncake trace."""
REPORT_S = 0.5
"""Between two reports of a worker, as `ProxyConfig.health_interval_s`."""


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
class Request:
    at_s: float
    prompt_tokens: int
    answer_tokens: int
    keys: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    wanted: PlacementRequest
    prefill: _Prefill | None = None
    decode: _Decode | None = None
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
    state: WorkerState
    slowdown: float
    cache: _Cache
    waiting: deque[_Job] = field(default_factory=deque)
    busy: bool = False


@dataclass(slots=True, eq=False)
class _Decode:
    state: WorkerState
    slowdown: float
    cache: _Cache
    free: int
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
    """Time of one decision, with hashing left out: the trace has keys."""


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
    ) -> None:
        """slow: share of the workers of each leg that take twice as long."""
        self._curves = curves = curves or Curves()
        self._placer, self._queue = Placer(*policies), Queue(1_000_000)
        pool = curves.pool_tokens
        self._prefill: dict[WorkerState, _Prefill] = {}
        self._decode: dict[WorkerState, _Decode] = {}
        for i in range(num_prefill):
            state, slowdown = WorkerState(f"p{i}#", pool_tokens=pool), 2.0 if i < slow * num_prefill else 1.0
            self._prefill[state] = _Prefill(state, slowdown, _Cache(pool))
        for i in range(num_decode):
            state, slowdown = WorkerState(f"d{i}#", pool_tokens=pool), 2.0 if i < slow * num_decode else 1.0
            self._decode[state] = _Decode(state, slowdown, _Cache(pool), pool)
        self._fleet = Fleet(list(self._prefill), list(self._decode))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._unfinished = 0
        self._place_s, self._cached_tokens = 0.0, 0

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Every request to its end."""
        jobs = [_Job(each, self._wanted(each)) for each in requests]
        self._unfinished = len(jobs)
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
        return Outcome(ttft_s, self._cached_tokens / prompt_tokens, self._place_s / len(jobs) * 1e6)

    def _wanted(self, request: Request) -> PlacementRequest:
        return PlacementRequest(
            "m", request.prompt_tokens, request.answer_tokens, key_tokens=KEY_TOKENS, chain=request.keys
        )

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    def _report(self) -> None:
        for worker in self._decode.values():
            worker.state.heard(worker.state.requests, worker.free)
        compare(self._fleet.prefill)
        compare(self._fleet.decode)
        self._serve()
        if self._unfinished:
            self._at(self._now + REPORT_S, self._report)

    # ---- the router

    def _arrive(self, job: _Job) -> None:
        if len(self._queue) or not self._place(job):
            self._queue.put(Waiting("", "m", job.wanted.total_tokens, self._now, job))
            self._serve()

    def _serve(self) -> None:
        while self._queue.serve(lambda waiting: self._place(waiting.item), self._now):
            pass

    def _place(self, job: _Job) -> bool:
        started_s = perf_counter()
        placed = self._placer.place(job.wanted, self._fleet)
        if isinstance(placed, Placed) and placed.prefill is not None:
            self._placer.sent(job.wanted, "prefill", placed.prefill)
            self._placer.sent(job.wanted, "decode", placed.decode)
        self._place_s += perf_counter() - started_s
        if not isinstance(placed, Placed) or placed.prefill is None:
            return False
        job.prefill, job.decode = self._prefill[placed.prefill], self._decode[placed.decode]
        job.work = (max(1, job.wanted.num_tokens - placed.cached_tokens), job.wanted.total_tokens)
        placed.prefill.sent(job.work[0], self._now)
        placed.decode.sent(job.work[1], self._now)
        job.prefill.waiting.append(job)
        job.decode.waiting.append(job)
        self._compute(job.prefill)
        self._admit(job.decode)
        return True

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
        worker.state.finished(job.work[0], self._now, served=True)
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
        worker.state.finished(job.work[1], self._now, served=True)
        self._unfinished -= 1
        self._plan(worker)
        self._admit(worker)
        self._serve()


# ---- requests


def read_trace(path: Path, limit: int) -> list[Request]:
    """The first requests of a Mooncake trace (JSON lines). Raises ConfigError."""
    found = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, limit):
                row = json.loads(line)
                keys = tuple(int(key) for key in row["hash_ids"])
                at_s = row["timestamp"] / 1000
                found.append(Request(at_s, int(row["input_length"]), max(1, int(row["output_length"])), keys))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"trace: cannot read {path}: {error!r}; give a file of Mooncake's FAST25 traces") from None
    return found


def conversations(num: int, seed: int) -> list[Request]:
    """Synthetic: chats of several turns, each with all that was said before, some with a long beginning in common."""
    rng = random.Random(seed)
    keys = itertools.count(1)
    systems = [[next(keys) for _ in range(rng.choice((1, 2, 8)))] for _ in range(20)]
    found: list[Request] = []
    while len(found) < num:
        said, at_s = list(rng.choice(systems)), rng.random() * num
        for _ in range(1 + int(rng.expovariate(0.3))):
            said += [next(keys) for _ in range(1 + int(rng.lognormvariate(1.2, 1.2)))]
            tokens = len(said) * KEY_TOKENS - rng.randrange(KEY_TOKENS)
            found.append(Request(at_s, tokens, 1 + int(rng.expovariate(1 / 300)), tuple(said)))
            at_s += num * 0.02 * rng.random()
    return sorted(found[:num], key=lambda each: each.at_s)


def at_load(requests: Sequence[Request], load: float, num_prefill: int, curves: Curves) -> list[Request]:
    """The same requests, so fast that prefill without any cache would be busy for this share of the time."""
    work_s = sum(curves.prefill_s(each.prompt_tokens, 0) for each in requests)
    first_s = requests[0].at_s
    span_s = requests[-1].at_s - first_s or 1.0
    scale = work_s / load / num_prefill / span_s
    return [
        Request((each.at_s - first_s) * scale, each.prompt_tokens, each.answer_tokens, each.keys) for each in requests
    ]
