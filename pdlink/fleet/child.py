"""`Child`: one process of ours, which gets its settings through a socket and reports on it until it is ready.

The child ends when the socket ends, so none outlives this process, even after SIGKILL. Nothing here waits for a
child, and none of them can end its supervisor: whatever a child does with its end of the socket, and whenever it
ends, is ChildFailed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pdlink.config.listen import ListenConfig, place_of
from pdlink.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

log = logging.getLogger("pdlink.up")

START_TIMEOUT_S = 120.0
"""Longest wait for a child to be ready, mostly to load a large model."""
_LOOK_S = 0.01
_MAX_LINE_NBYTES = 1 << 20
_LAST_WORDS_S = 5.0
"""A child may live this long after it closed its link."""


class ChildFailed(LocalError):
    """A process of `pdlink up` ended before it was ready; the message has its last words."""

    code = "child_failed"


class Restartable(Protocol):
    """A process that can be started again: a `Child`, or an engine's `Server`."""

    label: str
    role: str
    process: Any
    """subprocess.Popen of its present life."""
    facts: dict[str, Any]
    """Complete once it is ready: `url`, perhaps `control` and more."""
    doing: str
    """Its progress until it is ready."""
    warnings: list[str]
    """Of its start."""

    def look(self) -> bool:
        """Whether it is ready. Raises ChildFailed if it has ended or failed."""
        ...

    def again(self) -> None:
        """Start it again, on the same ports."""
        ...

    def terminate(self) -> None:
        """Ask it to drain and end."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...

    def close(self) -> None:
        """Give up what this process holds of it."""
        ...


def how_it_ended(status: int) -> str:
    """An exit status in words: "was killed by SIGKILL"."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


@dataclass(slots=True)
class Child:
    """One process and the facts it reported when it was ready."""

    label: str
    role: str
    settings: dict[str, Any]
    process: subprocess.Popen[bytes]
    link: socket.socket
    facts: dict[str, Any]
    module: str = "pdlink"
    """The program."""
    doing: str = "starting Python"
    warnings: list[str] = field(default_factory=list)
    _unsent: bytes = b""
    """The rest of its settings."""
    _heard: bytes = b""
    _closed_s: float | None = None
    """When it closed its link, before it was ready."""

    def look(self) -> bool:
        """Send it what is left of its settings, and read its reports; never waits for it to read or write.

        True once it is ready, with its `facts`. Raises ChildFailed if it failed or ended, whenever that was.
        """
        self._send()
        while self._closed_s is None and _readable(self.link):
            try:
                more = self.link.recv(65536)
            except ConnectionResetError:  # it ended before it had read its settings
                more = b""
            self._heard += more
            if not more or len(self._heard) > _MAX_LINE_NBYTES:
                self._closed_s = time.monotonic()
            while b"\n" in self._heard:
                line, _, self._heard = self._heard.partition(b"\n")
                if self._take(line):
                    return True
        if self._closed_s is None:
            return False
        if self.process.poll() is None and time.monotonic() - self._closed_s < _LAST_WORDS_S:
            return False
        self.kill()  # without its link nothing would end it
        raise ChildFailed(f"{self.label} ended before it was ready: it {how_it_ended(self.process.returncode)}")

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for its facts, and log its warnings. Raises ChildFailed if it dies or is not ready in time."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self.look():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise ChildFailed(f"{self.label} was not ready within {timeout_s:.0f} s")
                time.sleep(min(left_s, _LOOK_S))
        finally:
            warn_once([(self.label, self.warnings)])

    def again(self) -> None:
        """Start it again, on the same ports."""
        self.link.close()
        started = start(self.label, self.role, listening_on(self.settings, self.facts), self.module)
        self.process, self.link, self.doing = started.process, started.link, started.doing
        self._unsent, self._heard, self._closed_s = started._unsent, b"", None

    def terminate(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.link.close()

    def _send(self) -> None:
        """Settings may be larger than the buffer of a socket, and the child may not read them."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # `look` sees its end
            while self._unsent:
                self._unsent = self._unsent[self.link.send(self._unsent, socket.MSG_DONTWAIT) :]

    def _take(self, line: bytes) -> bool:
        """One report; whether it is ready. Raises ChildFailed."""
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ChildFailed(f"{self.label} sent {ascii(line[:80])} in place of a report")
        self.doing = message.get("doing", self.doing)
        self.warnings = message.pop("warnings", self.warnings)
        if "failed" in message:
            raise ChildFailed(f"{self.label}: {message['failed']}")
        if "url" not in message:
            return False
        self.facts = message
        return True


def listening_on(settings: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Settings of a child with the ports that it had."""
    if "port" not in facts:
        return settings
    if isinstance(settings["listen"], str):  # a proxy's
        return {**settings, "listen": str(place_of(settings["listen"])._replace(port=facts["port"]))}
    listen = ListenConfig.model_validate(settings["listen"])
    listen = listen.on(http=facts["port"], control=facts.get("control_port"))
    return {**settings, "listen": listen.model_dump()}


def start(label: str, role: str, settings: dict[str, Any], module: str = "pdlink") -> Child:
    """Start one child. Call `look` or `wait_ready` until it is ready. module: a program that takes pdlink's words."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = spawn([role, "--label", label], theirs, module)
    except OSError:
        ours.close()
        raise
    text = json.dumps(settings).encode() + b"\n"
    child = Child(label, role, settings, process, ours, {}, module, _unsent=text)
    child._send()
    return child


def _readable(link: socket.socket) -> bool:
    """Not select(): it takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(0))


def spawn(arguments: Sequence[str], link: socket.socket, module: str) -> subprocess.Popen[bytes]:
    """Run a module with these arguments, as a child with this end of a link."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments, "--parent-fd", str(link.fileno())],
        pass_fds=[link.fileno()],
        start_new_session=True,  # Ctrl-C reaches this process only, so that the children drain in order
    )


def warn_once(said: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Log warnings of starts, by label: each text once, with the labels of all that gave it."""
    labels_of: dict[str, list[str]] = {}
    for label, texts in said:
        for text in texts:
            labels_of.setdefault(text, []).append(label)
    for text, labels in labels_of.items():
        log.warning("%s: %s", ", ".join(labels), text)


def stop(children: Sequence[Restartable], timeout_s: float) -> None:
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
