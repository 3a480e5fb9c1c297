"""Changes the sources in small ways, one at a time, and runs the tests that should notice.

    python tools/mutations/run.py --sample 200 --seed 1 --json mutations.json
    python tools/mutations/run.py --only csrc/tcp,csrc/copy --sample 40

universalmutator proposes the changes by the rules beside this file; mutants.py keeps what changes the run and
draws a sample by the seed. Each mutant goes into a copy of the checkout, where judge.py runs the tests that execute
its line (of native code: the tests of its folder, those first that have killed before). A mutant is *killed* when a
test fails, *timeout* when one takes several times longer than without it, and *survived* when all pass. A survivor
needs a test or a reason (docs/incidents.md).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from judge import Judge, Known, Verdict
from mutants import ROOT, Mutant, Suite, draw, function_lines, statement_lines, suite_of
from native import Native


class Workshop:
    """A copy of the checkout that may be spoiled, and what is known about its tests."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self._judge = Judge(copy)
        self._native = Native(copy)
        self._known: dict[Suite, Known] = {}
        self._kills: Counter[str] = Counter()

    def run(self, mutant: Mutant) -> None:
        """Plant it, build if need be, run the tests, take it out again."""
        suite = suite_of(mutant.path)
        known = self._learnt(suite)
        target = self._copy / mutant.path
        kept, times = target.read_text(encoding="utf-8"), target.stat()
        began_s = time.monotonic()
        try:
            target.write_text(mutant.planted_in(kept), encoding="utf-8")
            if suite.module and not self._native.build(suite.module):
                mutant.result = "invalid"
            else:
                tests = self._in_order(mutant, target, kept, known)
                verdict = self._judge.judge(tests, known) if tests else Verdict("survived", "no test executes it")
                mutant.result, mutant.by = verdict.result, verdict.by
                self._kills[mutant.by] += 1
        finally:
            target.write_text(kept, encoding="utf-8")
            os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
            if suite.module:
                self._native.give_back(suite.module)
        mutant.seconds = round(time.monotonic() - began_s, 1)

    def _learnt(self, suite: Suite) -> Known:
        if suite not in self._known:
            if suite.module:
                self._native.keep(suite.module)
            began_s = time.monotonic()
            known = self._judge.learn(suite.tests, suite.named, None if suite.module else self._copy / suite.folder)
            self._known[suite] = known
            took_s = time.monotonic() - began_s
            print(
                f"     {suite.folder}: {len(known.seconds)} tests pass without a mutant ({took_s:.0f} s)", flush=True
            )
        if suite.module:  # another suite may have left its own build
            self._native.build(suite.module)
        return self._known[suite]

    def _in_order(self, mutant: Mutant, target: Path, source: str, known: Known) -> list[str]:
        """Tests that execute the line, the fastest first; of native code all of them."""
        reaching = set(known.seconds)
        if target.suffix == ".py":
            # Of a function that is called very often not every line was seen.
            for lines in (statement_lines(source, mutant.line), function_lines(source, mutant.line)):
                found = set().union(*(known.tests_of.get((str(target), line), set()) for line in lines))
                if found:
                    break
            reaching &= found
        return sorted(
            reaching, key=lambda test: (-self._kills[test] / (0.1 + known.seconds[test]), known.seconds[test])
        )


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
        workshop = Workshop(copy)
        for number, mutant in enumerate(sample, 1):
            known = done.get((mutant.path, mutant.before, mutant.after))
            if known is None:
                workshop.run(mutant)
            else:
                mutant.result, mutant.by, mutant.seconds = known.result, known.by, known.seconds
            print(f"{number:4} {mutant.result:9} {mutant.seconds:5.0f} s  {mutant.path}:{mutant.line}", flush=True)
            if mutant.result == "survived":
                print(f"       - {mutant.before}\n       + {mutant.after}\n         {mutant.by}", flush=True)
            if options.json is not None:
                _save(options.json, options.seed, sample[:number])
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    print(_table(sample))
    return 0


def prepare(copy: Path) -> None:
    """What is tracked, and the native modules, in a folder that may be spoiled."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    located = "import pdlink._tcp; print(pdlink._tcp.__file__)"
    product = subprocess.run(
        [sys.executable, "-c", located], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    for module in Path(product).parent.glob("*.so"):
        shutil.copy2(module, copy / "pdlink")


def _table(mutants: list[Mutant]) -> str:
    """The results by folder."""
    results = ("killed", "timeout", "survived", "invalid")
    rows = [f"| folder | mutants | {' | '.join(results)} |", "|---" * (2 + len(results)) + "|"]
    for folder in dict.fromkeys(suite_of(mutant.path).folder for mutant in sorted(mutants, key=lambda one: one.path)):
        counts = Counter(mutant.result for mutant in mutants if suite_of(mutant.path).folder == folder)
        cells = [f"`{folder}`", str(counts.total() - counts["invalid"]), *(str(counts[result]) for result in results)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


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
