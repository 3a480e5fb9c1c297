"""Python's side of the test double in `fake_driver.cpp`: build it once, load it, ask it."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[2]
_SOURCES = (*sorted((_ROOT / "tests/cuda").glob("fake_*.cpp")), _ROOT / "csrc/cuda/launches.cpp")
IMAGE = b"fake: the double's kernels are loops of its own"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class Counts(NamedTuple):
    """What there is of each; `depth` is of the asking thread's stack of contexts, `handles` references to memory."""

    allocations: int = 0
    mappings: int = 0
    registrations: int = 0
    streams: int = 0
    events: int = 0
    modules: int = 0
    contexts: int = 0
    depth: int = 0
    reserved: int = 0
    handles: int = 0


class Fake:
    """The double, in this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        """What takes the place of libcuda.so.1."""
        self._library = ctypes.CDLL(path)

    def fail(self, call: str, number: int, later: int = 0) -> None:
        """Let one call fail, after `later` that do not."""
        self._library.fake_fail(call.encode(), number, later)

    def stall(self, call: str) -> None:
        """Let the next call of this name stand until `let_go`, or for 20 s."""
        self._library.fake_stall(call.encode())

    def wait_stalled(self) -> None:
        """Until it stands, or has stood."""
        self._library.fake_wait_stalled()

    def let_go(self) -> bool:
        """Whether the call still stood."""
        return bool(self._library.fake_let_go())

    def break_context(self, number: int) -> None:
        """Let every call fail that needs a context, as after a fault in a kernel; 0 ends it."""
        self._library.fake_break(number)

    def hold(self) -> None:
        """Kernels do not run until `go_on`; both by the same thread."""
        self._library.fake_hold()

    def go_on(self) -> None:
        """Those that waited have run when this returns, unless a stream is held."""
        self._library.fake_go_on()

    def hold_stream(self, stream: int) -> None:
        """What is given to this stream from now on waits until `go_on_stream`; other streams go on."""
        self._library.fake_hold_stream(ctypes.c_void_p(stream))

    def go_on_stream(self, stream: int) -> None:
        self._library.fake_go_on_stream(ctypes.c_void_p(stream))

    def take_faults(self) -> list[str]:
        """What no GPU would report, since the last time: above all accesses to the same bytes in no order."""
        text = ctypes.create_string_buffer(1 << 16)
        self._library.fake_take_faults(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    def take_log(self) -> list[tuple[str, bool]]:
        """The calls since the last time, and whether their threads had a context."""
        text = ctypes.create_string_buffer(1 << 20)
        self._library.fake_take_log(text, ctypes.c_size_t(len(text)))
        return [(line[:-2], line.endswith("+")) for line in text.value.decode().splitlines()]

    def counts(self) -> Counts:
        counts = (ctypes.c_int * len(Counts._fields))()
        self._library.fake_count(counts)
        return Counts(*counts)

    def make_pooled(self, ptr: int) -> None:
        """Let the allocation that begins there be one that nothing exports, as of a pool."""
        self._library.fake_make_pooled(ctypes.c_uint64(ptr))

    def lend(self, ptr: int, nbytes: int, fd: int) -> None:
        """Call a memory file of the test device memory."""
        self._library.fake_lend(ctypes.c_uint64(ptr), ctypes.c_uint64(nbytes), fd)


@functools.cache
def fake() -> Fake:
    """The double of this process. Built when its sources are new, for all processes of this checkout."""
    assert COMPILER is not None
    headers = [*sorted((_ROOT / "csrc/cuda").glob("*.h")), *sorted((_ROOT / "tests/cuda").glob("*.h"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*_SOURCES, *headers))).hexdigest()[:16]
    checkout = hashlib.sha256(bytes(_ROOT)).hexdigest()[:8]
    folder = Path(tempfile.gettempdir()) / f"pdlink-fake-cuda-{os.getuid()}-{checkout}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"libcuda-double-{digest}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            for old in folder.glob("*.so"):
                old.unlink()
            made = folder / "new.so"
            flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-I", str(_ROOT / "csrc")]
            subprocess.run([COMPILER, *flags, "-o", str(made), *map(str, _SOURCES)], check=True, timeout=120)
            made.rename(library)
    return Fake(str(library))
