"""The mutants: what may be changed in a file, and a sample of that over the folders."""

from __future__ import annotations

import ast
import contextlib
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from universalmutator.mutator import mutants_regexp

if TYPE_CHECKING:
    import random

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Suite:
    """Which tests judge a folder."""

    folder: str
    tests: tuple[str, ...]
    module: str = ""
    """Native module that is built from the folder; empty for Python."""
    named: str = ""
    """Regular expression: which of the tests use that module."""


_TRANSPORTS = (
    *("tests/conformance/transports", "tests/transport", "tests/native", "tests/attacks/test_tcp.py"),
    *("tests/attacks/test_tcp_blocks.py", "tests/attacks/test_mapped.py"),
)
_TIERS = (
    "tests/store/tiers",
    "tests/store/test_store.py",
    "tests/store/test_cleared.py",
    "tests/store/test_client.py",
    "tests/conformance/stores",
)


def _proxy(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/proxy/test_{name}.py" for name in names)


SUITES = (
    Suite(
        "pdlink/protocol",
        (
            *("tests/protocol", "tests/endpoint", "tests/model", "tests/attacks/test_control.py"),
            "tests/integrations/test_stats.py",
        ),
    ),
    Suite(
        "pdlink/endpoint",
        (
            *("tests/endpoint", "tests/model", "tests/incidents/test_link.py", "tests/attacks/test_control.py"),
            *("tests/attacks/test_values.py", "tests/attacks/test_fairness.py", "tests/attacks/test_endless.py"),
            "tests/attacks/test_tcp_blocks.py",
        ),
    ),
    Suite(
        "pdlink/transport",
        (
            *(*_TRANSPORTS, "tests/cuda", "tests/endpoint/test_transfer.py"),
            "tests/endpoint/test_fallback.py",
        ),
    ),
    Suite("pdlink/store/tiers", _TIERS),
    Suite(
        "pdlink/store/server", ("tests/store/test_desk.py", "tests/store/test_client.py", "tests/conformance/stores")
    ),
    Suite(
        "pdlink/store",
        (
            *("tests/store/test_store.py", "tests/store/test_cleared.py", "tests/store/test_client.py"),
            *("tests/store/test_catalog.py", "tests/store/test_retention.py", "tests/store/test_extents.py"),
            *("tests/store/test_source.py", "tests/store/test_sums.py", "tests/store/test_worth.py"),
            *("tests/store/test_cache.py", "tests/store/test_record.py", "tests/store/test_codec.py"),
            *("tests/store/test_preimages.py", "tests/store/test_line.py", "tests/store/policies"),
            *("tests/store/test_gathering.py", "tests/store/test_desk.py", "tests/store/tiers/test_opening.py"),
            *("tests/conformance/stores", "tests/conformance/ingestions"),
        ),
    ),
    Suite("pdlink/peers", ("tests/peers", "tests/store/tiers/test_peer.py")),
    Suite("proxy/pdlink_proxy/policies", ("tests/proxy/policies", "tests/proxy/test_placement.py")),
    Suite(
        "proxy/pdlink_proxy/discovery",
        (*_proxy("discovery", "strangers", "membership"), "tests/conformance/discovery"),
    ),
    Suite(
        "proxy/pdlink_proxy/dialects",
        _proxy("dialects", "vllm", "told", "sglang_generate", "forced_tools", "promises", "engines", "kv_path"),
    ),
    Suite(
        "proxy/pdlink_proxy",
        (
            *_proxy("access", "alarms", "app", "client_answer", "edges", "engines", "explain", "faults"),
            *_proxy("flow", "front", "http_client", "kv_events", "kv_index", "leg_account", "legs", "limits"),
            *_proxy("membership", "mismatches", "named_streams", "outliers", "pair_times", "parts", "passthrough"),
            *_proxy("passing", "placement", "pools", "probe", "queue", "recovery", "refusals", "reloading"),
            *_proxy("request", "retries", "rolling", "stream_ends", "summary", "table", "tenants", "timeline"),
            *_proxy("told", "tokenizing", "tracing", "usage", "waiting"),
        ),
    ),
    Suite("pdlink/integrations/vllm_parts", ("tests/integrations",)),
    Suite("pdlink/integrations/sglang_parts", ("tests/integrations",)),
    Suite("pdlink/integrations", ("tests/integrations",)),
    Suite("csrc/tcp", _TRANSPORTS, "_tcp", r"test_tcp|\[tcp"),
    Suite("csrc/copy", _TRANSPORTS, "_copy", r"test_mapped\.py|test_copy|\[mapped(?!-cuda)"),
)


def suite_of(path: str) -> Suite:
    return next(suite for suite in SUITES if path.startswith(suite.folder + "/"))


@dataclass
class Mutant:
    path: str
    line: int
    before: str
    after: str
    result: str = ""
    """killed, timeout, survived, or invalid (does not compile)."""
    by: str = ""
    """The test that failed first."""
    seconds: float = 0.0

    def planted_in(self, source: str) -> str:
        """The file with this one line changed."""
        lines = source.splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: len(old) - len(old.lstrip())] + self.after + "\n"
        return "".join(lines)


def draw(only: tuple[str, ...], wanted: int, dice: random.Random) -> list[Mutant]:
    """A sample over all folders: at most one mutant of a line, files by how many lines they have."""
    lines: list[list[Mutant]] = []
    for suite in SUITES:
        for path in sources(suite):
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


def sources(suite: Suite) -> list[Path]:
    suffixes = (".cpp", ".h") if suite.module else (".py",)
    return sorted(path for path in (ROOT / suite.folder).iterdir() if path.suffix in suffixes)


def statement_lines(source: str, line: int) -> range:
    """The lines of the smallest statement that this line of Python is part of; of a block only its head."""
    found = range(line, line + 1)
    smallest = None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            lines = _own_lines(node)
            if line in lines and (smallest is None or len(lines) <= smallest):
                found, smallest = lines, len(lines)
    return found


def function_lines(source: str, line: int) -> range:
    """The body of the innermost function around this line of Python."""
    found = range(0)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            if line in lines and (not found or len(lines) < len(found)):
                found = lines
    return found


def _own_lines(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno
    return range(node.lineno, max(last or 0, node.lineno) + 1)


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
                    found.update(_own_lines(node))
    return found


def _is_another_program(mutant: Mutant) -> bool:
    """Whether it compiles to something else than before; of C++ only comments are looked at."""
    if not mutant.path.endswith(".py"):
        return mutant.before.partition("//")[0] != mutant.after.partition("//")[0]
    kept = (ROOT / mutant.path).read_text(encoding="utf-8")
    try:
        with warnings.catch_warnings(action="ignore"):  # what a mutant compares with `is` is its own business
            changed = mutant.planted_in(kept)
            compile(changed, "mutant", "exec", dont_inherit=True)
            return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(kept))
    except (SyntaxError, ValueError):
        return False
