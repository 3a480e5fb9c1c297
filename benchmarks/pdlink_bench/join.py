"""`pdlink bench join`: what workers that register cost a proxy, in CPU of the proxy's process alone.

A real proxy, with keys, and another process with a socket for each worker: all dial at once, then beat, then lose
their connections and dial at once again. The CPU of the idle proxy is measured first, and taken off the others. Each
beat tells another load, and one in ten other curves. Then single workers, each a process, are killed or stopped, and
the time is measured after which another proxy sends them no request.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pdlink.config import ProxyConfig
from pdlink.protocol import presence
from pdlink.serve.keys import keygen
from pdlink.serve.up import start, stop
from pdlink_proxy.discovery.register import EXPIRE_S

from . import harness
from .harness import Report, Table, positive, positive_float
from .workers import WorkerFailed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.progress import Progress

_READY_S = 60.0
_IDLE_S = 5.0
_LOSSES = 3
"""Workers that are killed, and as many that are stopped."""
KILLED_BAR_S, STOPPED_BAR_BEATS = 1.0, presence.MISSED_BEATS
_LOOK_S = 0.005
_HERE = "register:tcp://127.0.0.1:0"
BAR_SHARE, _BAR_RATE = 0.03, 1000
"""Of a core, for so many beats a second."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench join`."""
    parser.add_argument("--workers", type=positive, default=1000, help="that register; default %(default)s")
    parser.add_argument("--beat", type=positive_float, default=1.0, help="seconds between beats; default %(default)s")
    parser.add_argument("--seconds", type=positive_float, default=20.0, help="of beats; default %(default)s")
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if a worker was lost."""
    return harness.run("join", args, _report)


class _Fleet:
    """The process of `join_fleet`."""

    def __init__(self, address: str, key_file: Path, count: int, beat_s: float) -> None:
        command = [sys.executable, "-m", "pdlink_bench.join_fleet", address, str(key_file), str(count), str(beat_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def ask(self, word: str) -> dict[str, float]:
        """Do it, and say what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._line())
        return found

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    task = progress.add_task("start", total=5)
    with ExitStack() as stack:
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lost = [f"lost-{number}" for number in range(2 * _LOSSES)]
        (keys / "allow").write_text("\n".join(keygen(name, str(keys))[1] for name in ("proxy", "fleet", *lost)))
        many = stack.enter_context(ExitStack())
        url, pid, address = _proxy(many, keys)
        fleet = _Fleet(address, keys / "fleet.key", args.workers, args.beat)
        many.callback(fleet.close)
        idle = _share(pid, _IDLE_S)
        progress.advance(task)
        took: dict[str, tuple[float, float]] = {}
        """By phase, seconds, and those of CPU beyond an idle proxy's."""
        took["all dial at once, until each was probed"] = _phase(fleet, pid, "join", idle)
        time.sleep(2 * args.beat)
        progress.advance(task)
        before, began_s, began_cpu_s = fleet.ask("count"), time.monotonic(), _cpu_s(pid)
        time.sleep(args.seconds)
        after, lasted_s = fleet.ask("count"), time.monotonic() - began_s
        beats, probes = after["beats"] - before["beats"], after["probes"] - before["probes"]
        cpu_s = _cpu_s(pid) - began_cpu_s - idle * lasted_s
        progress.advance(task)
        took["all lose their connections and dial at once"] = _phase(fleet, pid, "again", idle)
        began_s, well = time.monotonic(), 0
        while well < args.workers and time.monotonic() - began_s < _READY_S:
            time.sleep(args.beat)
            well = _num_well(url)
        progress.advance(task)
        many.close()
        killed_s, stopped_s = _out_after(stack, keys, lost, args.beat)
        progress.advance(task)
    rows = Table(("", "seconds", "CPU of the proxy", "of it each"), title=f"{args.workers} workers under keys")
    for name, (seconds, spent_s) in took.items():
        rows.add(name, f"{seconds:.1f}", f"{spent_s:.2f} s", f"{1e6 * spent_s / args.workers:.0f} us/worker")
    share = cpu_s / lasted_s
    rows.add(
        f"a beat each {args.beat:g} s",
        f"{lasted_s:.1f}",
        f"{share:.1%} of a core",
        f"{1e6 * cpu_s / beats:.1f} us/beat",
    )
    said = f"{well} of {args.workers} workers are well at the end; "
    said += f"{beats / lasted_s:.0f} beats and {probes / lasted_s:.1f} probes a second"
    per_rate = share * _BAR_RATE / (beats / lasted_s)
    reached = f"{per_rate:.1%} of a core for {_BAR_RATE} beats a second; bar {BAR_SHARE:.0%}: "
    reached += _met(per_rate <= BAR_SHARE)
    kept = {
        **{"workers": args.workers, "beat_s": args.beat, "idle_share": idle, "beats_share": share, "took": took},
        **{"us_per_beat": 1e6 * cpu_s / beats, "beats_per_s": beats / lasted_s, "probes_per_s": probes / lasted_s},
        "well": well,
        "share_per_1000_beats": per_rate,
        "killed_s": killed_s,
        "stopped_s": stopped_s,
        "bar_share": BAR_SHARE,
    }
    latest_s = STOPPED_BAR_BEATS * args.beat + EXPIRE_S
    gone = (
        f"gets no request any more: killed, after {median(killed_s):.2f} s (at most {max(killed_s):.2f}; bar"
        f" {KILLED_BAR_S:g} s: {_met(max(killed_s) <= KILLED_BAR_S)}); stopped, after {median(stopped_s):.2f} s (at"
        f" most {max(stopped_s):.2f}; bar {STOPPED_BAR_BEATS} beats, and {EXPIRE_S:g} s between two looks:"
        f" {_met(max(stopped_s) <= latest_s)})"
    )
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return Report(
        kept, [rows, reached, gone, f"{said}; idle proxy: {idle:.1%} of a core; load {load}"], ok=well == args.workers
    )


def _met(yes: bool) -> str:
    return "met" if yes else "missed"


def _proxy(stack: ExitStack, keys: Path) -> tuple[str, int, str]:
    """A new one: its URL, its process, and where workers dial it."""
    config = ProxyConfig(
        port=0, discover=(_HERE,), key_file=str(keys / "proxy.key"), allow_file=str(keys / "allow"), drain_s=1.0
    )
    proxy = start("proxy", "proxy", config.model_dump(mode="json"))
    stack.callback(stop, [proxy], 5.0)
    proxy.wait_ready(_READY_S)
    url, address = str(proxy.facts["url"]), ""
    while not address:
        time.sleep(0.1)
        address = _health(url)["sources"][_HERE]["address"]
    return url, proxy.process.pid, address


def _out_after(stack: ExitStack, keys: Path, names: Sequence[str], beat_s: float) -> tuple[list[float], list[float]]:
    """Seconds from the death of each worker until it gets no request any more: killed ones, stopped ones."""
    url, _, address = _proxy(stack, keys)
    found: list[float] = []
    for number, name in enumerate(names):
        fleet = _Fleet(address, keys / f"{name}.key", 1, beat_s)
        stack.callback(fleet.close)
        fleet.ask("join")
        _await(url, well=True)
        time.sleep(2.5 * beat_s)
        began_s = time.monotonic()
        fleet.send(signal.SIGKILL if number < _LOSSES else signal.SIGSTOP)
        _await(url, well=False)
        found.append(time.monotonic() - began_s)
        fleet.close()
    return found[:_LOSSES], found[_LOSSES:]


def _await(url: str, *, well: bool) -> None:
    deadline_s = time.monotonic() + _READY_S
    while (_num_well(url) > 0) is not well:
        if time.monotonic() > deadline_s:
            raise WorkerFailed(f"a worker did not {'join' if well else 'leave'} within {_READY_S:g} s")
        time.sleep(_LOOK_S)


def _phase(fleet: _Fleet, pid: int, word: str, idle: float) -> tuple[float, float]:
    began_cpu_s = _cpu_s(pid)
    seconds = fleet.ask(word)["took_s"]
    return seconds, _cpu_s(pid) - began_cpu_s - idle * seconds


def _share(pid: int, seconds: float) -> float:
    before_s = _cpu_s(pid)
    time.sleep(seconds)
    return (_cpu_s(pid) - before_s) / seconds


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _num_well(url: str) -> int:
    health = _health(url)
    return sum(each["state"] == "ok" for side in ("prefill", "decode") for each in health[side])


def _health(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # not all are well
        body = error.read()
    found: dict[str, Any] = json.loads(body)
    return found
