"""One run of `pdlink chaos`: right answers, clean load, faults under load, calm, settle, verdict.

The clean phase measures the baseline of throughput and resources. The calm phase continues the load after the last
fault, to measure the recovery. Then the load ends, and after every deadline of the deployment all must be free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from rich.console import Console
from rich.live import Live

from pdlink.observe.plain import plain
from pdlink_bench.chaos import ledger, report
from pdlink_bench.chaos.faults import LocalDeployment
from pdlink_bench.chaos.load import ChaosLoad, NoAnswers, all_answers, invalid
from pdlink_bench.chaos.schedule import LOAD, Fault, Kind, schedule

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from pdlink.config import WorkerConfig
    from pdlink_bench.chaos.tamper import LinkFaults

_ANSWER_S = 60.0
_LOOK_S = 0.5
_THREAD_SLACK = 4
"""Additional threads that are no leak: asyncio's pool for blocking calls, UCX's on demand."""
_FD_SLACK = 6
"""The same for descriptors."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    command: str
    seed: int
    seconds: float
    every_s: float
    concurrency: int
    clean_s: float
    calm_s: float
    rate: float | None = None
    kinds: Sequence[Kind] = tuple(Kind)
    quiet: bool = False


async def run_local(
    plan: RunSettings,
    prefill: WorkerConfig,
    decode: WorkerConfig,
    num_prefill: int,
    num_decode: int,
    faults: LinkFaults,
) -> report.RunVerdict:
    """Start a deployment, inject faults, judge it, end it. Raises ChildFailed, NoAnswers before the first fault."""
    before = ledger.segments()
    local = LocalDeployment(prefill, decode, num_prefill, num_decode, faults)
    try:
        await local.open()
        async with _session() as session:
            cases = await all_answers(
                session, local.url_of(local.workers[-1]), plan.seed, decode.model.name, _ANSWER_S
            )
            load = ChaosLoad(
                session,
                local.url,
                cases,
                invalid(decode.model.name),
                seed=plan.seed,
                deadline_s=local.deadline_s,
                rate=plan.rate,
            )
            run = _Run(plan, session, load, lambda: {label: local.url_of(label) for label in local.workers}, local)
            verdict = await run.through()
    finally:
        await local.close()
    verdict.problems += local.findings
    verdict.problems += [f"shared memory left behind: {name}" for name in sorted(await ledger.left_behind(before))]
    return verdict


async def run_remote(plan: RunSettings, url: str, deadline_s: float) -> report.RunVerdict:
    """The same against a running deployment, with clients' faults only. Raises NoAnswers."""
    async with _session() as session:
        try:
            async with asyncio.timeout(_ANSWER_S), session.get(f"{url}/health") as answer:
                body = await answer.json()
            workers = {entry["health"]["name"]: entry for side in ("prefill", "decode") for entry in body[side]}
            model = next(iter(workers.values()))["health"]["model"]
        except (TimeoutError, aiohttp.ClientError, OSError, KeyError, TypeError, ValueError, StopIteration) as error:
            raise NoAnswers(f"{url}/health does not describe a pdlink proxy with its workers: {error!r}") from None
        cases = await all_answers(session, url, plan.seed, model, _ANSWER_S)
        load = ChaosLoad(session, url, cases, invalid(model), seed=plan.seed, deadline_s=deadline_s, rate=plan.rate)
        return await _Run(
            plan, session, load, lambda: {name: entry["url"] for name, entry in workers.items()}, None
        ).through()


@contextlib.asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    """One connection for each request, so that a cut is never just a closed idle connection."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


class _Run:
    """The phases, and their results."""

    def __init__(
        self,
        plan: RunSettings,
        session: aiohttp.ClientSession,
        load: ChaosLoad,
        workers: Callable[[], dict[str, str]],
        local: LocalDeployment | None,
    ) -> None:
        """workers: label to base URL. local: the deployment for faults; None for another's workers."""
        self._plan, self._session, self._load = plan, session, load
        self._workers, self._local = workers, local
        self._verdict = report.RunVerdict(plan.command, plan.seed, plan.seconds)
        self._console = Console(stderr=True)
        self._last = ""
        self._started_s = time.monotonic()

    async def through(self) -> report.RunVerdict:
        plan, load, verdict, local = self._plan, self._load, self._verdict, self._local
        looking = asyncio.create_task(self._look())
        try:
            load.start(plan.concurrency)
            clean_s = await self._phase("clean load", asyncio.sleep(plan.clean_s))
            verdict.clean_rate = _rate(load.tally.right_s, clean_s, time.monotonic())
            if local is not None:
                local.remember()
            faults_s = await self._phase("faults", self._faults())
            over_s = time.monotonic()
            if local is not None:
                await self._phase("the last ones come back", local.settled())
            await self._phase("calm", asyncio.sleep(plan.calm_s))
            await self._phase("last answers", load.stop())
            end_s = time.monotonic()
        finally:
            await load.abandon()
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
        verdict.rate = _rate(load.tally.right_s, faults_s, over_s)
        outages = local.outages if local else []
        verdict.longest_silence_s = round(load.tally.longest_silence_s(clean_s, end_s), 2)
        verdict.longest_served_silence_s = round(load.tally.longest_silence_s(clean_s, end_s, outages), 2)
        verdict.outage_s = round(sum(end - begin for begin, end in outages), 2)
        verdict.take(load.tally, local.absences if local else [])
        if local is not None:
            self._judge_recovery(local, end_s)
        await self._settle(end_s)
        if local is not None:
            self._judge_resources(local)
        return verdict

    async def _phase(self, name: str, work: Awaitable[object]) -> float:
        self._last = name
        began_s = time.monotonic()
        await work
        return began_s

    async def _faults(self) -> None:
        """The schedule, from now on."""
        plan, local = self._plan, self._local
        targets = local.workers if local else ["-"]
        kinds = plan.kinds if local else [Kind.BURST, Kind.FULL]
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as bursts:
            for fault in schedule(plan.seed, plan.seconds, plan.every_s, targets, kinds):
                await asyncio.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
                self._last = f"faults: {fault}"
                if fault.target == LOAD:
                    bursts.create_task(self._burst(fault))
                elif local is not None and not local.begin(fault):
                    self._last += " (skipped: it is away)"
                if not self._console.is_terminal and not plan.quiet:
                    self._console.print(plain(f"        {self._last}"))
            await asyncio.sleep(max(0.0, began_s + plan.seconds - time.monotonic()))

    async def _burst(self, fault: Fault) -> None:
        done = self._local.done if self._local else self._verdict.faults
        done[fault.kind.value] = done.get(fault.kind.value, 0) + 1
        await (self._load.fill if fault.kind is Kind.FULL else self._load.burst)(fault.count)

    async def _look(self) -> None:
        if self._plan.quiet:
            return
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(10.0)
                at_s = time.monotonic() - self._started_s
                text = report.line(at_s, self._states(), self._load.tally, self._load.running)
                self._console.print(plain(text))
        with Live(console=self._console, auto_refresh=False, transient=True) as live:  # the verdict stands alone
            while True:
                table = report.live(
                    f"pdlink chaos, {time.monotonic() - self._started_s:.0f} s",
                    self._states(),
                    await self._read(),
                    self._load.tally,
                    self._load.running,
                    self._last,
                )
                live.update(table, refresh=True)
                await asyncio.sleep(_LOOK_S)

    def _states(self) -> dict[str, str]:
        return self._local.states() if self._local else dict.fromkeys(self._workers(), "up")

    async def _read(self) -> dict[str, ledger.HeldResources]:
        states = self._states()
        urls = {label: url for label, url in self._workers().items() if states.get(label) == "up"}
        held = await asyncio.gather(*(ledger.read(self._session, url) for url in urls.values()))
        return dict(zip(urls, held, strict=True))

    async def _settle(self, from_s: float) -> None:
        """Wait until all is free, for the longest deadline at most; the rest has leaked."""
        limit_s = self._local.deadline_s if self._local else _ANSWER_S
        while True:
            held = await self._read()
            if all(worker.idle for worker in held.values()) and len(held) == len(self._workers()):
                self._verdict.settled_s = round(time.monotonic() - from_s, 2)
                self._note_moved(held)
                return
            if time.monotonic() - from_s > limit_s:
                break
            await asyncio.sleep(_LOOK_S)
        self._note_moved(held)
        for label in self._workers():
            worker = held.get(label, ledger.HeldResources(unreadable="is not there"))
            if not worker.idle:
                self._verdict.leaked_blocks += worker.leaked
                self._verdict.held[label] = str(worker)
                self._verdict.problems.append(f"{label} holds after {limit_s:.0f} s without requests: {worker}")

    def _note_moved(self, held: dict[str, ledger.HeldResources]) -> None:
        """A run in which no KV crossed proves nothing about the link."""
        nbytes = sum(worker.moved_nbytes for worker in held.values())
        self._verdict.moved_mib = round(nbytes / 2**20, 1)
        self._verdict.fallbacks = sum(worker.fallbacks for worker in held.values())
        if nbytes == 0:
            self._verdict.problems.append("no KV crossed between the workers")

    def _judge_recovery(self, local: LocalDeployment, end_s: float) -> None:
        verdict, tally = self._verdict, self._load.tally
        verdict.faults = dict(sorted(local.done.items()))
        if not local.last_fault_s:
            return
        verdict.full_after_fault_s = tally.full_again_s(local.last_fault_s, end_s, verdict.clean_rate)
        ready_s = max(local.last_ready_s, local.last_fault_s)
        verdict.ready_after_fault_s = round(ready_s - local.last_fault_s, 2)
        verdict.full_after_ready_s = tally.full_again_s(ready_s, end_s, verdict.clean_rate)
        if not any(right_s > ready_s for right_s in tally.right_s):
            verdict.problems.append("no right answer after the last fault")

    def _judge_resources(self, local: LocalDeployment) -> None:
        """Compare every process with its role's baseline: restarted ones have another pid."""
        grown = local.growth()
        for label, role, own, now in grown:
            same = [before for _, other, before, _ in grown if other == role]
            threads, fds = max(p.threads for p in same), max(p.num_fds for p in same)
            self._verdict.resources[label] = (
                f"{own.threads} -> {now.threads} threads, {own.num_fds} -> {now.num_fds} descriptors, "
                f"{own.rss_mib} -> {now.rss_mib} MiB"
            )
            if now.threads > threads + _THREAD_SLACK:
                self._verdict.problems.append(f"{label} has {now.threads} threads, its role had at most {threads}")
            if now.num_fds > fds + _FD_SLACK:
                more = {kind: count for kind, count in now.fds.items() if count > own.fds.get(kind, 0)}
                self._verdict.problems.append(
                    f"{label} has {now.num_fds} descriptors, its role {fds}; more of {more}"
                )


def _rate(moments: Sequence[float], from_s: float, to_s: float) -> float:
    return round(sum(from_s <= moment < to_s for moment in moments) / max(to_s - from_s, 1e-9), 2)
