"""Output: a table while it runs, and the verdict, also as JSON."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pdlink.observe.plain import add_row, plain
from pdlink_bench.chaos.judge import ExchangeOutcome

if TYPE_CHECKING:
    from pdlink_bench.chaos.judge import ExchangeTally
    from pdlink_bench.chaos.ledger import HeldResources


@dataclass(slots=True)
class RunVerdict:
    command: str
    seed: int
    seconds: float
    """Length of the phase with faults."""
    machine: dict[str, Any] = field(default_factory=lambda: {"cores": os.cpu_count(), "load": os.getloadavg()})
    """Load average at the start; other load on the machine explains slow recoveries."""
    outcomes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    """Injected, by kind."""
    leaked_blocks: int = 0
    slowest_s: float = 0.0
    longest_silence_s: float = 0.0
    """Longest time without a right answer."""
    longest_served_silence_s: float = 0.0
    """The same without the outages: the proxy or every worker of one role was away."""
    outage_s: float = 0.0
    clean_rate: float = 0.0
    """Right answers per second before the first fault."""
    rate: float = 0.0
    """Right answers per second during the faults."""
    full_after_fault_s: float | None = None
    """From the last fault until answers came at full rate again; None if they did not."""
    full_after_ready_s: float | None = None
    """The same from the moment the last restarted process was ready."""
    ready_after_fault_s: float | None = None
    settled_s: float | None = None
    """From the last request's end until all was free; None if something leaked."""
    moved_mib: float = 0.0
    """KV sent by the workers alive at the end, since their start."""
    fallbacks: int = 0
    """Requests that these workers computed without another worker's KV."""
    held: dict[str, str] = field(default_factory=dict)
    """Resources still held, by worker."""
    resources: dict[str, str] = field(default_factory=dict)
    """Threads, descriptors and memory of every process, before and after."""
    problems: list[str] = field(default_factory=list)
    """Findings, in words; empty if all is well."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def take(self, tally: ExchangeTally, absences: list[tuple[float, float]]) -> None:
        """Fill in the clients' verdicts."""
        self.outcomes = {outcome.value: count for outcome, count in tally.counts.items()}
        self.errors = dict(sorted(tally.errors.items()))
        self.slowest_s = round(tally.slowest_s, 2)
        self.problems += tally.wrong
        wrong = tally.counts[ExchangeOutcome.WRONG] + tally.counts[ExchangeOutcome.UNSETTLED]
        if wrong > len(tally.wrong):
            self.problems.append(f"and {wrong - len(tally.wrong)} more wrong or unsettled requests")
        self.problems += [f"cut while the proxy was there: {cut}" for cut in tally.unexplained_cuts(absences)[:20]]
        if not tally.counts[ExchangeOutcome.RIGHT]:
            self.problems.append("no request was answered right")

    def json(self) -> dict[str, Any]:
        return {"verdict": "ok" if self.ok else "failed", **asdict(self)}


def live(
    title: str, states: dict[str, str], held: dict[str, HeldResources], tally: ExchangeTally, running: int, last: str
) -> Table:
    caption = plain(_counts(tally, running) + last)
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("process", "state", "blocks", "quarantined", "transfers", "sessions"):
        table.add_column(name, justify="left" if name in ("process", "state") else "right")
    for label, state in states.items():
        now = held.get(label)
        if now is None or now.unreadable:
            add_row(table, label, state)
        else:
            transfers = now.sender_transfers + now.receiver_transfers
            add_row(table, label, state, now.blocks, now.quarantined_blocks, transfers, now.live_peers)
    return table


def _counts(tally: ExchangeTally, running: int) -> str:
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in tally.counts.items() if count)
    return f"{running} running, {counts or 'none settled yet'}\n"


def line(at_s: float, states: dict[str, str], tally: ExchangeTally, running: int) -> str:
    """The same on one line, for output to a file or pipe."""
    away = [label for label, state in states.items() if state != "up"]
    return f"{at_s:6.1f} s  {_counts(tally, running).strip()}" + (f"; away: {', '.join(away)}" if away else "")


def final(verdict: RunVerdict) -> Table:
    table = Table(title=f"verdict: {'ok' if verdict.ok else 'FAILED'}   (seed {verdict.seed})", title_justify="left")
    table.add_column("what")
    table.add_column("value")
    outcomes = verdict.outcomes
    rows: list[tuple[str, str]] = [
        ("requests sent", str(sum(outcomes.values()))),
        ("answered right", str(outcomes.get("right", 0))),
        ("answered with an explicit error", _with(outcomes.get("explicit error", 0), verdict.errors)),
        ("connection cut, proxy away", str(outcomes.get("cut", 0))),
        ("client left", str(outcomes.get("client left", 0))),
        ("wrong (must be 0)", str(outcomes.get("wrong", 0))),
        ("unsettled at the deadline (must be 0)", str(outcomes.get("unsettled", 0))),
        ("leaked blocks (must be 0)", str(verdict.leaked_blocks)),
        ("longest silence", f"{verdict.longest_silence_s:.1f} s"),
        ("the same while every role had a worker", f"{verdict.longest_served_silence_s:.1f} s"),
        ("time in which some role had none", f"{verdict.outage_s:.1f} s"),
        ("slowest request", f"{verdict.slowest_s:.1f} s"),
        ("right answers per second", f"{verdict.clean_rate:.1f} before, {verdict.rate:.1f} under faults"),
        ("everything free again after", "never" if verdict.settled_s is None else f"{verdict.settled_s:.1f} s"),
    ]
    moved = f"{verdict.moved_mib:.0f} MiB, {verdict.fallbacks} recomputed, by the processes of the end"
    rows.append(("KV that crossed", moved))
    if verdict.faults:
        rows += [
            ("faults", _with(sum(verdict.faults.values()), verdict.faults)),
            ("last fault to all processes ready", _seconds(verdict.ready_after_fault_s)),
            ("last fault to full throughput", _seconds(verdict.full_after_fault_s)),
            ("ready to full throughput", _seconds(verdict.full_after_ready_s)),
        ]
    for row in rows:
        add_row(table, *row)
    for label, text in {**verdict.resources, **verdict.held}.items():
        add_row(table, label, text)
    for problem in verdict.problems:
        add_row(table, "PROBLEM", problem)
    return table


def _with(total: int, parts: dict[str, int]) -> str:
    return f"{total}  ({', '.join(f'{count} {name}' for name, count in parts.items())})" if parts else str(total)


def _seconds(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.1f} s"
