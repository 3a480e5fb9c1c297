"""An object in a process of its own, told what to do by lines of JSON over pipes.

The process is a fork of the tests' nursery. The pipes end with the test, so it ends with it too, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.nursery import NURSERY

PATIENCE_S = 60.0
_PROC = Path("/proc")


class OtherProcess:
    """The test's handle: `call` a method of the object, and stop, resume or kill its process."""

    def __init__(self, module: str, *arguments: str) -> None:
        """The process runs the module's `serve(arguments)`, which hands its object to `answer_calls`."""
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        self.process = NURSERY.fork(module, "serve", arguments, [stdin, stdout, 2])
        os.close(stdin)
        os.close(stdout)
        self._answers = b""

    def call(self, verb: str, *arguments: object) -> Any:
        self.send(verb, *arguments)
        return self.answer()

    def send(self, verb: str, *arguments: object) -> None:
        os.write(self._stdin, json.dumps([verb, *arguments]).encode() + b"\n")

    def answer(self) -> Any:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while b"\n" not in self._answers:
            ready = select.select([self._stdout], [], [], deadline - time.monotonic())[0]
            assert ready, "the other process does not answer"
            got = os.read(self._stdout, 1 << 16)
            assert got, f"the other process has ended with {self.process.wait(PATIENCE_S)}"
            self._answers += got
        line, _, self._answers = self._answers.partition(b"\n")
        return json.loads(line)

    def stop(self) -> None:
        suspend(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.resume()
        for pipe in (self._stdin, self._stdout):
            os.close(pipe)
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()


def suspend(pid: int) -> None:
    """Suspend a process, and return when the kernel says that all its threads are suspended: SIGSTOP itself does not
    wait for threads that run on another core."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    for thread in (_PROC / str(pid) / "task").iterdir():
        while _state(thread) not in "T ":
            assert time.monotonic() < deadline, "the other process does not stop"
            time.sleep(0.001)


def _state(thread: Path) -> str:
    """Of a thread, as in proc(5); a space for one that has ended."""
    try:
        return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return " "


def answer_calls(answering: object) -> None:
    """The other process: does what the lines say, until there are no more."""
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(getattr(answering, verb)(*arguments)), flush=True)
