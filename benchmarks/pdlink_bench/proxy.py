"""`pdlink bench proxy`: CPU of a routed request, beside other routers, in turns on the same stand-ins for workers.

The figure is the CPU that a router's processes used, per request or per streamed event: with few cores, latencies say
more about the run queue than about the router. The router has one core, stand-ins and clients have the others. Peers
route with round robin and without health checks, which is less than they do in earnest; ours runs as it is shipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.commands.parser import positive, positive_float
from pdlink.fleet.ports import free_ports

from . import harness, plot
from .harness import BenchReport, TextTable, in_turns
from .measure import Measured, spread
from .proxy_stub import CHUNKS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rich.progress import Progress

_READY_S = 60.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_HELD = 400
"""Streams that are open at once for the figure of memory."""
_SETTLE_S = 1.0

_ROUTERS = {
    # Versions that these lines were written for: 0.3.2, 0.1.17, 1.13.0.
    "sglang-router": "-m sglang_router.launch_router --pd-disaggregation --policy {policy} --disable-health-check "
    "--log-level warn",
    "vllm-router": "-m vllm_router.launch_router --vllm-pd-disaggregation --policy {policy} --log-level warning",
    "smg": "-m smg.launch_router --pd-disaggregation --policy {policy} --log-level warn",
}
_BOOTSTRAP_PORT = {"sglang-router": ("9900",)}
"""What follows the URL of a prefill worker."""
OURS = "pdlink"
NGINX = "nginx, one leg"
"""What passing bytes costs without knowing what they are: it sends each request to decode alone."""

_NGINX_CONF = """daemon off; master_process off; pid {at}/pid; error_log /dev/null; worker_rlimit_nofile 4096;
events {{ worker_connections 2048; }}
http {{
  access_log off; client_body_temp_path {at}/body; proxy_temp_path {at}/proxy; fastcgi_temp_path {at}/f;
  uwsgi_temp_path {at}/u; scgi_temp_path {at}/s; client_body_buffer_size 1m;
  upstream decode {{ server {decode}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024; keepalive_requests 1000000;
    location / {{
      proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class ProxyLoad:
    """Clients that each send one request after the other."""

    name: str
    body: bytes
    clients: int
    unit: str
    per_request: int = 1
    """Units in a request."""


def _body(prompt: str, *, stream: bool) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 128, "stream": stream}).encode()


LOADS = (
    ProxyLoad("small request", _body("hello", stream=False), 64, "request"),
    ProxyLoad("prompt of 4k tokens (16 KB of text)", _body("word" * 4096, stream=False), 32, "request"),
    ProxyLoad(f"stream of {CHUNKS} events at once", _body("hello", stream=True), 16, "request"),
    ProxyLoad("64 paced streams", _body("paced", stream=True), 64, "event", CHUNKS),
)
_MEMORY = "open stream"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench proxy`."""
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each router; default %(default)s")
    parser.add_argument("--seconds", type=positive_float, default=3.0, help="of each load; default %(default)s")
    parser.add_argument(
        "--workers",
        type=positive,
        default=1,
        help="on each side; default %(default)s. With more the routers look for prompts' beginnings (policy "
        "cache_aware; pdlink's own default), nginx uses one",
    )
    parser.add_argument(
        "--routers",
        metavar="PYTHON",
        default=sys.executable,
        help="interpreter that has the wheels sglang-router, vllm-router, smg; default this one",
    )
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if a router failed."""
    return harness.run("proxy", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[1:] or cores
    task = progress.add_task("start", total=1 + args.rounds * (len(_ROUTERS) + 2))
    os.sched_setaffinity(0, mine)
    try:
        with ExitStack() as stack:
            workers = {
                role: tuple(stack.enter_context(StubProcess(role)).url for _ in range(args.workers))
                for role in ("prefill", "decode")
            }
            routers = [
                stack.enter_context(RouterProcess(name, args.routers, workers, cores[0]))
                for name in (OURS, *_ROUTERS, NGINX)
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
    return BenchReport(
        {"rounds": args.rounds, "workers": args.workers, "routers": measured},
        [_table(measured)],
        [_panel(measured)],
        problems=measured,
    )


def _table(measured: dict[str, Measured]) -> TextTable:
    columns = [*(f"{load.name}\nus/{load.unit}" for load in LOADS), f"{_MEMORY}\nKB of {_HELD}"]
    table = TextTable(("CPU: median (p10..p90)", *columns))
    for name, found in measured.items():
        if not found.problem:
            cells = [spread(summary, 1e6, 0) for load in LOADS if (summary := found.summary(load.name))]
            table.add(name, *cells, f"{found.median(_MEMORY):.1f}")
    ours = measured[OURS]
    for name, found in measured.items():
        if name != OURS and not found.problem and not ours.problem:
            shares = [ours.share(load.name, found, load.name) for load in LOADS]
            table.add(f"{OURS} / {name}", *(f"{share:.2f}" for share in shares if share is not None), "")
    return table


def _panel(measured: dict[str, Measured]) -> plot.Panel:
    groups = {
        f"{load.name}\n(us/{load.unit})": [
            plot.PlottedBar.of(name, summary, lambda seconds: seconds * 1e6)
            for name, found in measured.items()
            if (summary := found.summary(load.name))
        ]
        for load in LOADS
    }
    return plot.Bars("CPU of the router", "us (p10 to p90)", groups)


class BenchProcess:
    def __init__(self, command: Sequence[str], core: int | None = None, *, stdout: int = subprocess.DEVNULL) -> None:
        """stdout: read by the caller, or a talkative process waits for ever."""

        def pin() -> None:
            if core is not None:
                os.sched_setaffinity(0, {core})

        # HF_ENDPOINT: peers look for a tokenizer when they hear of a worker.
        self._process = subprocess.Popen(
            ["env", "HF_ENDPOINT=http://127.0.0.1:1", *command],
            stdout=stdout,
            stderr=subprocess.DEVNULL,
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
    def __init__(self, role: str) -> None:
        super().__init__([sys.executable, "-m", "pdlink_bench.proxy_stub", role], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def __enter__(self) -> StubProcess:
        return self


class RouterProcess(BenchProcess):
    def __init__(self, name: str, python: str, workers: Mapping[str, Sequence[str]], core: int) -> None:
        """workers: URLs by role."""
        self.name, self.measured = name, Measured()
        self.port = free_ports(2)
        metrics_port = self.port + 1
        self._at = tempfile.TemporaryDirectory(prefix="pdlink-bench-")
        if name == NGINX:
            conf = Path(self._at.name, "nginx.conf")
            decode = workers["decode"][0].removeprefix("http://")
            conf.write_text(_NGINX_CONF.format(at=self._at.name, decode=decode, port=self.port), encoding="ascii")
            nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin") or "nginx"
            command = [nginx, "-c", str(conf)]
        elif name == OURS:
            command = [sys.executable, "-m", "pdlink", "proxy", "--listen", f"127.0.0.1:{self.port}"]
            command += [f"--{role}={url}" for role, urls in workers.items() for url in urls]
        else:
            policy = "round_robin" if len(workers["decode"]) == 1 else "cache_aware"
            command = [python, *_ROUTERS[name].format(policy=policy).split(), "--port", str(self.port)]
            for url in workers["prefill"]:
                command += ["--prefill", url, *_BOOTSTRAP_PORT.get(name, ())]
            for url in workers["decode"]:
                command += ["--decode", url]
            command += ["--prometheus-port", str(metrics_port)]
        super().__init__(command, core)

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._at.cleanup()

    def wait(self) -> None:
        """Until it serves, or has a problem."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", LOADS[0].body, {"Content-Type": "application/json"}
        )
        end_s = time.monotonic() + _READY_S
        while self._process.poll() is None and time.monotonic() < end_s:
            try:
                with urllib.request.urlopen(request, timeout=5) as response:
                    response.read()
                    return
            except OSError:
                time.sleep(0.1)
        wheel = {OURS: "", NGINX: "; is nginx installed?"}.get(
            self.name, f"; is the wheel installed? pip install {self.name}"
        )
        self.measured.problem, self.measured.failed = f"does not serve{wheel}", self.name == OURS

    def turn(self, seconds: float, *, memory: bool) -> None:
        for load in LOADS:
            before_s = self._cpu_s()
            done, wrong = asyncio.run(_drive(self.port, load, seconds))
            if wrong or not done:
                self.measured.problem, self.measured.failed = f"{load.name}: {done} answers, {wrong} wrong", True
                return
            self.measured.add(load.name, (self._cpu_s() - before_s) / (done * load.per_request))
        if memory:
            self.measured.add(_MEMORY, asyncio.run(self._held()))

    async def _held(self) -> float:
        """KB that an open stream takes."""
        body, before = _body("held", stream=True), self._pss_kb()
        protocols = []
        for _ in range(_HELD):
            _, client = await asyncio.get_running_loop().create_connection(
                lambda: _Client(self.port, body), "127.0.0.1", self.port
            )
            client.send()
            protocols.append(client)
        await asyncio.sleep(_SETTLE_S)
        grown = self._pss_kb() - before
        for client in protocols:
            client.close()
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

    def _cpu_s(self) -> float:
        fields = [_stat(Path(f"/proc/{pid}/stat")) for pid in self._pids()]
        return sum(int(each[11]) + int(each[12]) for each in fields if each) * _TICK_S

    def _pss_kb(self) -> int:
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii") for pid in self._pids()]
        return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Pss:"))


def _stat(path: Path) -> list[str]:
    """Fields from the third on; none if the process is gone."""
    try:
        return path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


class _Client(asyncio.Protocol):
    """Sends a request, and the next one when the answer is whole."""

    def __init__(self, port: int, body: bytes) -> None:
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.done = self.wrong = 0
        self.going = False
        self.ended = asyncio.get_running_loop().create_future()
        self._held = b""
        self._transport: asyncio.Transport | None = None

    def send(self) -> None:
        self._held = b""
        assert self._transport is not None
        self._transport.write(self._request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, found, body = self._held.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length:")
        if at >= 0:
            whole = len(body) >= int(head[at + 15 :].split(b"\r\n", 1)[0])
        else:
            whole = body.endswith(b"0\r\n\r\n")
            if not whole and len(body) > 512:  # it is searched again with every event
                self._held = head + b"\r\n\r\n" + body[-64:]
        if whole:
            self.done += 1
            self.wrong += b" 200 " not in head[:16]
            if self.going:
                self.send()
            elif not self.ended.done():
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.wrong += 1
            self.ended.set_result(None)


async def _drive(port: int, load: ProxyLoad, seconds: float) -> tuple[int, int]:
    """Answers that came whole, and how many were wrong; `seconds` long, and until the last one has ended."""
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: _Client(port, load.body), "127.0.0.1", port))[1]
        for _ in range(load.clients)
    ]
    for client in clients:
        client.going = True
        client.send()
    await asyncio.sleep(seconds)
    for client in clients:
        client.going = False
    await asyncio.gather(*(client.ended for client in clients))
    for client in clients:
        client.close()
    return sum(client.done for client in clients), sum(client.wrong for client in clients)
