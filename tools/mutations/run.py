"""Changes the sources in small ways, one at a time, and runs the tests that should notice.

    python tools/mutations/run.py --sample 200 --seed 1 --json mutations.json
    python tools/mutations/run.py --only csrc/tcp,csrc/copy --sample 40

universalmutator proposes the changes by the rules beside this file; this script keeps those that change what runs,
draws a sample by the seed, and gives each mutant to the tests of its folder in a copy of the checkout. A mutant is
*killed* when a test fails, *hung* when the tests do not end, and *survived* when all pass. A survivor needs a test or
a reason (docs/mutations.md).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from universalmutator.mutator import mutants_regexp

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 300.0
"""A test run that takes longer counts as a hang, and so as killed. The slowest list below takes a third of it."""


@dataclass(frozen=True)
class Suite:
    """Which tests judge a folder, the quickest to notice first."""

    folder: str
    tests: tuple[str, ...]
    module: str = ""
    """Native module that is built from the folder; empty for Python."""


SUITES = (
    Suite("pdlink/protocol", ("tests/protocol", "tests/endpoint", "tests/model", "tests/attacks/test_control.py")),
    Suite(
        "pdlink/endpoint",
        ("tests/model", "tests/endpoint", "tests/attacks/test_control.py", "tests/incidents/test_link.py"),
    ),
    Suite("pdlink/transport", ("tests/transport", "tests/conformance", "tests/attacks/test_tcp.py", "tests/cuda")),
    Suite(
        "csrc/tcp", ("tests/transport/test_tcp.py", "tests/conformance -k tcp", "tests/attacks/test_tcp.py"), "_tcp"
    ),
    Suite("csrc/copy", ("tests/transport/test_mapped.py", "tests/conformance -k mapped", "tests/native"), "_copy"),
)


@dataclass
class Mutant:
    path: str
    line: int
    before: str
    after: str
    result: str = ""
    """killed, hung, survived, or invalid (does not compile)."""
    by: str = ""
    """The test that failed first."""
    seconds: float = 0.0

    def planted_in(self, source: str) -> str:
        """The file with this one line changed."""
        lines = source.splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: len(old) - len(old.lstrip())] + self.after + "\n"
        return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tools/mutations/run.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sample", type=int, default=200, help="mutants to run, spread over the folders by their lines"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--only", default="", help="folders or files, separated by commas; all of them if empty")
    parser.add_argument("--json", type=Path, help="where to keep the result; a run that is repeated goes on with it")
    options = parser.parse_args()
    only = tuple(filter(None, options.only.split(",")))
    sample = draw(only, options.sample, random.Random(options.seed))
    done = _load(options.json)
    copy = Path(tempfile.mkdtemp(prefix="pdlink-mutations-"))
    try:
        prepare(copy)
        for number, mutant in enumerate(sample, 1):
            known = done.get((mutant.path, mutant.before, mutant.after))
            if known is None:
                run(copy, mutant)
            else:
                mutant.result, mutant.by, mutant.seconds = known.result, known.by, known.seconds
            print(f"{number:4} {mutant.result:9} {mutant.seconds:5.0f} s  {mutant.path}:{mutant.line}", flush=True)
            if mutant.result == "survived":
                print(f"       - {mutant.before}\n       + {mutant.after}", flush=True)
            if options.json is not None:
                _save(options.json, options.seed, sample[:number])
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    counts = Counter(mutant.result for mutant in sample)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    return 0


def draw(only: tuple[str, ...], wanted: int, dice: random.Random) -> list[Mutant]:
    """A sample over all folders: at most one mutant of a line, files by how many lines they have."""
    lines: list[list[Mutant]] = []
    for suite in SUITES:
        for path in sorted((ROOT / suite.folder).glob("*.cpp" if suite.module else "*.py")):
            name = str(path.relative_to(ROOT))
            if not only or name.startswith(only):
                lines += _of_each_line(path, name)
    dice.shuffle(lines)
    drawn: list[Mutant] = []
    for of_line in lines:
        dice.shuffle(of_line)
        found = next((mutant for mutant in of_line if _is_another_program(mutant)), None)
        drawn += [found] if found else []
        if len(drawn) == wanted:
            break
    return drawn


def _of_each_line(path: Path, name: str) -> list[list[Mutant]]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    python = path.suffix == ".py"
    rules = [str(HERE / file) for file in ("common.rules", "python.rules" if python else "cpp.rules")]
    ignored = [r"\b(log\.|emit\()", r"^\s*(#|//|import |from |@)"]
    with contextlib.redirect_stdout(io.StringIO()):
        proposed = mutants_regexp(lines, ruleFiles=rules, ignorePatterns=ignored)
    runs = _executable_lines(source) if python else None
    by_line: dict[int, list[Mutant]] = {}
    for line, after, *_ in proposed:
        if runs is None or line in runs:
            by_line.setdefault(line, []).append(Mutant(name, line, lines[line - 1].strip(), after.strip()))
    return list(by_line.values())


def _executable_lines(source: str) -> set[int]:
    """Lines of statements in functions: no docstrings, no imports, no signatures."""
    found: set[int] = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                says_nothing = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if isinstance(node, ast.stmt) and not says_nothing and node is not function:
                    last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
                    found.update(range(node.lineno, (last or node.lineno) + 1))
    return found


def _is_another_program(mutant: Mutant) -> bool:
    """Whether it compiles to something else than before; of C++ the build has to say."""
    if not mutant.path.endswith(".py"):
        return True
    kept = (ROOT / mutant.path).read_text(encoding="utf-8")
    try:
        with warnings.catch_warnings(action="ignore"):  # what a mutant compares with `is` is its own business
            changed = mutant.planted_in(kept)
            compile(changed, "mutant", "exec", dont_inherit=True)
            return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(kept))
    except (SyntaxError, ValueError):
        return False


def prepare(copy: Path) -> None:
    """What is tracked, and the native modules, in a folder that may be spoiled."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    located = "import pdlink._tcp, pdlink_bench._anchors as a; print(pdlink._tcp.__file__, a.__file__)"
    product, bench = subprocess.run(
        [sys.executable, "-c", located], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    for module in Path(product).parent.glob("*.so"):
        shutil.copy2(module, copy / "pdlink")
    shutil.copy2(bench, copy / "benchmarks")


def run(copy: Path, mutant: Mutant) -> None:
    """Plant it, build if need be, run the tests, take it out again."""
    suite = next(suite for suite in SUITES if mutant.path.startswith(suite.folder + "/"))
    target = copy / mutant.path
    kept = target.read_text(encoding="utf-8")
    began_s = time.monotonic()
    try:
        target.write_text(mutant.planted_in(kept), encoding="utf-8")
        if suite.module and not _build(copy, suite.module):
            mutant.result = "invalid"
        else:
            mutant.result, mutant.by = _judge(copy, suite)
    finally:
        target.write_text(kept, encoding="utf-8")
        if suite.module:
            _build(copy, suite.module)
        mutant.seconds = round(time.monotonic() - began_s, 1)


def _judge(copy: Path, suite: Suite) -> tuple[str, str]:
    deadline_s = time.monotonic() + LIMIT_S
    environment = {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'packages'}", "PYTHONDONTWRITEBYTECODE": "1"}
    for tests in suite.tests:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            *tests.split(),
        ]
        child = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=max(1.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "hung", tests
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if child.returncode != 0:
            failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return "killed", failed[0].split(" - ")[0] if failed else tests
    return "survived", ""


def _build(copy: Path, module: str) -> bool:
    """Build one native module of the copy and put it into the package."""
    build = copy / "build" / "mutants"
    if not (build / "build.ninja").exists():
        import nanobind

        configure = [
            "cmake", "-S", str(copy), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}", "-DSKBUILD=2",
            "-DSKBUILD_PROJECT_NAME=pdlink", "-DSKBUILD_PROJECT_VERSION=0.0.0",
        ]  # fmt: skip
        subprocess.run(configure, check=True, capture_output=True)
    if subprocess.run(["cmake", "--build", str(build), "--target", module], capture_output=True).returncode != 0:
        return False
    built = next(build.rglob(f"{module}.*.so"))
    shutil.copy2(built, copy / "pdlink")
    return True


def _load(path: Path | None) -> dict[tuple[str, str, str], Mutant]:
    if path is None or not path.exists():
        return {}
    kept = [Mutant(**item) for item in json.loads(path.read_text(encoding="utf-8"))["mutants"]]
    return {(mutant.path, mutant.before, mutant.after): mutant for mutant in kept}


def _save(path: Path, seed: int, mutants: list[Mutant]) -> None:
    counts = Counter(mutant.result for mutant in mutants)
    result = {"seed": seed, "counts": dict(sorted(counts.items())), "mutants": [asdict(mutant) for mutant in mutants]}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
