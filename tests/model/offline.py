"""Plays many random schedules of the whole link, one seed each, and keeps the result.

    python -m tests.model.offline --schedules 100000 --seed 1 --json model.json

Stops at the first violation unless told to go on; every violation is reported with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from collections import Counter
from pathlib import Path

from .engine import Violation
from .moves import play, random_schedule
from .mutants import MUTANTS, planted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model.offline", description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule; the next has the next one")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first violation")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began_s = time.monotonic()
    counts: Counter[str] = Counter()
    violations: list[dict[str, object]] = []
    num_played = 0
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        shape, profile, schedule = random_schedule(seed)
        num_played += 1
        counts[f"profile {profile}"] += 1
        try:
            counts += play(shape, profile, schedule).counts
        except Violation as violation:
            violations.append({"seed": seed, "profile": profile, "violation": str(violation)})
            print(f"seed {seed} ({profile}): {violation}")
            if not arguments.go_on:
                break
        if num_played % 1000 == 0:
            print(f"{num_played} schedules, {len(violations)} violations", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began_s
    found = {name: schedules_to_find(name, arguments.seed) for name in MUTANTS}
    print(f"{num_played} schedules in {seconds:.0f} s, {len(violations)} violations")
    for name, needed in found.items():
        print(f"planted bug {name!r}: " + (f"found by schedule {needed}" if needed else "NOT FOUND"))
    if arguments.json is not None:
        result = {
            "first_seed": arguments.seed,
            "schedules": num_played,
            "seconds": round(seconds, 1),
            "python": platform.python_version(),
            "violations": violations,
            "counts": dict(sorted(counts.items())),
            "schedules_to_find_planted_bug": found,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if violations or not all(found.values()) else 0


def schedules_to_find(name: str, first_seed: int, limit: int = 5000) -> int | None:
    """How many schedules it takes to find a planted bug; None if that many do not."""
    with planted(name):
        for number in range(limit):
            try:
                play(*random_schedule(first_seed + number, MUTANTS[name].profile))
            except Violation:
                return number + 1
    return None


if __name__ == "__main__":
    sys.exit(main())
