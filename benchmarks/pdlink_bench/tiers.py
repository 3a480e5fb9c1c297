"""`pdlink bench tiers`: what keeps records in memory or on disk, beside bare copies and bare unbuffered files.

Lanes take turns; in its turn each puts its records and reads them again. The bare ones keep no books and hash
nothing: memcpy and non-temporal stores by one core; one unbuffered call for each record, or parts of 8 MiB by two
threads, as our disk tier reads, in a preallocated file that was written before. Our tier on a Valkey or Redis server
has redis-py with hiredis beside it. Then keys are made of a long prompt, it is looked up, a disk tier of a million
entries opens, and a store of more memory than most machines have starts; what is cold is in `tier_cold.py`, and
the first token of a long prompt after a start in `tier_first.py`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.commands.parser import positive
from pdlink.store.tiers.disk import SEGMENT_NBYTES, Disk
from pdlink.store.tiers.files import PAGE_NBYTES, Journal, pack

from . import harness, plot, tier_cold, tier_first, tier_lookup, tier_peers, tier_start, tier_valkey
from .harness import BenchReport, TextTable, in_turns
from .http_load import WrongAnswer
from .measure import Measured, gb_per_s, median_ratio
from .tier_lanes import MEMCPY_RUNS, PART_NBYTES, Bare, Copied, DiskLane, Remote, memory_lanes
from .workers import WorkerFailed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from rich.progress import Progress

    from .tier_lanes import TierLane

SIZES_KIB = (128, 1024, 4096, 32768)
MOST_CPU_S_PER_GB, MOST_RESTART_S = 0.15, 1.0
MOST_LOOKUP_S = 0.003
MOST_START_S = 2.0
LEAST = {
    "memory": {"put": {"memcpy": 0.9, MEMCPY_RUNS: 1.2}, "get": {"memcpy": 0.9, MEMCPY_RUNS: 1.2}},
    "disk": {"put": {"bare": 0.9}, "get": {"bare": 0.9}},
    "valkey": {"get": {"redis-py": 1.5}},
}
"""Of bare lanes in the same turns, by what is done. Whole records in memory; and the runs that ours copies, which its
stores past the caches do faster than memcpy."""
LEAST_AHEAD = 1.2
"""Of ours, what the best peer takes of CPU."""
BAR_NBYTES = 32 << 20
"""Size of the records that the bars are of: 256 tokens of an 8B model."""
NUM_SEGMENTS = 3
COLD_SIZES = tier_cold.ColdSizes()
FIRST_SIZES = tier_first.FirstSizes()
_PAGES_PER_ENTRY = 64
"""Of the records in the restart, which has no bytes of theirs."""
_BARE = {"memory": "memcpy", "disk": "bare", "valkey": "redis-py"}
_LOOKUP, _START, _COLD, _FIRST = "lookup", "start", "cold", "first"

Found = dict[int, dict[str, Measured]]
"""By bytes of a record, then by lane."""


def measure(lanes: Mapping[str, TierLane], nbytes: int, rounds: int, turn_nbytes: int) -> dict[str, Measured]:
    """Seconds and CPU seconds of each turn, for records of `nbytes`. A lane that fails has a problem instead."""
    found = {name: Measured() for name in lanes}
    for name, lane in lanes.items():
        try:
            lane.begin(nbytes, max(1, turn_nbytes // nbytes))
        except WorkerFailed as error:
            found[name].problem = str(error)
    for number, name in in_turns(list(lanes), rounds + 1):
        lane, measured = lanes[name], found[name]
        if measured.problem:
            continue
        try:
            for what in ("put", "get"):
                took = lane.timed(what)
                if number and (what == "get" or lane.puts):  # the first round warms up
                    measured.add(what, took.wall_s)
                    measured.add(f"{what} CPU", took.cpu_s)
            whole = lane.whole()
        except WorkerFailed as error:
            measured.problem = str(error)
            continue
        if not whole:
            raise OSError(f"{name}: other bytes were read than written")
    return found


def restart_s(path: Path, num_entries: int) -> tuple[float, float]:
    """Seconds and CPU seconds until a tier with so many entries is open."""
    capacity_nbytes = 2 * SEGMENT_NBYTES + num_entries * _PAGES_PER_ENTRY * 2 * PAGE_NBYTES
    tier = Disk(path, "restart", capacity_nbytes, SEGMENT_NBYTES)
    pages = tier.segment_nbytes // PAGE_NBYTES
    tier.close()
    per_segment = pages // _PAGES_PER_ENTRY
    num_segments = -(-num_entries // per_segment)
    journal = Journal(path / "restart/journal", pages * PAGE_NBYTES)
    for number in range(num_entries):
        segment, at = divmod(number, per_segment)
        rest = pack(segment * pages + at * _PAGES_PER_ENTRY, _PAGES_PER_ENTRY * PAGE_NBYTES, at, bytes(12))
        journal.append(segment, at, [(number.to_bytes(32, "big"), rest)])
    journal.close()
    os.truncate(path / "restart/records", num_segments * pages * PAGE_NBYTES)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    tier = Disk(path, "restart", capacity_nbytes, SEGMENT_NBYTES)
    took = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    if tier.nbytes != num_entries * _PAGES_PER_ENTRY * PAGE_NBYTES:
        raise OSError(f"a restart found {tier.nbytes} bytes")
    tier.close()
    return took


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench tiers`."""
    parser.add_argument("--directory", type=Path, default=Path(), metavar="DIR", help="on the disk to measure (.)")
    parser.add_argument("--sizes", nargs="+", type=positive, default=SIZES_KIB, metavar="KIB", help="of a record")
    parser.add_argument("--rounds", type=positive, default=7, help="default %(default)s")
    parser.add_argument("--turn", type=positive, default=128, metavar="MIB", help="moved in each turn (%(default)s)")
    parser.add_argument("--entries", type=positive, default=1_000_000, help="of the restart (%(default)s)")
    parser.add_argument(
        "--places", nargs="+", choices=[*_BARE, _LOOKUP, _START, _COLD, _FIRST],
        default=[*_BARE, _LOOKUP, _START, _COLD, _FIRST],
        help="what to measure (all); valkey needs a valkey-server or redis-server in PATH or PREFIX/servers/bin",
    )  # fmt: skip
    parser.add_argument("--restarts", type=positive, default=5, help="of what is cold (%(default)s)")
    parser.add_argument("--memory", type=positive, default=60, metavar="GIB", help="of the start (%(default)s)")
    parser.add_argument(
        "--peers", nargs="+", choices=[*tier_peers.MEMORY, *tier_peers.DISK], default=(), metavar="NAME",
        help=f"other stores in the same turns: {', '.join([*tier_peers.MEMORY, *tier_peers.DISK])}",
    )  # fmt: skip
    parser.add_argument("--path", default="", metavar="DIRS", help="where their packages are, joined by :")
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if a bar is missed, or not all was kept or found."""
    try:
        return harness.run("tiers", args, _report)
    except (WorkerFailed, WrongAnswer) as error:
        print(error, file=sys.stderr)
        return 1


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    kept: dict[str, Any] = {}
    report = BenchReport(kept)
    with tempfile.TemporaryDirectory(prefix=".pdlink-bench-", dir=args.directory) as name, ExitStack() as opened:
        directory = Path(name)
        for place in [place for place in args.places if place in _BARE]:
            ours = {"memory": tier_peers.MEMORY, "disk": tier_peers.DISK}.get(place, {})
            try:
                lanes: dict[str, TierLane] = opened.enter_context(_lanes(place, directory))
            except WorkerFailed as error:
                report.shown.append(f"{place} is left out: {error}")
                continue
            for peer in [peer for peer in args.peers if peer in ours]:
                folder = str(directory / peer.replace(" ", "-"))
                try:
                    lanes[peer] = Remote(peer, tier_peers.make, peer, args.path, folder)
                except WorkerFailed as error:
                    report.shown.append(f"{peer} is left out: {error}")
            try:
                if place == "disk":
                    _write_before(lanes)
                found = {
                    kib << 10: measure(lanes, kib << 10, args.rounds, args.turn << 20)
                    for kib in progress.track(args.sizes)
                }
            finally:
                for lane in lanes.values():
                    lane.close()
            kept[place] = found
            _tell(report, args, place, found, {name: lane.checks for name, lane in lanes.items()})
        if _LOOKUP in args.places:
            kept["hashed"] = tier_lookup.hashed(args.rounds)
            _tell_hashed(report, kept["hashed"])
            kept["lookup_cpu_s"] = tier_lookup.cpu_s(args.rounds)
            _tell_lookup(report, kept["lookup_cpu_s"])
        if "disk" in args.places:
            kept["restart_s"], kept["restart_cpu_s"] = restart_s(directory, args.entries)
            _tell_restart(report, args, kept["restart_s"], kept["restart_cpu_s"])
        if _START in args.places:
            kept["start"] = tier_start.measure(args.memory << 30)
            _tell_start(report, args, kept["start"])
        if _COLD in args.places:
            task = progress.add_task("restarts", total=2 * args.restarts)
            kept["cold"] = tier_cold.measure(directory, COLD_SIZES, args.restarts, lambda: progress.advance(task))
            _tell_cold(report, args, kept["cold"])
        if _FIRST in args.places:
            kept["first"] = _first(report, args, directory, progress)
    return report


@contextmanager
def _lanes(place: str, directory: Path) -> Iterator[dict[str, TierLane]]:
    """Raises WorkerFailed where a place's program or library is not installed."""
    if place == "valkey":
        with closing(tier_valkey.ValkeyServer()) as server:
            yield tier_valkey.lanes(server)
    else:
        yield memory_lanes() if place == "memory" else _disk_lanes(directory)


def _disk_lanes(directory: Path) -> dict[str, TierLane]:
    file_nbytes = NUM_SEGMENTS * SEGMENT_NBYTES
    return {
        "bare": Bare(directory / "bare", file_nbytes, SEGMENT_NBYTES, 1),
        "bare, parts": Bare(directory / "parts", file_nbytes, PART_NBYTES, 2),
        "bare, 4 KiB pages": Bare(directory / "small", file_nbytes, SEGMENT_NBYTES, 1, gathers=False),
        "disk": DiskLane(directory, (NUM_SEGMENTS + 1) * SEGMENT_NBYTES, SEGMENT_NBYTES),
        "disk, copied": Copied(directory / "copied", 3 * SEGMENT_NBYTES, SEGMENT_NBYTES, checks=False),
        "disk, copied, checked": Copied(directory / "checked", 3 * SEGMENT_NBYTES, SEGMENT_NBYTES, checks=True),
    }


def _write_before(lanes: Mapping[str, TierLane]) -> None:
    """The first write of preallocated room costs more."""
    nbytes = min(32 << 20, SEGMENT_NBYTES // 2)
    for name in [name for name in lanes if name.startswith(("bare", "disk"))]:
        lanes[name].begin(nbytes, 1)
        for _ in range((NUM_SEGMENTS + 1) * SEGMENT_NBYTES // nbytes):
            lanes[name].put()


def _tell(
    report: BenchReport, args: argparse.Namespace, place: str, found: Found, checks: Mapping[str, bool]
) -> None:
    bare = _BARE[place]
    columns = [f"{what} {unit}" for what in ("put", "get") for unit in ("GB/s", "CPU s/GB", f"of {bare}")]
    table = TextTable(("record", "lane", "checked", *columns), f"records in {place}", num_left=3)
    groups: dict[str, list[plot.PlottedBar]] = {}
    for nbytes, lanes in found.items():
        turn_nbytes = max(1, (args.turn << 20) // nbytes) * nbytes
        for lane, measured in lanes.items():
            cells = []
            for what in ("put", "get"):
                taken, cpu = measured.summary(what), measured.summary(f"{what} CPU")
                ratio = lanes[bare].share(what, measured, what)
                if taken is None or cpu is None or ratio is None:
                    cells += ["-"] * 3
                    continue
                per_gb = cpu.median / turn_nbytes * 1e9
                cells += [f"{gb_per_s(turn_nbytes, taken.median):.2f}", f"{per_gb:.3f}", f"{ratio:.2f}"]
                groups.setdefault(f"{what} {nbytes >> 10:,} KiB", []).append(
                    plot.PlottedBar.of(lane, taken, partial(gb_per_s, turn_nbytes))
                )
            table.add(f"{nbytes >> 10:,} KiB", lane, "yes" if checks[lane] else "", *cells)
        table.add()
    report.shown += [f"{args.turn} MiB a turn", table]
    problems = {(lane, one.problem) for lanes in found.values() for lane, one in lanes.items() if one.problem}
    report.shown += [f"{lane} is left out: {problem}" for lane, problem in sorted(problems)]
    report.panels = [*report.panels, plot.Bars(f"records in {place}", "GB/s", groups)]
    _judge(report, args, place, found.get(BAR_NBYTES, {}))


def _judge(report: BenchReport, args: argparse.Namespace, place: str, lanes: dict[str, Measured]) -> None:
    """The bars of one place, whose lane of ours has its name."""
    turn_nbytes = max(1, (args.turn << 20) // BAR_NBYTES) * BAR_NBYTES
    for what, bars in LEAST[place].items() if lanes else ():
        per_gb = lanes[place].median(f"{what} CPU") / turn_nbytes * 1e9
        if place == "disk":
            per_gb += _sums_cpu_s(lanes, what) / turn_nbytes * 1e9
        cpu = f"; {per_gb:.3f} CPU s/GB with the sums, at most {MOST_CPU_S_PER_GB}" if place == "disk" else ""
        for bare, least in bars.items():
            ratio = lanes[bare].share(what, lanes[place], what) or 0.0
            met = ratio >= least and (place != "disk" or per_gb <= MOST_CPU_S_PER_GB)
            report.ok &= met
            judged = f"{ratio:.2f} of {bare}, at least {least}{cpu}: {_word(met)}"
            report.shown.append(f"{place}, {what} of {BAR_NBYTES >> 20} MiB: {judged}")
        peers = {
            name: measured.median(f"{what} CPU") / turn_nbytes * 1e9
            for name, measured in lanes.items()
            if name in (*tier_peers.MEMORY, *tier_peers.DISK) and measured.summary(f"{what} CPU")
        }
        if peers:
            best = min(peers, key=lambda name: peers[name])
            ahead = peers[best] / per_gb
            report.ok &= ahead >= LEAST_AHEAD
            report.shown.append(
                f"{place}, {what} of {BAR_NBYTES >> 20} MiB: {best} takes {peers[best]:.3f} CPU s/GB, {ahead:.2f} "
                f"times ours, at least {LEAST_AHEAD}: " + _word(ahead >= LEAST_AHEAD)
            )


def _sums_cpu_s(lanes: dict[str, Measured], what: str) -> float:
    """What sums cost the copies of a turn, by the median over the turns of what copies cost with and without."""
    plain, summed = lanes["disk, copied"], lanes["disk, copied, checked"]
    ratio = summed.share(f"{what} CPU", plain, f"{what} CPU") or 1.0
    return max(0.0, ratio - 1) * plain.median(f"{what} CPU")


def _tell_hashed(report: BenchReport, rates: Sequence[tier_lookup.Hashed]) -> None:
    table = TextTable(
        ("ids", "tokens a key", "million tokens/CPU s", "at least", "to SHA-256 of pickles"),
        f"keys of {tier_lookup.NUM_TOKENS:,} tokens",
    )
    for rate in rates:
        least = tier_lookup.LEAST_HASHED.get((rate.form, rate.chunk_tokens), 0.0)
        met = rate.per_s >= least
        report.ok &= met
        limit = f"{least / 1e6:.0f}: {_word(met)}" if least else ""
        table.add(rate.form, str(rate.chunk_tokens), f"{rate.per_s / 1e6:.0f}", limit, f"{rate.ahead:.1f}")
    report.shown.append(table)


def _tell_lookup(report: BenchReport, cpu_s: Mapping[str, float]) -> None:
    for form, took_s in cpu_s.items():
        report.ok &= took_s <= MOST_LOOKUP_S
        report.shown.append(
            f"look-up of {tier_lookup.NUM_TOKENS:,} tokens ({form}): {took_s * 1e3:.2f} ms of CPU, at most "
            f"{MOST_LOOKUP_S * 1e3:.0f}: {_word(took_s <= MOST_LOOKUP_S)}"
        )


def _tell_restart(report: BenchReport, args: argparse.Namespace, took_s: float, cpu_s: float) -> None:
    most_s = MOST_RESTART_S * max(1.0, args.entries / 1e6)
    report.ok &= took_s <= most_s
    report.shown.append(
        f"restart with {args.entries:,} entries: {took_s:.2f} s ({cpu_s:.2f} s of CPU), at most {most_s:.2f}: "
        + _word(took_s <= most_s)
    )


def _tell_start(report: BenchReport, args: argparse.Namespace, started: tier_start.ColdStart) -> None:
    for what, took_s in (("library", started.library_s), ("process", started.process_s)):
        report.ok &= took_s <= MOST_START_S
        report.shown.append(
            f"start of a store of {args.memory} GiB ({what}), until it has kept and read a record: {took_s:.2f} s, "
            f"at most {MOST_START_S:.0f}: {_word(took_s <= MOST_START_S)}"
        )
    report.shown.append(f"memory that it has taken by then: {started.taken_nbytes >> 20} MiB")


def _tell_cold(report: BenchReport, args: argparse.Namespace, found: Mapping[str, Measured]) -> None:
    columns = ("what", "path", "time", "tokens", "ours GB/s", "bare GB/s", "to bare", "at least", "bar")
    rows = TextTable(columns, "after a start", num_left=3)
    ours, bare = found["ours"], found["bare"]
    for what, verb in tier_cold.VERBS.items():
        tokens = f"{min(ours.samples[f'{what}, tokens']):,.0f}"
        for time_ in ("first", "tenth"):
            row = f"{what}, {time_}"
            ratio = bare.share(row, ours, row)
            if ratio is None:
                continue
            speeds = (gb_per_s(COLD_SIZES.of(what), lane.median(row)) for lane in (ours, bare))
            least = tier_cold.BARS.get(what) if time_ == "first" else None
            report.ok &= least is None or ratio >= least
            judged = ("", "") if least is None else (f"{least}", _word(ratio >= least))
            cells = (verb.what, verb.path, time_, tokens, *(f"{speed:.2f}" for speed in speeds), f"{ratio:.2f}")
            rows.add(*cells, *judged)
    report.shown += [
        f"medians of {args.restarts} restarts; {COLD_SIZES.of('store') >> 20} MiB, all kept and found",
        rows,
    ]


def _first(report: BenchReport, args: argparse.Namespace, directory: Path, progress: Progress) -> dict[str, Measured]:
    task = progress.add_task("first tokens", total=len(tier_first.MOST) * (args.restarts + 1))
    columns = ("from", "in blocks ms", "bare reads ms", "to bare", "at most", "first token ms", "out of blocks ms")
    table = TextTable(columns, "first token")
    found = {}
    for place, most in tier_first.MOST.items():
        try:
            measured = tier_first.measure(
                directory, place, FIRST_SIZES, args.restarts, lambda: progress.advance(task)
            )
        except WorkerFailed as error:
            report.shown.append(f"first token from {place} is left out: {error}")
            continue
        found[place] = measured
        ratio = median_ratio(measured.samples["in blocks"], measured.samples["bare"])
        report.ok &= ratio <= most
        times = [f"{measured.median(what) * 1e3:,.0f}" for what in ("in blocks", "bare", "first", "blocks")]
        table.add(place, *times[:2], f"{ratio:.2f}", f"{most}: {_word(ratio <= most)}", *times[2:])
    report.shown += [
        f"{FIRST_SIZES.tokens + 1:,} tokens, {FIRST_SIZES.nbytes >> 20} MiB of KV; a worker's first request after "
        f"SIGKILL; medians of {args.restarts} restarts",
        table,
    ]
    return found


def _word(met: bool) -> str:
    return "met" if met else "[red]missed[/]"
