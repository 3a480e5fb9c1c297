"""Finding and loading UCX, and what that does to the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pdlink.config import TransportConfig
from pdlink.errors import TransportUnavailable
from pdlink.transport import ucx
from pdlink.transport.choice import open_transports
from pdlink.transport.ucx import UcxTransport
from pdlink.transport.ucx_copies import NEEDED_UCX

ROOT = Path(__file__).parents[2]
PROBE = UcxTransport().probe()
needs_ucx = pytest.mark.skipif(not PROBE.ok, reason=PROBE.reason)


def run_python(program: str, **environment: str) -> str:
    """Output of a Python process that must end well."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_build_without_ucx_headers_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "_ucx", None)
    probe = UcxTransport().probe()
    assert not probe.ok
    assert "libucx-cu13" in probe.reason
    with pytest.raises(TransportUnavailable, match="libucx-cu13"):
        UcxTransport().open()


def test_a_worker_warns_of_what_does_not_work_and_not_of_what_was_left_out_of_the_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ucx, "_ucx", None)
    with caplog.at_level("INFO", "pdlink.transport"):
        opened = open_transports(TransportConfig(), [])
    for one in opened:
        one.close()
    assert "tcp" in [one.name for one in opened]
    assert [each.levelname for each in caplog.records if "libucx-cu13" in each.getMessage()] == ["INFO"]


@needs_ucx
def test_the_probe_tells_version_and_path() -> None:
    version = tuple(map(int, PROBE.facts["version"].split(".")))
    assert version >= NEEDED_UCX
    assert Path(PROBE.facts["library"]).exists()


@needs_ucx
def test_off_runs_without_ucx() -> None:
    assert "off" in UcxTransport(library="off").probe().reason
    with pytest.raises(TransportUnavailable, match="off"):
        UcxTransport(library="off").open()


@needs_ucx
def test_a_chosen_library_that_is_not_there_is_named() -> None:
    assert "/nowhere/libother.so" in UcxTransport(library="/nowhere/libother.so").probe().reason


@needs_ucx
def test_a_second_copy_of_ucx_is_refused(tmp_path: Path) -> None:
    """Two copies with one soname resolve each other's symbols."""
    other = tmp_path / "libucp.so.0"
    shutil.copyfile(PROBE.facts["library"], other)
    reason = UcxTransport(library=str(other)).probe().reason
    assert str(other) in reason
    assert PROBE.facts["library"] in reason


@needs_ucx
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_ucx_that_is_too_old_is_refused_with_both_versions(tmp_path: Path) -> None:
    source, library = tmp_path / "old.c", tmp_path / "libold.so"
    source.write_text("void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1; *b = 19; *c = 1; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    reason = UcxTransport(library=str(library)).probe().reason
    assert "1.19.1" in reason
    assert "1.20" in reason


@needs_ucx
def test_loading_ucx_leaves_libc_signals_and_environment_alone() -> None:
    """By default UCX patches mmap and its kin inside libc and catches SIGSEGV and SIGHUP."""
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        names = ("mmap", "munmap", "madvise", "brk", "sbrk", "shmat", "mremap")
        def heads():
            return [ctypes.string_at(ctypes.cast(getattr(libc, name), ctypes.c_void_p), 16) for name in names]
        def caught():
            mask = open("/proc/self/status").read().partition("SigCgt:")[2].split()[0]
            return int(mask, 16) & (1 << 31) - 1  # without the real-time ones, which glibc uses for threads
        before = heads(), caught()
        from pdlink.memory.buffers import Buffer
        from pdlink.transport.ucx import UcxTransport
        transport, buffer = UcxTransport(), Buffer(4096)
        transport.open()
        transport.register(buffer)
        transport.invite("peer")
        assert (heads(), caught()) == before
        libc.getenv.restype = ctypes.c_char_p
        print(libc.getenv(b"UCX_HANDLE_ERRORS"))
        transport.close()
    """
    assert run_python(program) == "None"


@needs_ucx
def test_transports_that_ucx_does_not_have_are_refused_at_open() -> None:
    with pytest.raises(TransportUnavailable, match="nosuch"):
        UcxTransport("nosuch").open()


@needs_ucx
@pytest.mark.parametrize("tls", ["tcp", "shm", "auto"])
def test_a_process_may_end_without_closing(tls: str) -> None:
    program = f"""
        import numpy as np
        from pdlink.kv.layout import RunList
        from pdlink.memory.buffers import Buffer
        from pdlink.transport.ucx import UcxTransport
        sides = [UcxTransport({tls!r}), UcxTransport({tls!r})]
        buffers = [Buffer(64 << 20), Buffer(64 << 20)]
        for side, buffer in zip(sides, buffers):
            side.open()
            side.register(buffer)
        writer, owner = sides
        writer.connect("owner", owner.invite("writer"))
        starts = np.arange(0, 64 << 20, 32 << 10, dtype=np.int64)
        runs = np.stack([starts[::-1], starts, np.full(len(starts), 32 << 10)], axis=1)
        print(writer.submit("owner", [RunList(0, 0, 0, 0, runs)], 5.0))
    """
    assert run_python(program) == "1"


@needs_ucx
def test_loading_ucx_changes_nothing_of_the_environment_that_a_thread_may_be_reading() -> None:
    """`setenv` moves the list and the strings while others read them without a lock, as libc does."""
    program = """
        import ctypes
        libc = ctypes.CDLL(None)
        environ = ctypes.POINTER(ctypes.c_void_p).in_dll(libc, "environ")
        def strings():
            found = []
            while environ[len(found)]:
                found.append((environ[len(found)], ctypes.string_at(environ[len(found)])))
            return ctypes.addressof(environ.contents), found
        from pdlink.transport.ucx import UcxTransport
        before = strings()
        assert UcxTransport().probe().ok
        UcxTransport().open()
        assert strings() == before
        print("same")
    """
    assert run_python(program) == "same"
