"""Native threads of this process, and one that does nothing for a while, although its process runs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance.transports.side import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STOP_THREAD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
tid, SEIZE, INTERRUPT, WALL = int(sys.argv[1]), 0x4206, 0x4207, 0x40000000
if libc.ptrace(SEIZE, tid, None, None) or libc.ptrace(INTERRUPT, tid, None, None):
    print(os.strerror(ctypes.get_errno()), flush=True)
    sys.exit()
os.waitpid(tid, WALL)
print("stopped", flush=True)
sys.stdin.read()
"""


def native_threads() -> dict[str, str]:
    """Our native threads by id, to their names; one that ends meanwhile is left out."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = (task / "comm").read_text(encoding="ascii").strip()
            if name.startswith("pdlink-"):
                found[task.name] = name
    return found


def wait_for_threads(true: Callable[[dict[str, str]], bool]) -> None:
    """Return when this is true of `native_threads`: the kernel lists a thread for a moment after it was joined."""
    deadline = time.monotonic() + PATIENCE_S
    while not true(now := native_threads()):
        assert time.monotonic() < deadline, now
        time.sleep(0.001)


@contextlib.contextmanager
def standing_still(thread_name: str) -> Iterator[None]:
    """One thread of this process is stopped, as by a driver that does not come back; the others run."""
    tid = next(tid for tid, name in native_threads().items() if name == thread_name)
    command = [sys.executable, "-c", STOP_THREAD, tid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said != "stopped":
            pytest.skip(f"a thread cannot be stopped here: {said}")
        yield
        process.communicate(timeout=PATIENCE_S)  # its end lets the thread go on
