"""One prefill and one decode worker, pass by pass and step by step: slow, and what `Workers` is compared with."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdlink.plan.curves import Curves


@dataclass(eq=False)
class Job:
    at_s: float
    prompt: int
    answer: int
    cached: int
    done: int = 0
    began_s: float | None = None
    prefilled_s: float = -1.0
    last_s: float = -1.0
    made: int = 1
    admitted: bool = False

    @property
    def need(self) -> int:
        return self.prompt + self.answer


@dataclass
class Pair:
    curves: Curves
    line: deque[Job] = field(default_factory=deque)
    """At the proxy."""
    queue: deque[Job] = field(default_factory=deque)
    """At prefill."""
    without_slot: deque[Job] = field(default_factory=deque)
    """At decode, in order of arrival."""
    ready: list[tuple[float, Job]] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    room: int = 0
    slots: int = 0
    link_s: float = 0.0
    now: float = 0.0
    pass_end: float | None = None
    in_pass: list[tuple[Job, int]] = field(default_factory=list)

    def play(self, jobs: list[Job]) -> None:
        self.room = self.curves.pool_tokens
        arrivals = deque(jobs)
        step_end: float | None = None
        in_step: list[Job] = []
        while arrivals or self.line or self.queue or self.without_slot or self.ready or self.running:
            times = [self.pass_end, step_end, arrivals[0].at_s if arrivals else None, *(at for at, _ in self.ready)]
            self.now = min(at for at in times if at is not None)
            if step_end is not None and step_end <= self.now:
                for job in in_step:
                    job.made += 1
                    if job.made == job.answer:
                        job.last_s = self.now
                        self.running.remove(job)
                        self.leave(job)
                step_end = None
            if self.pass_end is not None and self.pass_end <= self.now:
                for job, tokens in self.in_pass:
                    job.done += tokens
                    if job.done == job.prompt:
                        job.prefilled_s = self.now
                        self.queue.remove(job)
                        if job.admitted:
                            self.send(job)
                self.pass_end = None
                self.begin()
            for at, job in [each for each in self.ready if each[0] <= self.now]:
                self.ready.remove((at, job))
                if job.answer == 1:
                    job.last_s = job.prefilled_s
                    self.leave(job)
                else:
                    self.running.append(job)
            while arrivals and arrivals[0].at_s <= self.now:
                self.line.append(arrivals.popleft())
            while self.line and self.room >= self.line[0].need:
                job = self.line.popleft()
                self.room -= job.need
                job.done = job.cached
                self.without_slot.append(job)
                self.admit()
                self.queue.append(job)
                self.begin()
            if step_end is None and self.running:
                in_step = [*self.running]
                context = sum(job.prompt + job.made for job in in_step)
                step_end = self.now + self.curves.decode_step_s(len(in_step), context)

    def begin(self) -> None:
        """A pass over the prompts that are there now, if none runs."""
        if self.pass_end is not None or not self.queue:
            return
        budget, took_s = self.curves.max_batched_tokens, self.curves.prompt_s
        self.in_pass = []
        for job in self.queue:
            tokens = min(job.prompt - job.done, budget)
            if tokens:
                self.in_pass.append((job, tokens))
                took_s += self.curves.prefill_s(tokens, job.done) - self.curves.prompt_s
                budget -= tokens
                job.began_s = self.now if job.began_s is None else job.began_s
        self.pass_end = self.now + took_s

    def send(self, job: Job) -> None:
        whole_s = self.curves.transfer_s * job.prompt
        begin_s = self.now
        if job.prefilled_s == self.now and job.began_s is not None:
            begin_s = job.began_s + (self.now - job.began_s) / self.curves.num_layers
        self.link_s = max(self.now + whole_s / self.curves.num_layers, max(self.link_s, begin_s) + whole_s)
        self.ready.append((self.link_s + self.curves.handoff_s, job))

    def leave(self, job: Job) -> None:
        self.room += job.need
        self.slots -= 1
        self.admit()

    def admit(self) -> None:
        while self.without_slot and self.slots < self.curves.max_running:
            job = self.without_slot.popleft()
            self.slots += 1
            job.admitted = True
            if job.prefilled_s >= 0:
                self.send(job)
