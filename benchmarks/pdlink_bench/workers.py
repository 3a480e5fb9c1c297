"""A process that is asked and answers, and whose end is noticed.

Control goes over a multiprocessing pipe. Every question has a deadline; a worker that dies or goes quiet raises
`WorkerFailed` in the parent, and `close()` leaves no process behind. A worker whose parent is gone sees the end of
the pipe and ends, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Protocol

from pdlink.errors import PdlinkError

if TYPE_CHECKING:
    from collections.abc import Callable

EXPECTED_ERRORS = (PdlinkError, OSError, ValueError, RuntimeError, MemoryError, ImportError)
"""Reported to the parent as the answer. Anything else is a mistake of ours and ends the worker with a traceback."""

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


class Role(Protocol):
    """What runs in the worker: its public methods can be asked for by name."""

    def close(self) -> None: ...


class WorkerFailed(Exception):
    """A worker reported an error, died, or did not answer in time."""


class WorkerProcess:
    """One spawned process that plays a role. Used by one thread."""

    def __init__(self, name: str, make_role: Callable[..., Role], *args: object) -> None:
        """make_role and its arguments must be picklable by name: they are called in the new process."""
        self.name = name
        self._make_role, self._args = make_role, args
        self._process: Any = None
        self._pipe: connection.Connection[Any, Any] | None = None

    def open(self) -> None:
        """Start the process; the role is made when the first question arrives."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._make_role, self._args), name=self.name, daemon=True
        )
        try:
            self._process.start()
        finally:
            theirs.close()

    def tell(self, question: str, *args: object) -> None:
        """Ask without waiting; the next `answer()` belongs to it."""
        if self._pipe is None:
            raise WorkerFailed(f"{self.name} is not running")
        try:
            self._pipe.send((question, args))
        except OSError:
            raise WorkerFailed(self._epitaph()) from None

    def answer(self, timeout_s: float) -> Any:
        """What the role's method returned."""
        if self._pipe is None:
            raise WorkerFailed(f"{self.name} is not running")
        if not connection.wait([self._pipe, self._process.sentinel], timeout_s):
            raise WorkerFailed(f"{self.name} gave no answer for {timeout_s:g} s")
        try:
            if not self._pipe.poll():  # so it was the sentinel, and nothing was said before the end
                raise WorkerFailed(self._epitaph())
            good, value = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerFailed(self._epitaph()) from None
        if not good:
            raise WorkerFailed(f"{self.name}: {value}")
        return value

    def ask(self, question: str, *args: object, timeout_s: float) -> Any:
        self.tell(question, *args)
        return self.answer(timeout_s)

    def suspend(self) -> None:
        """Stop the process where it is until `resume`: what it spins or wakes for costs nobody else a core."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._pipe is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def hang_up(self) -> None:
        """Let the process end by itself, and do not wait. Safe to call twice."""
        if self._pipe is not None:
            self.resume()
            self._pipe.close()
            self._pipe = None

    def close(self, grace_s: float = 3.0) -> None:
        """Hang up, wait for the process to end by itself, then make it. Safe to call twice."""
        self.hang_up()
        if self._process is None:
            return
        deadline_s = time.monotonic() + grace_s
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            self._process.join(max(0.2, deadline_s - time.monotonic()))
            if self._process.exitcode is not None:
                break
        with contextlib.suppress(ValueError):  # "still running": a process the kernel cannot end now
            self._process.close()
        self._process = None

    def _epitaph(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"


def _serve(pipe: connection.Connection[Any, Any], make_role: Callable[..., Role], args: tuple[object, ...]) -> None:
    """The worker's main loop: ends when the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the pipe
    # A suspended process cannot see that the pipe is closed: the kernel ends it when the parent is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    role: Role | None = None
    try:
        while True:
            try:
                question, arguments = pipe.recv()
            except (EOFError, OSError):
                return
            reply: tuple[bool, object]
            try:
                if role is None:
                    role = make_role(*args)
                reply = True, getattr(role, question)(*arguments)
            except EXPECTED_ERRORS as error:
                reply = False, f"{type(error).__name__}: {error}"
            try:
                pipe.send(reply)
            except OSError:
                return
    finally:
        if role is not None:
            role.close()
