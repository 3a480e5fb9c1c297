"""`pdlink up`: prefill workers, decode workers and a proxy as child processes of this one.

Each child gets its settings through a socket and says on it when it is ready; the socket's end is its signal to
leave, so nothing is left behind even if this process is killed. A worker that dies is started again on the same
ports, and nothing else is restarted: the others find it by its new epoch.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdlink.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import UpConfig

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


def stop(children: list[Child], timeout_s: float) -> None:
    """Tell every child to drain; kill what is still there after `timeout_s`."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        try:
            child.process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.link.close()


def up(config: UpConfig, say: Callable[[str], None]) -> None:
    """Run the deployment until SIGINT or SIGTERM."""
    told = [False]

    def tell(*_: object) -> None:
        told[0] = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, tell)
    children: list[Child] = []
    started_s = time.monotonic()
    try:
        prefill = config.prefill.model_dump(mode="json")
        decode = config.decode.model_dump(mode="json")
        for role, settings, count in (
            ("prefill", prefill, config.num_prefill),
            ("decode", decode, config.num_decode),
        ):
            children += [
                start(f"{role}-{index}", role, {**settings, "role": role, "name": f"{role}-{index}"})
                for index in range(count)
            ]
        for child in children:
            say(f"starting {child.label} ...")
            wait_ready(child)
        urls = {
            role: [child.facts["url"] for child in children if child.role == role] for role in ("prefill", "decode")
        }
        proxy = start("proxy", "proxy", {**config.proxy.model_dump(mode="json"), **urls})
        children.append(proxy)
        wait_ready(proxy)
        say(_picture(children, time.monotonic() - started_s))
        while not told[0]:
            for child in children:
                if child.process.poll() is not None and not told[0]:
                    _restart(child, say)
            time.sleep(0.1)
    finally:
        say("stopping ...")
        stop(children, max(config.proxy.drain_s, config.prefill.timeouts.drain_s, config.decode.timeouts.drain_s) + 5)


def _restart(child: Child, say: Callable[[str], None]) -> None:
    """The same process again, on the ports it had."""
    say(f"{child.label} ended with status {child.process.returncode}; starting it again on the same ports")
    child.link.close()
    ports: dict[str, Any] = {key: child.facts[key] for key in ("port", "control_port") if key in child.facts}
    again = start(child.label, child.role, {**child.settings, **ports})
    child.process, child.link = again.process, again.link
    wait_ready(child)
    say(f"{child.label} is back")


def _picture(children: list[Child], took_s: float) -> str:
    """What is running where, and a line to try it with."""
    proxy = children[-1].facts["url"]
    model = children[0].facts["model"]
    lines = [f"ready in {took_s:.1f} s: model {model}, KV over {' or '.join(children[0].facts['transports'])}", ""]
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
        f"  curl -s {children[0].facts['url']}/metrics | grep pdlink_transfer_bytes",
        "",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)
