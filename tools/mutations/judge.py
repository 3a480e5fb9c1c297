"""Runs tests in a copy of the checkout, each time in a new process, forked from one that has loaded the libraries.

The first run of a suite traces which test executes which line of its folder, in helper processes too
(sitecustomize.py beside this file). A mutant is then given to the tests that execute its line, the fastest first,
until one fails.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import runpy
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).resolve().parent
LIBRARIES = ("numpy", "numba", "torch", "zmq.asyncio", "msgspec", "hypothesis", "xxhash", "pydantic", "aiohttp")
"""Loading them takes longer than most mutants live."""
SLOWER = 4.0
"""A test that takes this many times longer than without a mutant, and some seconds, counts as a hang."""
GRACE_S = 5.0


@dataclass
class Known:
    """What the first run of a suite has shown."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of each test that passed, in the order of the run."""
    tests_of: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """Tests by the file and line that they execute; nothing of native folders."""


@dataclass(frozen=True)
class Verdict:
    result: str
    by: str


class Judge:
    def __init__(self, copy: Path) -> None:
        self._copy = copy
        for name in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    def learn(self, tests: tuple[str, ...], named: str, traced: Path | None) -> Known:
        """Run tests with names like this on the code as it is, tracing one folder. Failing tests are left out."""
        known = Known()
        log = self._copy / "trace"
        log.write_text("")
        first = self._run(list(tests), _Observer(named=named), 3600.0, traced, log)
        again = [test for test, passed in first.passed.items() if not passed]
        if again:  # with a tracer some miss their time
            second = self._run(_files(again), _Observer(chosen=dict.fromkeys(again, 60.0)), 3600.0)
            first.passed |= second.passed
        if not first.passed or first.exit_status is None:
            raise RuntimeError(f"the tests cannot be run: {first.broken or first.last}")
        for test, passed in first.passed.items():
            if passed:
                known.seconds[test] = first.seconds[test]
            else:
                print(f"     left out, fails without a mutant: {test}", flush=True)
        for line in set(log.read_text().splitlines()):
            file, number, test = line.split(" ", 2)
            known.tests_of.setdefault((file, int(number)), set()).add(test)
        return known

    def judge(self, tests: list[str], known: Known) -> Verdict:
        """Run these tests in this order until one fails."""
        limits = {test: SLOWER * known.seconds[test] + GRACE_S for test in tests}
        in_all_s = SLOWER * sum(known.seconds[test] for test in tests) + 30.0
        outcome = self._run(_files(tests), _Observer(chosen=limits), in_all_s)
        if outcome.exit_status is None:
            return Verdict("timeout" if outcome.out_of_time else "killed", outcome.last)
        if outcome.exit_status == 0:
            return Verdict("survived", "")
        return Verdict("timeout" if outcome.timed_out else "killed", outcome.failed or "collection")

    def _run(
        self,
        tests: list[str],
        observer: _Observer,
        limit_s: float,
        traced: Path | None = None,
        log: Path | None = None,
    ) -> _Outcome:
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(told)
            self._child(tests, observer, tell, traced, log)
        os.close(tell)
        try:
            with os.fdopen(told, encoding="utf-8") as lines:
                return _heard(lines.fileno(), limit_s, observer.chosen or {})
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _child(self, tests: list[str], observer: _Observer, tell: int, traced: Path | None, log: Path | None) -> None:
        status = 70
        try:
            os.setsid()
            os.chdir(self._copy)
            paths = [str(self._copy / folder) for folder in ("", "proxy", "benchmarks")]
            os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *paths])
            sys.path[:0] = paths
            if traced is not None and log is not None:
                os.environ["MUTATIONS_TRACED"], os.environ["MUTATIONS_LOG"] = str(traced), str(log)
            runpy.run_path(str(HERE / "sitecustomize.py"))
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            observer.tell = tell
            arguments = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of the libraries that are loaded
            arguments += ["--timeout=0"] if observer.chosen is None else ["-x"]
            status = int(pytest.main(["-p", "no:cacheprovider", "-m", "not slow", *arguments, *tests], [observer]))
            _write(tell, {"exit": status})
        except BaseException:  # noqa: BLE001 - a fork: nothing above may see it
            _write(tell, {"broken": traceback.format_exc()})
        finally:
            os._exit(status)


@dataclass
class _Outcome:
    """What a child has said."""

    passed: dict[str, bool] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    timed_out: bool = False
    last: str = ""
    exit_status: int | None = None
    """None if the process died, or was out of time."""
    out_of_time: bool = False
    broken: str = ""
    """What pytest itself has raised: it makes errors of what a test has left behind."""

    def take(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self.last = message["started"]
        elif "broken" in message:
            self.broken = message["broken"]
        elif "exit" in message:
            self.exit_status = message["exit"]
        else:
            test = message["test"]
            self.passed[test] = self.passed.get(test, True) and message["passed"]
            self.seconds[test] = self.seconds.get(test, 0.0) + message["seconds"]
            if not message["passed"] and not self.failed:
                self.failed, self.timed_out = test, message["timed_out"]


class _Observer:
    """A plugin of pytest: runs chosen tests in their order, each within its time, and says what became of each."""

    tell = -1

    def __init__(self, chosen: dict[str, float] | None = None, named: str = "") -> None:
        self.chosen = chosen
        """Tests with the seconds of each, in the order to run them; None for all."""
        self._named = named

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.chosen is None:
            items[:] = [item for item in items if re.search(self._named, item.nodeid)]
            return
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[test] for test in self.chosen if test in by_name]
        for item in items:
            item.add_marker(pytest.mark.timeout(self.chosen[item.nodeid]), append=False)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _write(self.tell, {"started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped:
            _write(
                self.tell,
                {
                    "test": report.nodeid,
                    "passed": report.passed,
                    "seconds": report.duration,
                    "timed_out": report.failed and "Timeout" in str(report.longrepr)[-2000:],
                },
            )


def _write(tell: int, message: dict[str, object]) -> None:
    os.write(tell, (json.dumps(message) + "\n").encode())


def _heard(told: int, limit_s: float, chosen: dict[str, float]) -> _Outcome:
    """Everything until the child ends, or its time or that of a test is over."""
    outcome = _Outcome()
    until_s = in_all_s = time.monotonic() + limit_s
    waiting = b""
    poll = select.poll()
    poll.register(told)
    while poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
        got = os.read(told, 65536)
        if not got:
            return outcome
        *lines, waiting = (waiting + got).split(b"\n")
        for line in lines:
            outcome.take(json.loads(line))
        # pytest cannot end a test that hangs in native code.
        until_s = min(in_all_s, time.monotonic() + 2 * chosen.get(outcome.last, limit_s))
        if outcome.exit_status is not None:
            return outcome
    outcome.out_of_time = True
    return outcome


def _files(tests: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))
