"""Builds the native modules with sanitizers, runs the tests that exercise them, and says what was found.

    python tools/sanitize.py [address] [thread] [--only GROUP,...] [-- arguments of pytest]

Two builds, each in a folder of its own under build/: AddressSanitizer with UndefinedBehaviorSanitizer, and
ThreadSanitizer. Python, numpy, libzmq and libucx are not instrumented; what follows from that is in docs/gotchas.md
and tools/sanitizers/*.supp. Helper processes of the tests run under the same sanitizer. Ends with 1 if a test fails,
if anything was reported, or if a fault on purpose was not (tools/sanitizers/canary.cpp).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = ROOT / "tools" / "sanitizers"
REPORTS = ROOT / "build" / "sanitize-reports"
MODULES = ("_copy", "_index", "_http", "_tcp", "_ucx", "_cuda")
TIMEOUT_S = 300
"""Of one test: everything is some five times slower."""
ATTACKS = ("tcp", "tcp_blocks", "mapped", "control", "values", "descriptors", "endless", "fairness")
GROUPS = {
    "conformance": ["tests/conformance/transports"],
    "transports": ["tests/transport", "tests/native"],
    "index": [
        "tests/proxy/test_kv_index.py",
        *(f"tests/proxy/policies/test_{name}.py" for name in ("guesses", "columns", "each")),
    ],
    "http": [
        "tests/api/test_long_bodies.py",
        "tests/observe/test_series.py",
        *(f"tests/native/test_{name}.py" for name in ("answers", "http", "stream_begin")),
        *(f"tests/proxy/test_{name}.py" for name in ("http_client", "http_fuzz", "front", "passing")),
    ],
    "cuda": ["tests/cuda", "--ignore=tests/cuda/test_build.py"],
    "endpoints": ["tests/endpoint/test_transfer.py", "tests/endpoint/test_absence.py", "tests/endpoint/test_lost.py"],
    "attacks": [
        *(f"tests/attacks/test_{name}.py" for name in ATTACKS),
        "--deselect=tests/attacks/test_control.py::"
        "test_hundred_thousand_messages_about_unknown_transfers_neither_grow_nor_delay",
    ],
}
"""Forks and stopped processes are in the first three: each transport has tests of both. Left out are the tests that
run nvcc, which a sanitizer's libraries crash, and one that bounds the process's memory: ASan keeps what was freed."""


@dataclass(frozen=True)
class Sanitizer:
    name: str
    flags: str
    libraries: tuple[str, ...]
    """To be loaded before Python: the sanitizers', and libstdc++, whose exceptions they want to see thrown."""
    environment: dict[str, str]
    canaries: tuple[str, ...]
    """Faults on purpose that this one has to report."""


SANITIZERS = (
    Sanitizer(
        "address",
        "address,undefined",
        ("libasan.so", "libubsan.so", "libstdc++.so.6"),
        {
            # Python gives nothing back at exit.
            "ASAN_OPTIONS": f"detect_leaks=0:halt_on_error=1:log_path={REPORTS / 'found'}",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            # Python's own allocator would hide an overflow of a small object.
            "PYTHONMALLOC": "malloc",
        },
        ("heap_overflow", "signed_overflow"),
    ),
    Sanitizer(
        "thread",
        "thread",
        ("libtsan.so", "libstdc++.so.6"),
        {
            "OMP_NUM_THREADS": "1",  # torch's threads meet inside libgomp, which TSan cannot see into
            # A forked child of a process with threads is what some of the tests are about.
            "TSAN_OPTIONS": f"suppressions={HERE / 'tsan.supp'}:die_after_fork=0:exitcode=0"
            f":log_path={REPORTS / 'found'}",
        },
        ("data_race",),
    ),
)


def build(sanitizer: Sanitizer) -> Path:
    """The folder with the instrumented modules, and with what makes Python take them."""
    folder = ROOT / "build" / f"sanitize-{sanitizer.name}"
    environment = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        [
            *("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "--log-level=WARNING"),
            *("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DPDLINK_CUDA=OFF", f"-DPDLINK_SANITIZE={sanitizer.flags}"),
            f"-DPython_EXECUTABLE={sys.executable}",
        ],
        check=True,
        env=environment,
    )
    subprocess.run(["cmake", "--build", folder, "--target", *MODULES], check=True, env=environment)
    flags = [f"-fsanitize={sanitizer.flags}", "-fno-sanitize-recover=all", "-g", "-O1", "-fPIC", "-shared"]
    subprocess.run(
        [os.environ.get("CXX", "g++"), *flags, HERE / "canary.cpp", "-o", folder / "canary.so"], check=True
    )
    shutil.copy(HERE / "sitecustomize.py", folder)
    return folder


def environment(sanitizer: Sanitizer, folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        **sanitizer.environment,
        "LD_PRELOAD": ":".join(map(library, sanitizer.libraries)),
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "proxy", ROOT / "benchmarks"))),
    }


def library(name: str) -> str:
    """Where the compiler has it."""
    found = subprocess.run(
        [os.environ.get("CXX", "g++"), f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"{name} is not installed; it comes with the compiler (Debian: libgcc-12-dev)")
    return found


def require_sharp(sanitizer: Sanitizer, folder: Path) -> None:
    """Ends unless tests would use the instrumented modules, and faults on purpose are reported."""
    where = "import importlib; print(*(importlib.import_module('pdlink.' + name).__file__ for name in {!r}))"
    command = [sys.executable, "-c", where.format(MODULES)]
    taken = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment(sanitizer, folder)
    ).stdout.split()
    if any(Path(file).parent != folder for file in taken):
        raise SystemExit(f"tests would use {taken}, not the modules of {folder}")
    for canary in sanitizer.canaries:
        clear()
        fault = f"import ctypes; ctypes.CDLL({str(folder / 'canary.so')!r}).{canary}(8)"
        command = [sys.executable, "-c", fault]
        said = subprocess.run(
            command, env=environment(sanitizer, folder), capture_output=True, text=True, check=False
        )
        if not found_in(said.stderr) and not found():
            raise SystemExit(f"{sanitizer.name}: {canary} of canary.cpp was not reported, so nothing would be")
    clear()


def run(sanitizer: Sanitizer, folder: Path, tests: list[str], arguments: list[str]) -> tuple[int, set[str], str]:
    """The exit status of pytest, what was found, and pytest's last line."""
    # UBSan has no file of its own beside ASan, so what it says to descriptor 2 must not end in pytest.
    command = [sys.executable, "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", "-rN"]
    command += [f"--timeout={TIMEOUT_S}", *tests, *arguments]
    last = ""
    reports = set()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(sanitizer, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            reports |= found_in(line)
            last = line.strip("= \n") or last
    return process.returncode, reports | found(), last


def clear() -> None:
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)


def found() -> set[str]:
    """One line for each different thing in the files of reports."""
    return set().union(*(found_in(file.read_text(errors="replace")) for file in REPORTS.iterdir()))


def found_in(text: str) -> set[str]:
    return set(re.findall(r"^SUMMARY: .*|.*runtime error: .*|.*Sanitizer:? (?:CHECK )?failed.*", text, re.MULTILINE))


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sanitizers", nargs="*", help="address, thread; both if none is named")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups of tests, separated by commas")
    options, arguments = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    groups = options.only.split(",")
    known = {*(one.name for one in SANITIZERS), *GROUPS}
    if unknown := {*options.sanitizers, *groups} - known:
        parser.error(f"{', '.join(sorted(unknown))}: unknown, there are {', '.join(sorted(known))}")
    rows = []
    for sanitizer in SANITIZERS:
        if options.sanitizers and sanitizer.name not in options.sanitizers:
            continue
        print(f"== {sanitizer.name}: building with -fsanitize={sanitizer.flags}", flush=True)
        folder = build(sanitizer)
        require_sharp(sanitizer, folder)
        for name in groups:
            clear()
            print(f"== {sanitizer.name}: {name}: pytest {' '.join(GROUPS[name] + arguments)}", flush=True)
            start_s = time.monotonic()
            status, reports, last = run(sanitizer, folder, GROUPS[name], arguments)
            for file in sorted(REPORTS.iterdir()):
                print(file.read_text(errors="replace"))
            rows.append((sanitizer.name, name, status, len(reports), time.monotonic() - start_s, last))
    print(f"{'sanitizer':10}  {'tests':18}  {'status':>6}  {'reports':>7}  {'seconds':>7}")
    for sanitizer_name, name, status, count, took_s, last in rows:
        print(f"{sanitizer_name:10}  {name:18}  {status:6}  {count:7}  {took_s:7.0f}  {last}")
    return int(any(status not in (0, 5) or count for _, _, status, count, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
