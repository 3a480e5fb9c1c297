"""A native thread that does nothing for a while, although its process runs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance.transports.side import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextlib.contextmanager
def standing_still(thread_name: str) -> Iterator[None]:
    """One thread of this process is stopped, as by a driver that does not come back; the others run."""
    tasks = Path("/proc/self/task").iterdir()
    tid = next(task.name for task in tasks if (task / "comm").read_text(encoding="ascii").strip() == thread_name)
    command = [sys.executable, "-c", STOP_THREAD, tid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said != "stopped":
            pytest.skip(f"a thread cannot be stopped here: {said}")
        yield
        process.communicate(timeout=PATIENCE_S)  # its end lets the thread go on
