"""`pdlink bench observe`: what observing costs, as CPU of a request.

Two proxies take turns with the same requests before the same stand-ins for workers: one as it is shipped (metrics,
records, decisions), and one from which all of this is taken out (`unobserved.py`). With --workers so do two whole
deployments of the built-in engine, whose workers have metrics and a timeline. A third turn watches the first one
meanwhile: every second all /metrics are scraped as OpenMetrics and the page's state is asked for. That is a price per
second, not per request. CPU of deployments is that of all threads, by the kernel's account in ns.

The verdict is about whole deployments: the median over the turns of observed CPU divided by unobserved CPU, with the
interval that holds the true median with 95 %. It is undecided while that interval holds the bar.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pdlink.config import ProxyConfig, WorkerConfig
from pdlink.serve import up

from . import harness
from .harness import Report, Table, in_turns, positive, positive_float
from .measure import Measured, spread
from .proxy import LOADS, OURS, UNOBSERVED, Router, Stub

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.progress import Progress

PARTS = ("proxy", "prefill", "decode")
_CLIENTS, _TOKENS = 4, 8
MOST_SHARE = 0.02
"""Of the CPU of a request."""
_OPEN_METRICS = "application/openmetrics-text;version=1.0.0"


@dataclass
class _Deployment:
    """A proxy and two workers."""

    children: dict[str, up.Child] = field(default_factory=dict)

    def start(self, module: str) -> None:
        """module: what `python -m` runs."""
        for role in ("prefill", "decode"):
            config = WorkerConfig.model_validate({"role": role, "name": f"bench-{role}", "model": {"num_layers": 4}})
            self.children[role] = _start(role, config.model_dump(mode="json"), module)
        for child in self.children.values():
            child.wait_ready(harness.SETUP_TIMEOUT_S)
        urls = {role: [child.facts["url"]] for role, child in self.children.items()}
        config_of_proxy = ProxyConfig(port=0, retries=0).model_dump(mode="json")
        self.children["proxy"] = _start("proxy", {**config_of_proxy, **urls}, module)
        self.children["proxy"].wait_ready(harness.SETUP_TIMEOUT_S)

    def cpu_s(self) -> dict[str, float]:
        return {part: _cpu_s(self.children[part].process.pid) for part in PARTS}

    def close(self) -> None:
        up.stop(list(self.children.values()), 10.0)

    def ask(self, count: int) -> None:
        """So many requests, every second one a stream. Raises OSError, http.client.HTTPException, ValueError."""
        place = urlsplit(str(self.children["proxy"].facts["url"]))

        def some(first: int) -> None:
            connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)
            for number in range(first, count, _CLIENTS):
                prompt = [33 + (number * 31 + at * 7) % 90 for at in range(64)]
                body = {"model": "pdlink-tiny", "prompt": prompt, "max_tokens": _TOKENS, "stream": number % 2 == 0}
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read()
                if response.status != 200:
                    raise ValueError(f"status {response.status}: {text[:200]!r}")
            connection.close()

        with ThreadPoolExecutor(_CLIENTS) as threads:
            list(threads.map(some, range(_CLIENTS)))

    def watch(self, over: threading.Event) -> None:
        """As Prometheus and a person at the page do, once a second."""
        urls = {part: str(child.facts["url"]) for part, child in self.children.items()}
        while not over.wait(1.0):
            with suppress(OSError):
                for url in urls.values():
                    asked = urllib.request.Request(f"{url}/metrics", headers={"Accept": _OPEN_METRICS})
                    with urllib.request.urlopen(asked, timeout=10) as answer:
                        answer.read()
                with urllib.request.urlopen(f"{urls['proxy']}/pdlink/state", timeout=10) as answer:
                    answer.read()


def _start(role: str, settings: dict[str, Any], module: str) -> up.Child:
    """As `up.start`, of another program than `pdlink`."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", module, role, "--label", role, "--parent-fd", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    ours.sendall(json.dumps(settings).encode() + b"\n")
    return up.Child(role, role, settings, process, ours, {})


def _cpu_s(pid: int) -> float:
    """CPU of all threads that live, in seconds."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench observe`."""
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each; default %(default)s")
    parser.add_argument("--seconds", type=positive_float, default=1.0, help="of each load; default %(default)s")
    parser.add_argument("--workers", action="store_true", help="measure whole deployments, too")
    parser.add_argument(
        "--count", type=positive, default=50, help="requests of --workers in a turn; default %(default)s"
    )
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if a deployment failed."""
    return harness.run("observe", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    proxies = _proxies(args, progress)
    found = {"proxies": proxies}
    tables = [_table("CPU of the proxy, us", proxies, [load.name for load in LOADS], (OURS, UNOBSERVED), 1e6)]
    tables[0].title = f"{args.rounds} turns of {args.seconds:g} s each; ratios: median over the turns"
    if args.workers and not any(each.problem for each in proxies.values()):
        found["deployments"] = deployments = _deployments(args, progress)
        names = ("observed", "watched", "unobserved")
        tables.append(_table("CPU of a request, ms", deployments, [*PARTS, "all"], names, 1e3))
        tables[
            1
        ].title = f"{args.rounds} turns of {args.count} requests each, {_CLIENTS} at once: 64 tokens, then {_TOKENS}"
    parts: list[str | Table] = [f"load {os.getloadavg()[0]:.1f}", *tables]
    if "deployments" in found:
        pairs = zip(deployments["observed"].samples["all"], deployments["unobserved"].samples["all"], strict=True)
        parts.append(verdict([ours / base for ours, base in pairs]))
    return Report(found, parts, problems=proxies)


def verdict(ratios: Sequence[float]) -> str:
    """ratios: CPU with observing divided by that without, of each turn."""
    ordered = sorted(ratios)
    rank = _rank(len(ordered))
    costs = f"observing costs {statistics.median(ordered) - 1:.1%} of the CPU of a request"
    if rank is None:
        return f"{costs}; at most {MOST_SHARE:.0%}: undecided, {len(ordered)} turns are too few: --rounds 6 or more"
    low, high = ordered[rank] - 1, ordered[-1 - rank] - 1
    end = (
        "met"
        if high <= MOST_SHARE
        else "not met"
        if low > MOST_SHARE
        else "undecided, more --rounds on an idle machine"
    )
    return f"{costs} ({low:.1%} to {high:.1%} with 95 %, of {len(ordered)} turns); at most {MOST_SHARE:.0%}: {end}"


def _rank(count: int) -> int | None:
    """The largest k so that the true median lies between the k-th smallest and the k-th largest of so many samples
    (counted from 0) with 95 % at least; None where all of them are too few. Exact, by the binomial distribution."""
    found, outside = None, 0.0
    for rank in range(count // 2):
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 0.05:
            break
        found = rank
    return found


def _table(head: str, found: dict[str, Measured], rows: list[str], names: tuple[str, ...], factor: float) -> Table:
    """names: the last one is what the others are divided by."""
    *others, base = names
    table = Table([head, *names, *(f"{name} / {base}" for name in others)])
    for row in rows:
        cells = [spread(summary, factor) for name in names if (summary := found[name].summary(row)) is not None]
        shares = [found[name].share(row, found[base], row) for name in others]
        table.add(row, *cells, *(f"{share:.3f}" for share in shares if share is not None))
    return table


def _proxies(args: argparse.Namespace, progress: Progress) -> dict[str, Measured]:
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        stubs = {role: (stack.enter_context(Stub(role)).url,) for role in ("prefill", "decode")}
        routers = [stack.enter_context(Router(name, "", stubs, cores[0])) for name in (OURS, UNOBSERVED)]
        for router in routers:
            router.wait()
        task = progress.add_task("proxies", total=(1 + args.rounds) * len(routers))
        for number, router in in_turns(routers, 1 + args.rounds):
            if not router.measured.problem:
                router.turn(args.seconds, memory=False)
            if not number:
                router.measured.samples.clear()  # it has warmed up
            progress.advance(task)
    return {router.name: router.measured for router in routers}


def _deployments(args: argparse.Namespace, progress: Progress) -> dict[str, Measured]:
    turns = {"unobserved": Measured(), "observed": Measured(), "watched": Measured()}
    with ExitStack() as stack:
        deployments: dict[str, _Deployment] = {}
        for name, module in (("unobserved", "pdlink_bench.unobserved"), ("observed", "pdlink")):
            deployments[name] = _Deployment()
            stack.callback(deployments[name].close)  # also if it does not start
            deployments[name].start(module)
        deployments["watched"] = deployments["observed"]
        task = progress.add_task("deployments", total=(1 + args.rounds) * len(turns))
        for number, name in in_turns(list(turns), 1 + args.rounds):  # the first one warms up
            deployment, over = deployments[name], threading.Event()
            watcher = threading.Thread(target=deployment.watch, args=(over,))
            before = deployment.cpu_s()
            if name == "watched":
                watcher.start()
            try:
                deployment.ask(args.count)
            finally:
                over.set()
                if name == "watched":
                    watcher.join()
            if number:
                for part, now_s in deployment.cpu_s().items():
                    turns[name].add(part, (now_s - before[part]) / args.count)
            progress.advance(task)
    for measured in turns.values():
        measured.add("all", *(sum(parts) for parts in zip(*(measured.samples[part] for part in PARTS), strict=True)))
    return turns
