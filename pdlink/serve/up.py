"""`pdlink up`: prefill workers, decode workers and a proxy as child processes of this one.

Each child gets its settings through a socket and reports on it when it is ready. The child ends when the socket ends,
so none outlives this process, even after SIGKILL. (Servers of other engines: `serve/engines.py`.) A dead worker is
restarted on the same ports (`serve/keeper.py`), and nothing else: its peers recognise the new epoch. This process
binds the ports first and keeps them bound, without listening: a taken port shows before any model is loaded, and no
other process gets one while its worker is away.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.serve import engines
from pdlink.serve.keeper import ChildFailed, Keeper, how_it_ended, log
from pdlink.serve.process import bind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdlink.config import UpConfig, WorkerConfig
    from pdlink.serve.servers import Server

__all__ = ["START_TIMEOUT_S", "Child", "ChildFailed", "log", "start", "stop", "up"]

START_TIMEOUT_S = 120.0
"""Longest wait for a child to be ready, mostly to load a large model."""

_LOOK_S = 0.05
_WORD_S = 5.0
"""Interval of progress lines while children start."""
_MAX_LINE_NBYTES = 1 << 20
_LAST_WORDS_S = 5.0
"""A child may live this long after it closed its link."""


@dataclass(slots=True)
class Child:
    """One process and the facts it reported when it was ready."""

    label: str
    role: str
    settings: dict[str, Any]
    process: subprocess.Popen[bytes]
    link: socket.socket
    facts: dict[str, Any]
    doing: str = "starting Python"
    """Its progress until it is ready."""
    warnings: list[str] = field(default_factory=list)
    _unsent: bytes = b""
    """The rest of its settings."""
    _heard: bytes = b""

    def look(self) -> bool:
        """Send it what is left of its settings, and read its reports; never waits for it to read or write.

        True once it is ready, with its `facts`. Raises ChildFailed if it failed or ended, whenever that was.
        """
        self._send()
        while _readable(self.link, 0):
            try:
                more = self.link.recv(65536)
            except ConnectionResetError:  # it ended before it had read its settings
                more = b""
            self._heard += more
            if not more or len(self._heard) > _MAX_LINE_NBYTES:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_LAST_WORDS_S)
                self.kill()  # without its link nothing would end it
                how = how_it_ended(self.process.returncode)
                raise ChildFailed(f"{self.label} ended before it was ready: it {how}")
            while b"\n" in self._heard:
                line, _, self._heard = self._heard.partition(b"\n")
                try:
                    message = json.loads(line)
                except ValueError:
                    message = None
                if not isinstance(message, dict):
                    raise ChildFailed(f"{self.label} sent {ascii(line[:80])} in place of a report")
                if self._take(message):
                    return True
        return False

    def _send(self) -> None:
        """Settings may be larger than the buffer of a socket, and the child may not read them."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # `look` sees its end
            while self._unsent:
                self._unsent = self._unsent[self.link.send(self._unsent, socket.MSG_DONTWAIT) :]

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for its facts, and log its warnings. Raises ChildFailed if it dies or is not ready in time."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self.look():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise ChildFailed(f"{self.label} was not ready within {timeout_s:.0f} s")
                _readable(self.link, min(left_s, _LOOK_S if self._unsent else left_s))
        finally:
            _warn_once([self])

    def _take(self, message: dict[str, Any]) -> bool:
        self.doing = message.get("doing", self.doing)
        self.warnings = message.pop("warnings", self.warnings)
        if "failed" in message:
            raise ChildFailed(f"{self.label}: {message['failed']}")
        if "url" not in message:
            return False
        self.facts = message
        return True

    def again(self) -> None:
        """Start it again, on the same ports."""
        self.link.close()
        ports: dict[str, Any] = {key: self.facts[key] for key in ("port", "control_port") if key in self.facts}
        started = start(self.label, self.role, {**self.settings, **ports})
        self.process, self.link, self.doing = started.process, started.link, started.doing
        self._unsent, self._heard = started._unsent, b""

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
    """Start one child. Call `look` or `wait_ready` until it is ready."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = spawn([role, "--label", label], theirs)
    except OSError:
        ours.close()
        raise
    child = Child(label, role, settings, process, ours, {}, _unsent=json.dumps(settings).encode() + b"\n")
    child._send()
    return child


def _readable(link: socket.socket, timeout_s: float) -> bool:
    """Not select(): it takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def spawn(arguments: Sequence[str], link: socket.socket) -> subprocess.Popen[bytes]:
    """Run `pdlink` with these arguments, as a child with this end of a link."""
    return subprocess.Popen(
        [sys.executable, "-m", "pdlink", *arguments, "--parent-fd", str(link.fileno())],
        pass_fds=[link.fileno()],
        start_new_session=True,  # Ctrl-C reaches this process only, so that the children drain in order
    )


def _warn_once(children: Iterable[Child | Server]) -> None:
    """Log the children's warnings of their start: each text once, with the labels of all its children."""
    labels_of: dict[str, list[str]] = {}
    for child in children:
        for text in getattr(child, "warnings", ()):
            labels_of.setdefault(text, []).append(child.label)
    for text, labels in labels_of.items():
        log.warning("%s: %s", ", ".join(labels), text)


def stop(children: Sequence[Child | Server], timeout_s: float) -> None:
    """Let every child drain; kill those left after `timeout_s`."""
    for child in children:
        child.terminate()
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        try:
            child.process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("%s did not end within %g s and is killed", child.label, timeout_s)
            child.kill()
        child.close()


class _Stopped(BaseException):
    """SIGINT or SIGTERM. A BaseException, so that no handler of errors catches it."""


def up(config: UpConfig, say: Callable[[str], None]) -> None:
    """Run the deployment until SIGINT or SIGTERM. Raises ConfigError and ChildFailed.

    say: prints the summary when all are ready; progress is logged.
    """
    stopping = False

    def tell(*_: object) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise _Stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, tell)
    stores: list[Child | Server] = []
    workers: list[Child | Server] = []
    proxies: list[Child | Server] = []
    started_s = time.monotonic()
    with contextlib.ExitStack() as held:
        try:
            proxy_port = _hold(held, config.proxy.host, config.proxy.port, "proxy.port")
            settings = {**config.proxy.model_dump(mode="json"), "port": proxy_port}
            timeout_s = START_TIMEOUT_S
            servers = config.servers
            if servers is not None:
                timeout_s = servers.start_timeout_s
                settings |= engines.start(config, servers, workers, held, _hold)
            else:
                _start_own(config, stores, workers, held)
            _await_all([*stores, *workers], timeout_s)
            settings |= {role: [child.facts["url"] for child in workers if child.role == role] for role in _ROLES}
            proxies.append(start("proxy", "proxy", settings))
            _await_all(proxies, START_TIMEOUT_S)
            say(_picture(config, [*workers, *stores, *proxies], time.monotonic() - started_s))
            kept = [Keeper(child, timeout_s, config.max_failed_starts) for child in [*stores, *workers]]
            kept += [Keeper(child, START_TIMEOUT_S, config.max_failed_starts) for child in proxies]
            while True:
                for keeper in kept:
                    keeper.look()
                time.sleep(0.1)
        except _Stopped:
            return
        finally:
            stopping = True
            # The proxy first: its requests need the workers, and it would warn about workers that leave.
            if workers:
                log.info("stopping; running requests have up to %g s", config.proxy.drain_s)
            stop(proxies, config.proxy.drain_s + 5)
            stop(workers, max(config.prefill.timeouts.drain_s, config.decode.timeouts.drain_s) + 5)
            stop(stores, _STORE_END_S)


_ROLES = ("prefill", "decode")
_STORE_END_S = 60.0
"""A store writes what waits for its tiers first."""


def _hold(held: contextlib.ExitStack, host: str, port: int, setting: str) -> int:
    """Bind a port, free or configured, for a child to listen on. Raises ConfigError if it is taken."""
    bound = bind(host, port, setting)
    held.callback(bound.close)
    found: int = bound.getsockname()[1]
    return found


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return host == "localhost"


def _await_all(children: Sequence[Child | Server], timeout_s: float) -> None:
    """Return when all are ready, and log their progress. Raises ChildFailed for the first failure."""
    began_s = said_s = time.monotonic()
    log.info("starting %s", ", ".join(child.label for child in children))
    waiting = list(children)
    try:
        while waiting:
            for child in [child for child in waiting if child.look()]:
                waiting.remove(child)
                log.info("%s is ready after %.1f s", child.label, time.monotonic() - began_s)
            now_s = time.monotonic()
            if waiting and now_s - began_s > timeout_s:
                names = ", ".join(f"{child.label} ({child.doing})" for child in waiting)
                raise ChildFailed(f"not ready within {timeout_s:.0f} s: {names}")
            if waiting and now_s - said_s > _WORD_S:
                said_s = now_s
                doing = "; ".join(f"{child.label}: {child.doing}" for child in waiting)
                log.info("%.0f s: %s", now_s - began_s, doing)
            time.sleep(_LOOK_S)
    finally:
        _warn_once(children)


def worker_settings(side: str, worker: WorkerConfig, count: int) -> dict[str, dict[str, Any]]:
    """Label to settings of every worker of one side. Ports other than 0 count up."""
    settings = worker.model_dump(mode="json")
    found = {}
    for index in range(count):
        label = worker.name or f"{side}-{index}"
        own: dict[str, Any] = {"name": worker.name if worker.security.key_file else label}
        own |= {key: settings[key] + index for key in ("port", "control_port") if settings[key]}
        found[label] = settings | own
    return found


def _start_own(
    config: UpConfig, stores: list[Child | Server], workers: list[Child | Server], held: contextlib.ExitStack
) -> None:
    from pdlink.engine.places import find_model

    sides = {"prefill": (config.prefill, config.num_prefill), "decode": (config.decode, config.num_decode)}
    for worker, _ in sides.values():
        find_model(worker.model)
    plans = [
        (label, side, settings)
        for side, (worker, count) in sides.items()
        for label, settings in worker_settings(side, worker, count).items()
    ]
    for _, side, settings in plans:  # all ports before the first model is loaded
        settings["port"] = _hold(held, settings["host"], settings["port"], f"{side}.port")
        if _is_address(settings["control_host"]):
            port = _hold(held, settings["control_host"], settings["control_port"], f"{side}.control_port")
            settings["control_port"] = port
    if config.share_store:
        settings = config.store.model_dump(mode="json")
        settings["port"] = _hold(held, settings["host"], settings["port"], "store.port")
        stores.append(start(config.store.name, "store", settings))
        for _, _, settings in plans:
            settings["tiers"] = {**settings["tiers"], "store": config.store.listen}
    workers.extend(start(label, side, settings) for label, side, settings in plans)


def _picture(config: UpConfig, children: list[Child | Server], took_s: float) -> str:
    """All children with their addresses, and a line to try it with."""
    proxy = children[-1].facts["url"]
    servers = config.servers
    if servers is not None:
        model, how = servers.model_name, engines.describe(servers)
    else:
        facts = children[0].facts
        model, how = facts["model"], f"KV over {' or '.join(facts['transports'])}"
    lines = [f"ready in {took_s:.1f} s: model {model}, {how}", ""]
    for child in children:
        control = child.facts.get("control", "")
        lines.append(f"  {child.label:<12}{child.facts['url']:<28}{control and 'control ' + control}")
    if config.model is None and servers is None:
        lines += ["", "The model has random weights, so its text is noise; what counts is that its KV crosses."]
    body = json.dumps({"model": model, "prompt": "The KV cache crosses over", "max_tokens": 32, "stream": True})
    lines += [
        "",
        "try it:",
        f"  curl -N {proxy}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        "",
        "see where the KV goes, and where the time to the first token goes:",
        f"  {proxy}/pdlink/          in a browser",
        f"  {_command()} top {proxy}       in a terminal",
        "",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)


def _command() -> str:
    """What to type for pdlink; with its folder where that is not on the PATH, as after `make up`."""
    return "pdlink" if shutil.which("pdlink") else str(Path(sys.executable).with_name("pdlink"))
