"""A `Side` in a process of its own, told what to do by lines of JSON over pipes.

Run as a module it is the helper process; imported it is the test's handle on one. The pipes end with the test, so
the helper ends with it too, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.conformance.transports.entries import ENTRIES
from tests.conformance.transports.side import PATIENCE_S, Side

_ROOT = Path(__file__).parents[3]


class OtherProcess:
    """The test's handle: `call` a method of the other side, and stop, resume or kill its process."""

    def __init__(self, entry_name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, entry_name],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._answers = b""

    def call(self, verb: str, *arguments: object) -> Any:
        self.send(verb, *arguments)
        return self.answer()

    def send(self, verb: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *arguments]).encode() + b"\n")

    def answer(self) -> Any:
        assert self.process.stdout is not None
        deadline = time.monotonic() + 2 * PATIENCE_S
        while b"\n" not in self._answers:
            ready = select.select([self.process.stdout], [], [], deadline - time.monotonic())[0]
            assert ready, "the other process does not answer"
            got = os.read(self.process.stdout.fileno(), 1 << 16)
            assert got, f"the other process has ended with {self.process.wait(PATIENCE_S)}"
            self._answers += got
        line, _, self._answers = self._answers.partition(b"\n")
        return json.loads(line)

    def stop(self) -> None:
        """Suspend it, and return when the kernel says that it is suspended."""
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        while os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is None:
            assert time.monotonic() < deadline, "the other process does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.resume()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()


def _serve(entry_name: str) -> None:
    side = Side(ENTRIES[entry_name].group()())
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(getattr(side, verb)(*arguments)), flush=True)
    side.close()


if __name__ == "__main__":
    _serve(sys.argv[1])
