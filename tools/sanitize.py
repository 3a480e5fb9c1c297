"""Builds the native modules with sanitizers, runs the tests that exercise them, and says what was found.

    python tools/sanitize.py [address|thread] [-- arguments of pytest]

Two builds, each in a folder of its own under build/: AddressSanitizer with UndefinedBehaviorSanitizer, and
ThreadSanitizer. Python, numpy, libzmq and libucx are not instrumented; what follows from that is in
tools/sanitizers/*.supp. Helper processes of the tests run under the same sanitizer. Ends with 1 if a test fails or
anything was reported.
"""

from __future__ import annotations

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
MODULES = ("_copy", "_tcp", "_ucx", "_cuda")
TIMEOUT_S = 300
"""Of one test: everything is some five times slower."""
GROUPS = {
    "conformance": ["tests/conformance"],
    "transports, forks": ["tests/transport", "tests/native"],
    "attacks": ["tests/attacks/test_tcp.py", "tests/attacks/test_tcp_blocks.py", "tests/attacks/test_mapped.py"],
}


@dataclass(frozen=True)
class Sanitizer:
    name: str
    flags: str
    libraries: tuple[str, ...]
    environment: dict[str, str]


def sanitizers(logs: Path) -> list[Sanitizer]:
    """Both, which write what they find to files that begin with `logs`."""
    return [
        Sanitizer(
            "address",
            "address,undefined",
            ("libasan.so", "libubsan.so", "libstdc++.so.6"),
            {
                # Python gives nothing back at exit, and its own allocator would hide an overflow of a small object.
                "ASAN_OPTIONS": f"detect_leaks=0:halt_on_error=1:log_path={logs}",
                "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:log_path={logs}",
                "PYTHONMALLOC": "malloc",
            },
        ),
        Sanitizer(
            "thread",
            "thread",
            ("libtsan.so", "libstdc++.so.6"),
            {
                # A forked child of a process with threads is what some of the tests are about.
                "TSAN_OPTIONS": f"suppressions={HERE / 'tsan.supp'}:die_after_fork=0:exitcode=0:log_path={logs}",
            },
        ),
    ]


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
    shutil.copy(HERE / "sitecustomize.py", folder)
    return folder


def library(name: str) -> str:
    """Where the compiler has it."""
    found = subprocess.run(
        [os.environ.get("CC", "gcc"), f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"{name} is not installed; it comes with the compiler (Debian: libgcc-12-dev)")
    return found


def run(sanitizer: Sanitizer, folder: Path, logs: Path, tests: list[str], arguments: list[str]) -> tuple[int, str]:
    """The exit status of pytest, and its last line."""
    environment = {
        **os.environ,
        **sanitizer.environment,
        "LD_PRELOAD": ":".join(map(library, sanitizer.libraries)),
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rN", f"--timeout={TIMEOUT_S}"]
    command += [*tests, *arguments]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
    return process.returncode, last


def reports(logs: Path) -> list[str]:
    """One line for each thing found, and the whole of it on the terminal."""
    found = []
    for file in sorted(logs.parent.glob(f"{logs.name}.*")):
        text = file.read_text(errors="replace")
        lines = re.findall(r"^SUMMARY: .*|.*runtime error: .*|.*ThreadSanitizer: failed.*", text, re.MULTILINE)
        if lines:
            print(text)
        found += lines
    return found


def main() -> int:
    own, _, given = " ".join(sys.argv[1:]).partition("--")
    wanted, arguments = own.split(), given.split()
    rows = []
    for sanitizer in sanitizers(ROOT / "build" / "sanitize-reports" / "found"):
        if wanted and sanitizer.name not in wanted:
            continue
        print(f"== {sanitizer.name}: building with -fsanitize={sanitizer.flags}", flush=True)
        folder = build(sanitizer)
        for name, tests in GROUPS.items():
            logs = ROOT / "build" / "sanitize-reports" / "found"
            shutil.rmtree(logs.parent, ignore_errors=True)
            logs.parent.mkdir(parents=True)
            print(f"== {sanitizer.name}: {name}: pytest {' '.join(tests + arguments)}", flush=True)
            start_s = time.monotonic()
            status, last = run(sanitizer, folder, logs, tests, arguments)
            rows.append((sanitizer.name, name, status, len(reports(logs)), time.monotonic() - start_s, last))
    print(f"{'sanitizer':10}  {'tests':18}  {'status':>6}  {'reports':>7}  {'seconds':>7}")
    for sanitizer_name, name, status, count, took_s, last in rows:
        print(f"{sanitizer_name:10}  {name:18}  {status:6}  {count:7}  {took_s:7.0f}  {last}")
    return int(any(status not in (0, 5) or count for _, _, status, count, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
