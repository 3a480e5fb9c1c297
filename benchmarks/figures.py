"""`pdlink bench figures`: every benchmark in sequence, dated JSON and pictures into one directory.

Each runs as a command of its own, so one that fails does not take the others with it; the lines at the end say which.
For figures worth keeping the machine should do nothing else meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from . import plot
from .transfer import PEERS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    "bars": "transfer --bars --peers {peers} --layer-ms 2.5",
    "sizes": "transfer --sweep sizes --peers {peers}",
    "layouts": "transfer --sweep layouts",
    "bind": "bind",
    "tune": "tune",
    "overlap": "overlap",
    "control": "control",
    "sharing": "sharing",
    "serving": "serving",
}
"""Name of the figure, which is part of its files' names, and the command that makes it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench figures`."""
    parser.add_argument(
        "--only", nargs="+", choices=list(COMMANDS), metavar="NAME", help=f"of {', '.join(COMMANDS)}; default all"
    )
    parser.add_argument(
        "-d",
        "--directory",
        type=Path,
        default=Path("benchmarks/results"),
        metavar="DIR",
        help="where to (default %(default)s)",
    )
    parser.add_argument(
        "--peers", default="nixl,nixl-polled,mooncake", help=f"of {', '.join(PEERS)} (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run them all; 1 if one of them failed or missed what it must reach."""
    console = Console()
    args.directory.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).date().isoformat()
    said: list[str] = []
    failed = False
    for name in args.only or COMMANDS:
        stem = args.directory / f"{date}-{name}"
        plot.check_can_plot(stem.with_suffix(".png"))
        words = COMMANDS[name].format(peers=args.peers).split()
        words += ["--json", str(stem.with_suffix(".json")), "--plot", str(stem.with_suffix(".png"))]
        console.rule(f"pdlink bench {' '.join(words)}")
        sys.stdout.flush()
        started_s = time.monotonic()
        status = subprocess.run([sys.executable, "-m", "pdlink", "bench", *words], check=False).returncode
        failed = failed or status != 0
        verdict = "done" if status == 0 else f"exit status {status}"
        said.append(f"{name}: {verdict} after {time.monotonic() - started_s:.0f} s")
    console.rule(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    for line in said:
        console.print(line, highlight=False)
    return 1 if failed else 0
