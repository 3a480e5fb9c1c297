"""The workers of a fleet in virtual time: every pass and decode step of them, at a few events a request. Pure.

Prefill workers compute prompts in order of arrival, in passes of at most `max_batched_tokens` tokens: passes that
one prompt fills alone are one event. All sequences of a decode worker advance in step, and the steps between two
changes of its batch have a sum in closed form: a change costs one event, and newcomers join where a step ends. A
decode worker gives blocks and slots in order of arrival, for prompt and answer at once.

Who goes where is not decided here (`fleet.py`). Not modelled: memory of prefill workers, priorities.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .curves import Curves
    from .traffic import Seconds, Tokens

_WORKER, _KV = 0, 1
"""What is next: at one time workers come before KV that lands."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """What became of each request, in order of arrival, and of the workers."""

    ttft_s: Seconds
    per_token_s: Seconds
    """From the first token to the last, divided by the tokens after the first; not a number for answers of one."""
    prefill_busy: float
    """Mean share of the time."""
    decode_busy: float
    batch: float
    """Mean number of sequences in a decode step."""
    span_s: float
    """From the first arrival to the last token."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request."""

    number: int
    prompt: int
    answer: int
    new: int = 0
    """Tokens that prefill computes."""
    left: int = 0
    """Of those, not yet."""
    moved: int = 0
    """Tokens whose KV goes to decode."""
    prefill: Any = None
    decode: Any = None
    admitted: bool = False
    """Decode has its blocks."""
    began_s: float = math.nan
    """Of its first pass, then of its first decode step."""
    prefilled_s: float = math.nan
    done_s: float = math.nan


class Prefill:
    """One prefill worker."""

    __slots__ = ("busy", "busy_s", "ending", "line", "link_s", "load", "requests", "slow")

    def __init__(self) -> None:
        self.line: deque[SimulatedRequest] = deque()
        self.busy = False
        self.ending = 0
        """Prompts that the running pass completes."""
        self.load = self.requests = 0
        self.link_s = self.busy_s = 0.0
        """link_s: when its link is free."""
        self.slow = 1.0
        """Times the curves."""


class Decode:
    """One decode worker."""

    __slots__ = (
        *("busy_s", "clock_s", "held", "line", "load", "requests", "running"),
        *("sequence_s", "slots", "slow", "steps", "tokens", "version"),
    )

    def __init__(self) -> None:
        self.line: deque[SimulatedRequest] = deque()
        """Requests that wait for blocks or a slot."""
        self.load = self.requests = self.held = self.slots = 0
        """load: tokens of prompts and answers. held: of requests with blocks, which take so many slots."""
        self.running: list[tuple[int, int, SimulatedRequest]] = []
        """A heap, by the step after which a sequence ends."""
        self.tokens = 0
        """Of KV that a step reads."""
        self.clock_s = 0.0
        """End of the last step that counts in `steps` and `tokens`."""
        self.steps = 0
        self.busy_s = self.sequence_s = 0.0
        """sequence_s: seconds of all its sequences."""
        self.slow = 1.0
        self.version = 0
        """Of what the agenda says of it."""


class SimulatedWorkers:
    """A fleet that somebody else places requests in, one at a time."""

    def __init__(self, curves: Curves, num_prefill: int, num_decode: int, prompt: Tokens, answer: Tokens) -> None:
        """prompt, answer: tokens of each job."""
        self._curves = curves
        self.prefills = [Prefill() for _ in range(num_prefill)]
        self.decodes = [Decode() for _ in range(num_decode)]
        sizes = zip(prompt.tolist(), answer.tolist(), strict=True)
        self.jobs = [SimulatedRequest(number, tokens, made) for number, (tokens, made) in enumerate(sizes)]
        self._agenda: list[tuple[float, int, int, Any, int]] = []
        self._numbers = itertools.count()
        self._ended: list[tuple[float, SimulatedRequest, int]] = []

    def enter(self, number: int, prefill: int, decode: int, new: int, moved: int, now_s: float) -> None:
        """The job goes to these workers. new: tokens that prefill computes; moved: whose KV decode lacks. `advance`
        must have been to this time."""
        job, one, to = self.jobs[number], self.prefills[prefill], self.decodes[decode]
        job.new = job.left = new
        job.moved, job.prefill, job.decode = moved, one, to
        to.load += job.prompt + job.answer
        to.requests += 1
        to.line.append(job)
        if len(to.line) == 1:
            self._admit(to, now_s)
        one.load += new
        one.requests += 1
        one.line.append(job)
        if not one.busy:
            self._begin(one, now_s)

    def advance(self, until_s: float, *, first: bool) -> list[tuple[float, SimulatedRequest, int]]:
        """To this time, inclusive; only to the first end of a leg if `first`. Returns the legs that have ended, in
        their order: when, job, leg (0 prefill, 1 decode)."""
        ended: list[tuple[float, SimulatedRequest, int]] = []
        self._ended = ended
        agenda = self._agenda
        while agenda and agenda[0][0] <= until_s:
            at_s, _, _, what, version = heapq.heappop(agenda)
            if type(what) is Prefill:
                for _ in range(what.ending):
                    self._prefilled(what, at_s)
                self._begin(what, at_s)
            elif type(what) is Decode:
                if version == what.version:
                    self._complete(what, at_s)
            else:
                self._landed(what, at_s)
            if first and ended:
                break
        return ended

    def outcome(self, at_s: Seconds) -> Played:
        """Once all requests have ended. at_s: when each came."""
        curves, jobs = self._curves, self.jobs
        answer = np.array([job.answer for job in jobs])
        began_s, first_s, done_s = (
            np.array([getattr(job, name) for job in jobs]) for name in ("began_s", "prefilled_s", "done_s")
        )
        span_s = float(max(done_s.max(), first_s.max()) - at_s[0])
        if curves.grace_s:  # an answer of one token is of prefill alone
            held_s = np.minimum(first_s + curves.grace_s, np.maximum(first_s, began_s))
            first_s = np.where(answer > 1, held_s, first_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            per_token_s = np.where(answer > 1, (done_s - first_s) / (answer - 1), np.nan)
        decode_s = sum(each.busy_s for each in self.decodes)
        return Played(
            first_s + curves.overhead_s - at_s,
            per_token_s,
            sum(each.busy_s for each in self.prefills) / len(self.prefills) / span_s,
            decode_s / len(self.decodes) / span_s,
            sum(each.sequence_s for each in self.decodes) / decode_s if decode_s else 0.0,
            span_s,
        )

    def _next(self, at_s: float, kind: int, what: Any, version: int = 0) -> None:
        heapq.heappush(self._agenda, (at_s, kind, next(self._numbers), what, version))

    # ---- prefill

    def _begin(self, one: Prefill, now_s: float) -> None:
        """Its next pass; or the passes that its first prompt fills alone, but for the last."""
        one.busy, one.ending = bool(one.line), 0
        if not one.line:
            return
        curves, job = self._curves, one.line[0]
        budget, took_s = curves.max_batched_tokens, curves.prompt_s
        if job.left > budget:
            passes = (job.left - 1) // budget
            took_s = took_s * passes + self._take(job, passes * budget, now_s)
        else:
            for job in one.line:
                if not budget:
                    break
                tokens = min(job.left, budget)
                took_s += self._take(job, tokens, now_s)
                budget -= tokens
                one.ending += not job.left
        took_s *= one.slow
        one.busy_s += took_s
        self._next(now_s + took_s, _WORKER, one)

    def _take(self, job: SimulatedRequest, tokens: int, now_s: float) -> float:
        """Seconds for so many tokens of its prompt, which count as computed."""
        before = job.prompt - job.left
        job.left -= tokens
        if job.began_s != job.began_s:  # not a number
            job.began_s = now_s
        return self._curves.token_s * tokens + self._curves.attention_s * tokens * (before + tokens / 2)

    def _prefilled(self, one: Prefill, now_s: float) -> None:
        """The first prompt of its line is computed: its KV leaves, or waits until decode has blocks."""
        job = one.line.popleft()
        one.load -= job.new
        one.requests -= 1
        job.prefilled_s = now_s
        if job.admitted:
            self._send(job, now_s)
        self._ended.append((now_s, job, 0))

    def _send(self, job: SimulatedRequest, now_s: float) -> None:
        """It is computed, and decode has its blocks. Layers may have left while later ones were computed; the link
        sends one prompt's KV after the other's."""
        one, layers = job.prefill, self._curves.num_layers
        whole_s, begin_s = self._curves.transfer_s * job.moved, now_s
        if job.prefilled_s == now_s:
            begin_s = job.began_s + (now_s - job.began_s) / layers
        one.link_s = max(now_s + whole_s / layers, max(one.link_s, begin_s) + whole_s)
        self._next(one.link_s + self._curves.handoff_s, _KV, job)

    # ---- decode

    def _landed(self, job: SimulatedRequest, now_s: float) -> None:
        """Its KV is there. The first token is prefill's."""
        if job.answer == 1:
            job.done_s = job.prefilled_s
            self._leave(job, now_s)
            return
        to = job.decode
        self._to_step(to, now_s)
        job.began_s = max(now_s, to.clock_s)
        to.tokens += job.prompt + 1
        heapq.heappush(to.running, (to.steps + job.answer - 1, job.number, job))
        self._plan(to)

    def _plan(self, to: Decode) -> None:
        """When its next sequence ends."""
        to.version += 1
        if to.running:
            end_s = to.clock_s + self._steps_s(to, to.running[0][0] - to.steps)
            self._next(end_s, _WORKER, to, to.version)

    def _steps_s(self, to: Decode, num: int) -> float:
        """Its next steps, without a change of its batch."""
        curves, running = self._curves, len(to.running)
        first_s = curves.step_s + curves.sequence_s * running + curves.context_s * to.tokens
        return (num * first_s + curves.context_s * running * num * (num - 1) / 2) * to.slow

    @staticmethod
    def _step(to: Decode, num: int, took_s: float) -> None:
        to.clock_s += took_s
        to.steps += num
        to.tokens += num * len(to.running)
        to.busy_s += took_s
        to.sequence_s += took_s * len(to.running)

    def _to_step(self, to: Decode, now_s: float) -> None:
        """To the end of the step that runs now."""
        left_s = now_s - to.clock_s
        if left_s <= 0:
            return
        if not to.running:
            to.clock_s = now_s
            return
        half_s = self._curves.context_s * len(to.running) / 2 * to.slow
        slope_s = self._steps_s(to, 1) - half_s
        root = 2 * left_s / (slope_s + math.sqrt(slope_s * slope_s + 4 * half_s * left_s))
        num = min(math.ceil(root - 1e-9), to.running[0][0] - to.steps)
        self._step(to, num, self._steps_s(to, num))

    def _complete(self, to: Decode, now_s: float) -> None:
        """The step ends after which sequences leave."""
        self._step(to, to.running[0][0] - to.steps, now_s - to.clock_s)
        to.clock_s = now_s
        while to.running and to.running[0][0] == to.steps:
            job = heapq.heappop(to.running)[2]
            job.done_s = now_s
            to.tokens -= job.prompt + job.answer
            self._leave(job, now_s)
        self._plan(to)

    def _leave(self, job: SimulatedRequest, now_s: float) -> None:
        """It gives its blocks and its slot back."""
        to = job.decode
        to.held -= min(job.prompt + job.answer, self._curves.pool_tokens)
        to.load -= job.prompt + job.answer
        to.requests -= 1
        to.slots -= 1
        self._ended.append((now_s, job, 1))
        if to.line:
            self._admit(to, now_s)

    def _admit(self, to: Decode, now_s: float) -> None:
        """Blocks and slots to the first of its line, in order of arrival. KV that is computed leaves for them."""
        curves = self._curves
        while to.line and to.slots < curves.max_running:
            job = to.line[0]
            need = min(job.prompt + job.answer, curves.pool_tokens)
            if to.held + need > curves.pool_tokens:
                return
            to.line.popleft()
            to.held += need
            to.slots += 1
            job.admitted = True
            if job.prefilled_s == job.prefilled_s:  # a number: computed
                self._send(job, now_s)
