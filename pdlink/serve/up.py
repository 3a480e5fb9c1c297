"""`pdlink up`: prefill workers, decode workers and a proxy as child processes of this one.

Each child of ours gets its settings through a socket and says on it when it is ready; the socket's end is its signal
to leave, so nothing is left behind even if this process is killed. (vLLM's servers: `serve/vllm.py`.) A worker that
dies is started again on the same ports, and nothing else is restarted: the others find it by its new epoch.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import UpConfig
    from pdlink.serve.vllm import Server

START_TIMEOUT_S = 120.0
"""Longest wait for a child to be ready; loading a large model takes most of it."""


class ChildFailed(LocalError):
    """A process of the deployment could not be started."""

    code = "child_failed"


@dataclass(slots=True)
class Child:
    """One process and what it said when it was ready."""

    label: str
    role: str
    settings: dict[str, Any]
    process: subprocess.Popen[bytes]
    link: socket.socket
    facts: dict[str, Any]

    def wait_ready(self, timeout_s: float) -> None:
        wait_ready(self, timeout_s)

    def again(self) -> None:
        """The same process once more, on the ports it had."""
        self.link.close()
        ports: dict[str, Any] = {key: self.facts[key] for key in ("port", "control_port") if key in self.facts}
        started = start(self.label, self.role, {**self.settings, **ports})
        self.process, self.link = started.process, started.link

    def terminate(self) -> None:
        """Ask it to drain and end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.link.close()


def start(label: str, role: str, settings: dict[str, Any]) -> Child:
    """Start one child; `wait_ready` tells when it can be used."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdlink", role, "--parent-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches us only; we tell the children, so that they drain in order
        )
    ours.sendall(json.dumps(settings).encode() + b"\n")
    return Child(label, role, settings, process, ours, {})


def wait_ready(child: Child, timeout_s: float = START_TIMEOUT_S) -> None:
    """Fill in `child.facts`. Raises ChildFailed if it dies or is not ready in time; its own words are on stderr."""
    deadline_s = time.monotonic() + timeout_s
    text = b""
    while not text.endswith(b"\n"):
        readable, _, _ = select.select([child.link], [], [], max(0.0, deadline_s - time.monotonic()))
        if not readable:
            raise ChildFailed(f"{child.label} was not ready within {timeout_s:.0f} s")
        more = child.link.recv(65536)
        if not more:
            raise ChildFailed(f"{child.label} ended before it was ready (exit status {child.process.wait(5)})")
        text += more
    child.facts = json.loads(text)


def stop(children: Sequence[Child | Server], timeout_s: float) -> None:
    """Tell every child to drain; kill what is still there after `timeout_s`."""
    for child in children:
        child.terminate()
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        try:
            child.process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
        child.close()


class _Told(BaseException):
    """SIGINT or SIGTERM, wherever they came; no handler of other errors takes it for one."""


def up(config: UpConfig, say: Callable[[str], None]) -> None:
    """Run the deployment until SIGINT or SIGTERM."""
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        if not told:
            told = True
            raise _Told

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, tell)
    children: list[Child | Server] = []
    started_s = time.monotonic()
    drain_s = max(config.proxy.drain_s, config.prefill.timeouts.drain_s, config.decode.timeouts.drain_s)
    with contextlib.ExitStack() as held:
        try:
            if config.engine == "vllm":
                timeout_s = config.vllm.start_timeout_s
                settings = _start_vllm(config, children, held, say)
            else:
                timeout_s, settings = START_TIMEOUT_S, {}
                _start_own(config, children)
            for child in children:
                say(f"starting {child.label} ...")
                child.wait_ready(timeout_s)
            urls = {role: [child.facts["url"] for child in children if child.role == role] for role in _ROLES}
            proxy = start("proxy", "proxy", {**config.proxy.model_dump(mode="json"), **urls, **settings})
            children.append(proxy)
            proxy.wait_ready(START_TIMEOUT_S)
            say(_picture(config, children, time.monotonic() - started_s))
            while True:
                for child in children:
                    if child.process.poll() is not None:
                        _restart(child, timeout_s, say)
                time.sleep(0.1)
        except _Told:
            return
        finally:
            told = True
            say("stopping ...")
            stop(children, drain_s + 5)


_ROLES = ("prefill", "decode")


def _start_own(config: UpConfig, children: list[Child | Server]) -> None:
    workers = (config.prefill, config.num_prefill), (config.decode, config.num_decode)
    for role, (worker, count) in zip(_ROLES, workers, strict=True):
        settings = {**worker.model_dump(mode="json"), "role": role}
        for index in range(count):
            label = f"{role}-{index}"
            children.append(start(label, role, {**settings, "name": label}))


def _start_vllm(
    config: UpConfig, children: list[Child | Server], held: contextlib.ExitStack, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start vLLM's servers; returns what the proxy must know of them. held: what lives as long as they do."""
    from pdlink.serve import vllm

    executable = vllm.find_executable(config.vllm.executable)
    directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="pdlink-vllm-")))
    model = config.vllm.model
    if model is None:
        from pdlink.serve.checkpoint import write_checkpoint

        model = str(directory / "model")
        write_checkpoint(Path(model))
    log_dir = Path(config.vllm.log_dir or directory)
    log_dir.mkdir(parents=True, exist_ok=True)
    plans = vllm.plan(config.vllm, config.num_prefill, config.num_decode, executable=executable, model=model)
    say(f"vLLM's own output: {log_dir}/*.log")
    children.extend(
        vllm.Server(plan, log_dir) for plan in plans
    )  # one by one: those started are ended, whatever comes
    return vllm.proxy_settings(config.vllm, plans)


def _restart(child: Child | Server, timeout_s: float, say: Callable[[str], None]) -> None:
    """The same process again, on the ports it had."""
    say(f"{child.label} ended with status {child.process.returncode}; starting it again on the same ports")
    child.again()
    child.wait_ready(timeout_s)
    say(f"{child.label} is back")


def _picture(config: UpConfig, children: list[Child | Server], took_s: float) -> str:
    """What is running where, and a line to try it with."""
    proxy = children[-1].facts["url"]
    if config.engine == "vllm":
        model, how = config.vllm.model_name, f"vLLM with {config.vllm.connector}'s connector"
        metrics = "vllm:pdlink_" if config.vllm.connector == "pdlink" else "vllm:nixl_"
    else:
        facts = children[0].facts
        model, how, metrics = facts["model"], f"KV over {' or '.join(facts['transports'])}", "pdlink_transfer_bytes"
    lines = [f"ready in {took_s:.1f} s: model {model}, {how}", ""]
    for child in children:
        control = child.facts.get("control", "")
        lines.append(f"  {child.label:<12}{child.facts['url']:<28}{control and 'control ' + control}")
    body = json.dumps({"model": model, "prompt": "The KV cache crosses over", "max_tokens": 32, "stream": True})
    lines += [
        "",
        "try it:",
        f"  curl -N {proxy}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        "",
        "where the KV went:",
        f"  curl -s {children[0].facts['url']}/metrics | grep {metrics}",
        "",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)
