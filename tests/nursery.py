"""Starts processes by forking one that has imported everything: a worker takes 0.7 s of CPU time instead of 6.

The nursery is a process without threads that imports what its forks need, loads what numba has compiled, and runs
nothing else of it. A fork goes on as a new process would, in a process group of its own, with the caller's
environment, folder and outputs. It ends as one, too, but leaves the memory of the interpreter to the kernel: to give
back all that the nursery has imported takes each fork more time than it has lived (1.1 s of 0.3 s). `WHOLE_END` makes
it do that. What `pdlink up` starts by itself, in tests/e2e/test_up.py, does not come from here.

    python -m tests.nursery FD

FD: a socket of messages. Each asks for a fork, along with its descriptors, or for the exit status of one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WORKERS = ("pdlink.serve.roles", "pdlink.serve.app", "pdlink.serve.worker", "pdlink_proxy.app")
"""What the main function of `pdlink` imports when it is needed."""
WHOLE_END = "TESTS_WHOLE_END"
"""Set in the environment of a fork whose interpreter is to be finalised."""
_MESSAGE_NBYTES = 1 << 18
_MAX_DESCRIPTORS = 8
_END_S = 60.0


class Forked(subprocess.Popen[bytes]):
    """A fork of the nursery, as if it were a child of this process."""

    def __init__(self, nursery: Nursery, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args, self.returncode = pid, args, None
        self.stdin = self.stdout = self.stderr = None
        self._nursery, self._pidfd = nursery, os.pidfd_open(pid)
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            wait_ms = None if timeout is None else 1000.0 * timeout
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(wait_ms):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with self._reaping:
                if self.returncode is None:
                    self.returncode = self._nursery.reap(self.pid)
                    os.close(self._pidfd)
        return self.returncode

    def __del__(self) -> None:
        """Without what Popen does, which is for children of this process."""
        if self.returncode is None:
            os.close(self._pidfd)


class Nursery:
    """The process that is forked; started when it is needed first. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def spawn(self, arguments: Sequence[str], link: socket.socket, module: str = "pdlink") -> Forked:
        """As `pdlink.fleet.child.spawn`."""
        program = "pdlink.cli" if module == "pdlink" else module
        return self.fork(program, "main", arguments, [0, 1, 2], link=link.fileno(), imports=_WORKERS)

    def fork(
        self,
        module: str,
        function: str,
        arguments: Sequence[str],
        standard: Sequence[int],
        *,
        link: int | None = None,
        imports: Sequence[str] = (),
    ) -> Forked:
        """Run `function(arguments)` in a fork, which exits with what it returns.

        standard: descriptors for stdin, stdout and stderr. link: one more, which the arguments name as `--parent-fd`.
        imports: modules that the nursery imports before it forks, besides `module`.
        """
        order = {
            "imports": [*imports, module],
            "function": function,
            "arguments": list(arguments),
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
        }
        descriptors = [*standard] if link is None else [*standard, link]
        return Forked(self, self._ask(order, descriptors), [module, *arguments])

    def reap(self, pid: int) -> int:
        """The exit status of a fork that has ended."""
        return self._ask({"reap": pid}, [])

    def close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(_END_S)
            self._process = self._control = None

    def _ask(self, order: Mapping[str, object], descriptors: list[int]) -> int:
        with self._lock:
            if self._control is None:
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    command = [sys.executable, "-m", "tests.nursery", str(theirs.fileno())]
                    root = Path(__file__).parents[1]
                    self._process = subprocess.Popen(
                        command, pass_fds=[theirs.fileno()], cwd=root, start_new_session=True
                    )
            socket.send_fds(self._control, [json.dumps(order).encode()], descriptors)
            return int(self._control.recv(64))


NURSERY = Nursery()
"""The one of this test run."""


def _serve(control: socket.socket) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_NBYTES, _MAX_DESCRIPTORS)
        if not message:
            return
        order = json.loads(message)
        if "reap" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])
        else:
            new = [name for name in order["imports"] if name not in sys.modules]
            for name in new:
                importlib.import_module(name)
            if "pdlink.kv.plan" in sys.modules:
                sys.modules["pdlink.kv.plan"].warm_up()
            if new:
                gc.collect()
                gc.freeze()
            if (answer := os.fork()) == 0:
                control.close()
                _run(order, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(answer).encode())


def _run(order: dict[str, Any], descriptors: list[int]) -> None:
    """What a new process would do; does not return."""
    module, arguments = order["imports"][-1], order["arguments"]
    os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for place, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, place)
        os.close(descriptor)
    if descriptors[3:]:
        arguments += ["--parent-fd", str(descriptors[3])]
    sys.argv = [module, *arguments]
    try:
        sys.exit(getattr(sys.modules[module], order["function"])(arguments))
    except SystemExit as end:
        if os.environ.get(WHOLE_END) or not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
