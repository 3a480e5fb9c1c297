"""`pdlink bench proxy`: CPU of a routed request, beside other routers, in turns on the same stand-ins for workers.

The figure is the CPU that a router's processes used, per request or per streamed event: with few cores, latencies say
more about the run queue than about the router. The router has one core, stand-ins and clients have the others. The
stand-ins answer as the dialect's engine does (`proxy_stub.py`), two on each side, and publish KV events. Every router
looks for prompts' beginnings, checks health and has a key; pdlink reads the events, too. Each is warm before its
first turn. A turn counts only if each answer has all its tokens and each request reached a worker of both sides.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdlink.commands.parser import positive, positive_float
from pdlink.fleet.ports import free_ports

from . import harness
from .harness import BenchReport, TextTable, in_turns
from .measure import Measured, spread, version_of
from .proxy_stub import CHUNKS, DIALECTS, MODEL, WORD
from .workers import PR_SET_PDEATHSIG

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import IO

    from rich.progress import Progress

_READY_S = 60.0
_WORDS_CHARS = 400
"""Of the last words of a router that does not serve."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_HELD = 400
"""Streams that are open at once for the figure of memory."""
_SETTLE_S = 1.0
_WARM_S = 0.3
"""Of each load but the paced one, before the first turn."""

_WORKERS = 2
"""On each side."""
_KEY = "bench-key"
_ROUTERS = {
    # Versions that these lines were written for: 0.3.2, 0.1.17, 1.13.0.
    "sglang-router": "sglang_router.launch_router --pd-disaggregation --policy cache_aware --log-level error",
    "vllm-router": "vllm_router.launch_router --vllm-pd-disaggregation --policy cache_aware --log-level error",
    "smg": "smg.launch_router --pd-disaggregation --policy cache_aware --log-level error",
}
"""By the name of their wheel."""
_BOOTSTRAP_PORT = {"sglang-router": ("9900",)}
"""What follows the URL of a prefill worker."""
OURS = "pdlink"
BESIDE = "sglang-router"
"""The bars are ratios to it."""


@dataclass(frozen=True, slots=True)
class ProxyLoad:
    """Clients that each send one request after the other."""

    name: str
    prompt: str
    """What each of them begins with; a number of the client's own follows."""
    clients: int
    at_most: float
    """The bar: a share of `BESIDE`'s CPU."""
    stream: bool = False
    unit: str = "request"
    per_request: int = 1
    """Units in a request."""

    def body(self, number: int) -> bytes:
        prompt = f"{self.prompt} {number}"
        return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": CHUNKS, "stream": self.stream}).encode()


LOADS = (
    ProxyLoad("small request", "hello", clients=64, at_most=0.8),
    ProxyLoad("prompt of 4k tokens (16 KB of text)", "word" * 4096, clients=32, at_most=0.8),
    ProxyLoad(f"stream of {CHUNKS} events at once", "hello", clients=16, at_most=0.4, stream=True),
    ProxyLoad("64 paced streams", "paced", clients=64, at_most=0.8, stream=True, unit="event", per_request=CHUNKS),
)
_HOLDING = ProxyLoad("held", "held", clients=_HELD, at_most=0.0, stream=True)
_PARTS = ("user", "kernel")
_ADDED = "added latency"
_ADDED_AT_MOST_S = 0.5e-3
_MEMORY_AT_MOST_KB = 20.0
_ALONE = ProxyLoad("one request at a time", "hello", clients=1, at_most=0.0)
_MEMORY = "open stream"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench proxy`."""
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each router; default %(default)s")
    parser.add_argument("--seconds", type=positive_float, default=3.0, help="of each load; default %(default)s")
    parser.add_argument(
        "--dialect", choices=DIALECTS, required=True, help="what the workers answer like, and pdlink's setting"
    )
    parser.add_argument(
        "--routers",
        metavar="PYTHON",
        default=sys.executable,
        help="interpreter that has the wheels sglang-router, vllm-router, smg; default this one",
    )
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if a router failed."""
    return harness.run("proxy", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[1:] or cores
    task = progress.add_task("start", total=1 + args.rounds * (len(_ROUTERS) + 1))
    os.sched_setaffinity(0, mine)
    try:
        with ExitStack() as stack:
            workers = {
                role: [stack.enter_context(StubProcess(role, args.dialect)) for _ in range(_WORKERS)]
                for role in ("prefill", "decode")
            }
            routers = [
                stack.enter_context(
                    RouterProcess(name, args.routers, workers=workers, core=cores[0], dialect=args.dialect)
                )
                for name in (OURS, *_ROUTERS)
            ]
            for router in routers:
                router.wait()
            progress.advance(task)
            for number, router in in_turns(routers, args.rounds):
                progress.update(task, description=router.name)
                if not router.measured.problem:
                    router.turn(args.seconds, memory=number == 0)
                progress.advance(task)
    finally:
        os.sched_setaffinity(0, cores)
    measured = {router.name: router.measured for router in routers}
    bars = _bars(measured)
    caption = (
        f"Dialect {args.dialect}, {_WORKERS} + {_WORKERS} workers, KV events, API key, metrics and records on: CPU "
        "of the router, median (p10..p90)"
    )
    versions = {router.name: router.version for router in routers}
    tables: list[str | TextTable] = [
        _table(measured, caption, versions),
        _split_table(measured, "Of it in user mode + in the kernel, medians"),
        _bars_table(bars, f"Bars, dialect {args.dialect}"),
    ]
    kept = {"dialect": args.dialect, "rounds": args.rounds, "versions": versions, "routers": measured, "bars": bars}
    return BenchReport(kept, tables, problems=measured)


def _table(measured: dict[str, Measured], caption: str, versions: Mapping[str, str]) -> TextTable:
    columns = [*(f"{load.name}\nus/{load.unit}" for load in LOADS), f"{_MEMORY}\nKB of {_HELD}", f"{_ADDED}\nus, p50"]
    table = TextTable(("router", *columns), caption)
    for name, found in measured.items():
        router = f"{name} {versions[name]}"
        if found.problem:
            table.add(router, *[found.problem.partition(":")[0]] * len(columns))
            continue
        cells = [spread(summary, 1e6, 0) for load in LOADS if (summary := found.summary(load.name))]
        table.add(router, *cells, f"{found.median(_MEMORY):.1f}", f"{found.median(_ADDED) * 1e6:.0f}")
    ours = measured[OURS]
    for name, found in measured.items():
        if name != OURS and not found.problem and not ours.problem:
            shares = [ours.share(load.name, found, load.name) for load in LOADS]
            table.add(f"{OURS} / {name}", *(f"{share:.2f}" for share in shares if share is not None), "", "")
    return table


def _split_table(measured: Mapping[str, Measured], caption: str) -> TextTable:
    table = TextTable(("router", *(f"{load.name}\nus/{load.unit}" for load in LOADS)), caption)
    for name, found in measured.items():
        if not found.problem:
            parts = [[found.median(f"{load.name}, {part}") * 1e6 for part in _PARTS] for load in LOADS]
            table.add(name, *(" + ".join(f"{each:.0f}" for each in both) for both in parts))
    return table


@dataclass(frozen=True, slots=True)
class ProxyBar:
    what: str
    reached: float | None
    """None: not measured in this run."""
    at_most: float

    @property
    def met(self) -> bool:
        return self.reached is not None and self.reached <= self.at_most


def _bars(measured: Mapping[str, Measured]) -> list[ProxyBar]:
    ours, beside = measured[OURS], measured[BESIDE]
    bars = [
        ProxyBar(f"{load.name} / {BESIDE}", ours.share(load.name, beside, load.name), load.at_most) for load in LOADS
    ]
    if ours.problem:
        return bars
    return [
        *bars,
        ProxyBar(f"{_MEMORY}, KB", ours.median(_MEMORY), _MEMORY_AT_MOST_KB),
        ProxyBar(f"{_ADDED}, p50, ms", ours.median(_ADDED) * 1e3, _ADDED_AT_MOST_S * 1e3),
    ]


def _bars_table(bars: Sequence[ProxyBar], caption: str) -> TextTable:
    table = TextTable(("bar", "reached", "at most", "met"), caption)
    for bar in bars:
        reached = "not measured" if bar.reached is None else f"{bar.reached:.2f}"
        table.add(bar.what, reached, f"{bar.at_most:g}", "yes" if bar.met else "no")
    return table


class BenchProcess:
    def __init__(
        self,
        command: Sequence[str],
        core: int | None = None,
        *,
        stdout: int = subprocess.DEVNULL,
        stderr: IO[bytes] | int = subprocess.DEVNULL,
    ) -> None:
        """stdout: read by the caller, or a talkative process waits for ever."""

        libc = ctypes.CDLL(None)

        def pin() -> None:
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # a benchmark that is killed leaves no router behind
            if core is not None:
                os.sched_setaffinity(0, {core})

        # HF_ENDPOINT: peers look for a tokenizer when they hear of a worker.
        self._process = subprocess.Popen(
            ["env", "HF_ENDPOINT=http://127.0.0.1:1", *command],
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
            preexec_fn=pin,  # noqa: PLW1509 -- before any thread of ours
        )

    def __enter__(self) -> BenchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class StubProcess(BenchProcess):
    def __init__(self, role: str, dialect: str) -> None:
        command = [sys.executable, "-m", "pdlink_bench.proxy_stub", role, "0", dialect, "events"]
        super().__init__(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = self._process.stdout.readline().strip()

    def __enter__(self) -> StubProcess:
        return self

    @property
    def requests(self) -> int:
        with urllib.request.urlopen(f"{self.url}/seen", timeout=10) as response:
            return int(json.load(response)["requests"])


class RouterProcess(BenchProcess):
    def __init__(
        self, name: str, python: str, workers: Mapping[str, Sequence[StubProcess]], core: int, dialect: str
    ) -> None:
        """workers: by role."""
        self.name, self.measured = name, Measured()
        self.version = version_of("pdlink") if name == OURS else _version_in(python, name)
        self._workers = workers
        self.port = free_ports(2)
        metrics_port = self.port + 1
        self._at = tempfile.TemporaryDirectory(prefix="pdlink-bench-")
        if name == OURS:
            keys = Path(self._at.name, "keys")
            keys.write_text(f"{_KEY}\n", encoding="ascii")
            keys.chmod(0o600)
            command = [sys.executable, "-m", "pdlink", "proxy", "--listen", f"127.0.0.1:{self.port}"]
            # Stand-ins share a core: that one is slow for a while says nothing of it.
            command += ["--dialect", dialect, "--set", f"api_key_file={keys}", "--set", "eject_share=0"]
            command += [f"--{role}={stub.url}" for role, stubs in workers.items() for stub in stubs]
            if dialect == "vllm":  # the others say it themselves
                events = {stub.url: stub.events for stub in workers["prefill"]}
                control = {stub.url: "tcp://127.0.0.1:1" for stub in workers["prefill"]}
                command += ["--set", f"kv_events={json.dumps(events)}", "--set", f"control={json.dumps(control)}"]
        else:
            command = [python, "-m", *_ROUTERS[name].split(), "--port", str(self.port)]
            command += ["--api-key", _KEY, "--prometheus-port", str(metrics_port)]
            for stub in workers["prefill"]:
                command += ["--prefill", stub.url, *_BOOTSTRAP_PORT.get(name, ())]
            for stub in workers["decode"]:
                command += ["--decode", stub.url]
            if not self.version:
                self.measured.problem = f"not tried: {python} has no wheel {name}"
                command = ["true"]
        self._said = Path(self._at.name, "stderr")
        with self._said.open("wb") as said:
            super().__init__(command, core, stderr=said)

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._at.cleanup()

    def wait(self) -> None:
        """Until it serves and is warm, or has a problem."""
        if self.measured.problem:
            return
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", LOADS[0].body(0), headers)
        end_s, last = time.monotonic() + _READY_S, OSError("it ended at once")
        while self._process.poll() is None and time.monotonic() < end_s:
            try:
                with urllib.request.urlopen(request, timeout=5) as response:
                    response.read()
                break
            except OSError as error:
                last = error
                time.sleep(0.1)
        else:
            words = self._said.read_text(encoding="utf-8", errors="replace").strip() or str(last)
            self.measured.problem, self.measured.failed = (
                f"does not serve: {words[-_WORDS_CHARS:]}",
                self.name == OURS,
            )
            return
        for load in LOADS[:-1]:
            asyncio.run(_drive(self.port, load, _WARM_S))

    def turn(self, seconds: float, *, memory: bool) -> None:
        for load in LOADS:
            seen, before = self._seen(), self._cpu_s()
            drive = asyncio.run(_drive(self.port, load, seconds))
            took_s, done = np.subtract(self._cpu_s(), before), len(drive.took_s)
            reached = [now - before for now, before in zip(self._seen(), seen, strict=True)]
            if drive.wrong or not done or min(reached) < done:
                told = f"{load.name}: {done} answers, {drive.wrong} wrong; {reached} requests at prefill and decode"
                self.measured.problem, self.measured.failed = f"failed: {told}", True
                return
            num = done * load.per_request
            self.measured.add(load.name, took_s.sum() / num)
            for part, part_s in zip(_PARTS, took_s, strict=True):
                self.measured.add(f"{load.name}, {part}", part_s / num)
        direct = self._workers["decode"][0].port
        routed_s, direct_s = (asyncio.run(_drive(port, _ALONE, seconds / 4)).median_s for port in (self.port, direct))
        self.measured.add(_ADDED, routed_s - direct_s)
        if memory:
            self.measured.add(_MEMORY, asyncio.run(self._held()))

    def _seen(self) -> list[int]:
        """Requests that came to prefill workers, and to decode workers."""
        return [sum(stub.requests for stub in stubs) for stubs in self._workers.values()]

    async def _held(self) -> float:
        """KB that an open stream takes."""
        before = self._pss_kb()
        protocols = [
            await _Client(self.port, _HOLDING, number=number, drive=_Drive()).connect() for number in range(_HELD)
        ]
        await asyncio.sleep(_SETTLE_S)
        grown = self._pss_kb() - before
        for client in protocols:
            client.transport.abort()
        await asyncio.sleep(_SETTLE_S)
        return grown / _HELD

    def _pids(self) -> list[str]:
        """Of its session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            fields = _stat(stat)
            if fields and int(fields[3]) == self._process.pid:
                found.append(stat.parent.name)
        return found

    def _cpu_s(self) -> tuple[float, float]:
        """In user mode and in the kernel."""
        fields = [each for pid in self._pids() if (each := _stat(Path(f"/proc/{pid}/stat")))]
        user, kernel = (sum(int(each[at]) for each in fields) * _TICK_S for at in (11, 12))
        return user, kernel

    def _pss_kb(self) -> int:
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii") for pid in self._pids()]
        return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Pss:"))


def _stat(path: Path) -> list[str]:
    """Fields from the third on; none if the process is gone."""
    try:
        return path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _version_in(python: str, wheel: str) -> str:
    """Empty if that interpreter has none."""
    code = f"import importlib.metadata; print(importlib.metadata.version({wheel!r}))"
    return subprocess.run([python, "-c", code], check=False, capture_output=True, text=True).stdout.strip()


@dataclass(slots=True)
class _Drive:
    """What the clients of one load saw."""

    took_s: list[float] = field(default_factory=list)
    """Of each answer that came whole."""
    wrong: int = 0
    """Of them, and connections that ended early."""
    going: bool = True

    @property
    def median_s(self) -> float:
        return statistics.median(self.took_s)


class _Client(asyncio.Protocol):
    """Sends a request, and the next one when the answer is whole."""

    transport: asyncio.Transport

    def __init__(self, port: int, load: ProxyLoad, number: int, drive: _Drive) -> None:
        body = load.body(number)
        self._port, self._drive = port, drive
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {_KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._num_tokens = CHUNKS if load.stream else 1
        self.ended = asyncio.get_running_loop().create_future()

    async def connect(self) -> _Client:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)
        self._send()
        return self

    def _send(self) -> None:
        self._answer, self._sent_s = bytearray(), time.perf_counter()
        self.transport.write(self._request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not self._answer.endswith((b"}", b"0\r\n\r\n")):
            return
        head, _, body = bytes(self._answer).partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if len(body) < int(length[1]) if length else not body.endswith(b"0\r\n\r\n"):
            return
        self._drive.took_s.append(time.perf_counter() - self._sent_s)
        if body.count(WORD) != self._num_tokens:  # a word may be in two chunks
            body = re.sub(rb"(?i)\r\n[0-9a-f]+\r\n", b"", body)
        right = b" 200 " in head[:16] and body.count(WORD) == self._num_tokens
        self._drive.wrong += not right or (length is None and b"data: [DONE]" not in body)
        if self._drive.going:
            self._send()
        elif not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self._drive.wrong += 1
            self.ended.set_result(None)


async def _drive(port: int, load: ProxyLoad, seconds: float) -> _Drive:
    """`seconds` long, and until the last answer has ended."""
    drive = _Drive()
    clients = [await _Client(port, load, number=number, drive=drive).connect() for number in range(load.clients)]
    await asyncio.sleep(seconds)
    drive.going = False
    await asyncio.gather(*(client.ended for client in clients))
    for client in clients:
        client.transport.abort()
    await asyncio.sleep(0)  # closes their sockets
    return drive
