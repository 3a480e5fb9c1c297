"""`pdlink bench tiers`: a disk tier beside bare unbuffered reads and writes of the same size, and its restart.

Lanes take turns; in its turn each writes its records and reads them again. The bare ones use a preallocated file that
was written before, and hash nothing: one call for each record, or parts of 8 MiB by two threads, as the tier does it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdlink.store.tiers.direct import PAGE_NBYTES, DirectFile
from pdlink.store.tiers.disk import SEGMENT_NBYTES, Disk
from pdlink.store.tiers.journal import Journal, pack

from . import harness, plot
from .harness import Report, Table, in_turns, positive
from .measure import Measured, gb_per_s

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rich.progress import Progress

PART_NBYTES = 8 << 20
SIZES_KIB = (128, 1024, 4096, 32768)
LEAST_RATIO, MOST_CPU_S_PER_GB, MOST_RESTART_S = 0.9, 0.15, 1.0
BAR_NBYTES = 32 << 20
"""Size of the records that the bars are of: 256 tokens of an 8B model."""
NUM_SEGMENTS = 3
_PAGES_PER_ENTRY = 64
"""Of the records in the restart, which has no bytes of theirs."""


class Lane(Protocol):
    """Writes records that lie one behind the other, and reads them back."""

    def write(self, records: memoryview, nbytes: int) -> None: ...

    def read(self, into: memoryview, nbytes: int) -> None: ...


class Bare:
    """O_DIRECT, nothing else."""

    def __init__(self, path: Path, part_nbytes: int, num_threads: int) -> None:
        self._file = DirectFile(path)
        self._file.grow(SEGMENT_NBYTES)
        self._part_nbytes = part_nbytes
        self._threads = ThreadPoolExecutor(num_threads)

    def write(self, records: memoryview, nbytes: int) -> None:
        self._move(self._file.write, records, nbytes)

    def read(self, into: memoryview, nbytes: int) -> None:
        self._move(self._file.read, into, nbytes)

    def _move(self, move: Callable[[int, memoryview], bool], memory: memoryview, nbytes: int) -> None:
        for at in range(0, len(memory), nbytes):
            part_nbytes = min(nbytes, self._part_nbytes)
            parts = range(at, at + nbytes, part_nbytes)
            pieces = [memory[part : part + part_nbytes] for part in parts]
            done = [move(at, pieces[0])] if len(pieces) == 1 else list(self._threads.map(move, parts, pieces))
            if not all(done):
                raise OSError("the file of the bare lane is too short")


class Tiered:
    """Our tier; each round has keys of its own."""

    def __init__(self, path: Path) -> None:
        self.disk = Disk(path, "bench", (NUM_SEGMENTS + 1) * SEGMENT_NBYTES, SEGMENT_NBYTES)
        self._round = 0

    def write(self, records: memoryview, nbytes: int) -> None:
        self._round += 1
        for at in range(0, len(records), nbytes):
            if not self.disk.put(self._key(at), records[at : at + nbytes]):
                raise OSError("the disk tier did not keep a record")

    def read(self, into: memoryview, nbytes: int) -> None:
        for at in range(0, len(into), nbytes):
            if self.disk.get(self._key(at), into[at : at + nbytes]) != nbytes:
                raise OSError("the disk tier did not give a record back")

    def _key(self, at: int) -> bytes:
        return self._round.to_bytes(16, "little") + at.to_bytes(16, "little")


def measure(lanes: dict[str, Lane], nbytes: int, rounds: int, turn_nbytes: int) -> dict[str, Measured]:
    """Seconds and CPU seconds of each turn, for records of `nbytes`."""
    turn_nbytes = turn_nbytes // nbytes * nbytes
    data = memoryview(mmap.mmap(-1, turn_nbytes))
    into = memoryview(mmap.mmap(-1, turn_nbytes))
    data[:] = np.random.default_rng(nbytes).bytes(turn_nbytes)
    found = {name: Measured() for name in lanes}
    for number, name in in_turns(list(lanes), rounds + 1):
        into[:] = bytes(turn_nbytes)
        for what, call in (("put", lanes[name].write), ("get", lanes[name].read)):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            call(data if what == "put" else into, nbytes)
            if number:  # the first round warms up
                found[name].add(what, time.perf_counter() - began_s)
                found[name].add(f"{what} CPU", time.process_time() - began_cpu_s)
        if into != data:
            raise OSError(f"{name}: other bytes were read than written")
    return found


def restart_s(path: Path, num_entries: int) -> tuple[float, float]:
    """Seconds and CPU seconds until a tier with so many entries is open."""
    pages = SEGMENT_NBYTES // PAGE_NBYTES
    per_segment = pages // _PAGES_PER_ENTRY
    num_segments = -(-num_entries // per_segment)
    capacity_nbytes = (num_segments + 1) * (SEGMENT_NBYTES + pages * 64)
    Disk(path, "restart", capacity_nbytes, SEGMENT_NBYTES).close()
    journal = Journal(path / "restart/journal", SEGMENT_NBYTES)
    for number in range(num_entries):
        segment, at = divmod(number, per_segment)
        rest = pack(segment * pages + at * _PAGES_PER_ENTRY, _PAGES_PER_ENTRY * PAGE_NBYTES, at, bytes(16))
        journal.append(segment, at, number.to_bytes(32, "big"), rest)
    journal.close()
    os.truncate(path / "restart/records", num_segments * SEGMENT_NBYTES)
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
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if a bar is missed."""
    return harness.run("tiers", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    with tempfile.TemporaryDirectory(prefix=".pdlink-bench-", dir=args.directory) as name:
        directory = Path(name)
        tier = Tiered(directory)
        lanes: dict[str, Lane] = {
            "bare": Bare(directory / "bare", SEGMENT_NBYTES, 1),
            "bare, parts": Bare(directory / "parts", PART_NBYTES, 2),
            "disk": tier,
        }
        warm = memoryview(mmap.mmap(-1, 32 << 20))
        for lane in lanes.values():  # the first write of preallocated room costs more
            for _ in range((NUM_SEGMENTS + 1) * SEGMENT_NBYTES // len(warm)):
                lane.write(warm, len(warm))
        found = {
            kib << 10: measure(lanes, kib << 10, args.rounds, args.turn << 20) for kib in progress.track(args.sizes)
        }
        direct = tier.disk._file.direct
        tier.disk.close()
        restarted_s, restarted_cpu_s = restart_s(directory, args.entries)
    return _told(args, found, direct, restarted_s, restarted_cpu_s)


def _told(
    args: argparse.Namespace, found: dict[int, dict[str, Measured]], direct: bool, restarted_s: float, cpu_s: float
) -> Report:
    columns = [f"{what} {unit}" for what in ("put", "get") for unit in ("GB/s", "CPU s/GB", "of bare")]
    table = Table(("record", "lane", *columns), "records on disk", num_left=2)
    verdicts: list[str] = []
    groups: dict[str, list[plot.Bar]] = {}
    most_s = MOST_RESTART_S * max(1.0, args.entries / 1e6)
    ok = restarted_s <= most_s
    for nbytes, lanes in found.items():
        turn_nbytes = (args.turn << 20) // nbytes * nbytes
        label = f"{nbytes >> 10:,} KiB"
        for lane, measured in lanes.items():
            cells = []
            for what in ("put", "get"):
                taken, cpu = measured.summary(what), measured.summary(f"{what} CPU")
                ratio = lanes["bare"].share(what, measured, what)
                if taken is None or cpu is None or ratio is None:
                    continue
                cpu_per_gb = cpu.median / turn_nbytes * 1e9
                cells += [f"{gb_per_s(turn_nbytes, taken.median):.2f}", f"{cpu_per_gb:.3f}", f"{ratio:.2f}"]
                groups.setdefault(f"{what} {label}", []).append(
                    plot.Bar.of(lane, taken, partial(gb_per_s, turn_nbytes))
                )
                if lane == "disk" and nbytes == BAR_NBYTES:
                    met = ratio >= LEAST_RATIO and cpu_per_gb <= MOST_CPU_S_PER_GB
                    ok = ok and met
                    verdicts.append(
                        f"{what} of {label}: {ratio:.2f} of bare, at least {LEAST_RATIO}; {cpu_per_gb:.3f} CPU s/GB, "
                        f"at most {MOST_CPU_S_PER_GB}: " + ("met" if met else "[red]missed[/]")
                    )
            table.add(label, lane, *cells)
        table.add()
    verdicts.append(
        f"restart with {args.entries:,} entries: {restarted_s:.2f} s ({cpu_s:.2f} s of CPU), at most "
        f"{most_s:.2f}: " + ("met" if restarted_s <= most_s else "[red]missed[/]")
    )
    cache = "past the page cache" if direct else "[red]through the page cache: this file system takes no O_DIRECT[/]"
    return Report(
        {"lanes": found, "direct": direct, "restart_s": restarted_s, "restart_cpu_s": cpu_s},
        [f"{args.turn} MiB a turn, {cache}", table, *verdicts],
        [plot.Bars("records on disk", "GB/s", groups)],
        ok=ok,
    )
