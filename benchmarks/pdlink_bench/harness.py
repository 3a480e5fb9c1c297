"""What every benchmark does around its measuring: options, turns, tables, markdown, JSON and a picture."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from pdlink.errors import ConfigError
from pdlink.memory.available import available_nbytes

from . import plot
from .measure import Facts, Measured, machine_facts, machine_line, summarise
from .workers import WorkerFailed, WorkerProcess

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pdlink.transport.base import Probe

SETUP_TIMEOUT_S = 120.0
"""For starting a process, filling its pool and compiling: minutes on a loaded machine."""
WIDTH_NOT_A_TTY = 140

Thing = TypeVar("Thing")


@dataclass(slots=True)
class TextTable:
    """Rows of rich's markup. A line break in a title or a cell saves width on a terminal."""

    columns: Sequence[str]
    title: str = ""
    rows: list[tuple[str, ...]] = field(default_factory=list)
    """An empty one is a line across."""
    num_left: int = 1
    """Columns of words, which begin on the left."""

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def for_terminal(self) -> rich_table.Table:
        made = rich_table.Table(title=self.title or None, title_justify="left")
        for index, column in enumerate(self.columns):
            made.add_column(column, justify="left" if index < self.num_left else "right")
        for row in self.rows:
            if row:
                made.add_row(*row)
            else:
                made.add_section()
        return made

    def as_markdown(self) -> str:
        heads = " | ".join(" ".join(column.split()) for column in self.columns)
        lines = [f"| {heads} |", "|---" * len(self.columns) + "|"]
        for row in filter(None, self.rows):
            cells = [Text.from_markup(cell).plain.replace("\n(", " (").replace("\n", ", ") for cell in row]
            lines.append(f"| {' | '.join(cells + [''] * (len(self.columns) - len(cells)))} |")
        return "\n".join([*([self.title, ""] if self.title else []), *lines])


@dataclass(slots=True)
class BenchReport:
    kept: Mapping[str, Any]
    """For the JSON: dataclasses and `Measured` at any depth."""
    shown: list[str | TextTable] = field(default_factory=list)
    panels: Sequence[plot.Bars] = ()
    notes: str = ""
    """Below the picture: what a reader must know of the workload."""
    problems: Mapping[str, Measured] = field(default_factory=dict)
    """By name; those without a problem are passed over."""
    ok: bool = True
    """Whether everything did what it must; a contestant that failed counts besides."""


def add_output_arguments(parser: argparse.ArgumentParser, *, draws: bool = False) -> None:
    """The outputs that every benchmark has. draws: its reports have panels."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the machine's facts here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    parser.set_defaults(plot=None)
    if draws:
        text = "draw the figures (.png; needs matplotlib)"
        parser.add_argument("--plot", type=Path, metavar="FILE", help=text)


def run(name: str, args: argparse.Namespace, measure: Callable[[argparse.Namespace, Progress], BenchReport]) -> int:
    """Measure, print, write what was asked for. 1 if something failed, 2 for options that cannot be."""
    errors = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    try:
        plot.check_can_plot(args.plot)
        machine = machine_facts()
        with progress:
            report = measure(args, progress)
    except ConfigError as error:
        errors.print(f"[red]{escape(str(error))}[/]", highlight=False)
        return 2
    problems = {who: measured for who, measured in report.problems.items() if measured.problem}
    _show(report, problems, machine)
    if args.json:
        head = {"benchmark": name, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine}
        args.json.write_text(json.dumps({**head, **report.kept}, indent=1, default=_plain) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(_markdown(report, problems, machine), encoding="utf-8")
    if args.plot:
        notes = f"{machine_line(machine)}\n{report.notes}".strip().replace(", huge pages", ",\nhuge pages")
        plot.write(args.plot, report.panels, f"pdlink bench {name}", notes)
    return 0 if report.ok and not any(measured.failed for measured in problems.values()) else 1


def _show(report: BenchReport, problems: Mapping[str, Measured], machine: Facts) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_NOT_A_TTY)
    console.print(machine_line(machine), highlight=False)
    for part in report.shown:
        if isinstance(part, str):
            console.print(part, highlight=False)
        elif part.rows:
            console.print(part.for_terminal())
    for who, measured in problems.items():
        console.print(f"[{'red' if measured.failed else 'yellow'}]{who}: {escape(measured.problem)}[/]")


def _markdown(report: BenchReport, problems: Mapping[str, Measured], machine: Facts) -> str:
    tables = [part for part in report.shown if isinstance(part, str) or part.rows]
    parts = [Text.from_markup(part).plain if isinstance(part, str) else part.as_markdown() for part in tables]
    reasons = [f"{who}: {measured.problem}" for who, measured in problems.items()]
    return "\n\n".join([machine_line(machine), *parts, *reasons]) + "\n"


def _plain(value: object) -> object:
    """What json does not know: `Measured` with summaries instead of lists, any other dataclass as it is."""
    if isinstance(value, Measured):
        samples = {name: asdict(summarise(values)) for name, values in value.samples.items() if values}
        return {"lane": value.lane, "problem": value.problem, "measured": samples}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    raise TypeError(f"{type(value).__name__} cannot be kept")


def check_memory(needed: int, remedy: str) -> None:
    """Raise ConfigError if so many bytes are more than can be taken without swapping."""
    available = available_nbytes()
    if needed > 0.9 * available:
        raise ConfigError(
            f"memory: needs {needed / 1e9:.1f} GB; {available / 1e9:.1f} GB are available; try {remedy}"
        )


class Lane:
    """Whatever has turns: its processes, and what came of them."""

    def __init__(self, *workers: WorkerProcess) -> None:
        self.workers = workers
        self.measured = Measured()

    @property
    def stopped(self) -> bool:
        return bool(self.measured.problem)

    def stop(self, problem: str, *, failed: bool) -> None:
        self.measured.problem, self.measured.failed = problem, failed

    def attempt(self, step: Callable[..., None], *args: object) -> None:
        """One step of a lane that has not failed; a worker that fails ends its turns, and the others go on."""
        if self.stopped:
            return
        try:
            step(*args)
        except WorkerFailed as failure:
            self.stop(str(failure), failed=True)

    def open(self) -> None:
        """Start the processes; all lanes do before any of them waits."""
        for worker in self.workers:
            worker.open()
            worker.tell("probe")

    def connect(self) -> None:
        """Wait until they can work together, or stop."""
        for worker in self.workers:
            probe: Probe = worker.answer(SETUP_TIMEOUT_S)
            if not probe.ok:
                self.stop(probe.reason, failed=False)
                return


def check(owner: WorkerProcess, what: str = "") -> None:
    """Have the process look at every byte that was moved to it. Raises WorkerFailed."""
    if wrong := owner.ask("check_and_clear", timeout_s=SETUP_TIMEOUT_S):
        raise WorkerFailed(f"wrong bytes{f' ({what})' if what else ''}: {wrong}")


@contextmanager
def opened(lanes: Sequence[Lane]) -> Iterator[None]:
    """All of them, ready for turns; whatever happens, no process is left.

    All are hung up before one is waited for. So a wait that is interrupted leaves no process that stands still: the
    exit of this one would wait for that without end.
    """
    workers = [worker for lane in lanes for worker in lane.workers]
    with ExitStack() as stack:
        for end in (WorkerProcess.close, WorkerProcess.hang_up):  # the last ones in the stack come first
            for worker in workers:
                stack.callback(end, worker)
        for lane in lanes:
            lane.attempt(lane.open)
        for lane in lanes:
            lane.attempt(lane.connect)
        yield


def in_turns(things: Sequence[Thing], rounds: int) -> Iterator[tuple[int, Thing]]:
    """Each of them once a round, in an order that shifts, so that nobody always follows the same one."""
    for number in range(rounds):
        shift = number % len(things)
        for thing in (*things[shift:], *things[:shift]):
            yield number, thing
