"""`pdlink bench figures`: every benchmark in sequence, a dated page of their tables and pictures into one directory.

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
    "layouts": "transfer --layouts",
    "overlap": "overlap",
    "control": "control",
    "serving": "serving",
    "replay": "replay",
    "tiers": "tiers",
    "warm": "warm",
}
"""Name of the figure, which is part of its files' names, and the command that makes it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--samples", type=Path, metavar="DIR", help="keep every sample as JSON here")
    parser.add_argument(
        "--peers", default="nixl,nixl-polled,mooncake", help=f"of {', '.join(PEERS)} (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run them all; 1 if one of them failed or missed what it must reach."""
    console = Console()
    for directory in filter(None, (args.directory, args.samples)):
        directory.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).date().isoformat()
    page = [f"# Results of {date}"]
    verdicts: list[str] = []
    failed = False
    for name in args.only or COMMANDS:
        picture, tables = (args.directory / f"{date}-{name}{suffix}" for suffix in (".png", ".md"))
        plot.check_can_plot(picture)
        command = COMMANDS[name].format(peers=args.peers)
        words = [*command.split(), "--markdown", str(tables), "--plot", str(picture)]
        if args.samples:
            words += ["--json", str(args.samples / f"{date}-{name}.json")]
        console.rule(f"pdlink bench {' '.join(words)}")
        sys.stdout.flush()
        started_s = time.monotonic()
        status = subprocess.run([sys.executable, "-m", "pdlink", "bench", *words], check=False).returncode
        failed = failed or status != 0
        verdict = "done" if status == 0 else f"exit status {status}"
        verdicts.append(f"{name}: {verdict} after {time.monotonic() - started_s:.0f} s")
        if tables.exists():
            page += [f"## {name}", f"`pdlink bench {command}`", tables.read_text(encoding="utf-8").strip()]
            page += [f"![{name}]({picture.name})"] if picture.exists() else []
            tables.unlink()
    (args.directory / f"{date}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    console.rule(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    for line in verdicts:
        console.print(line, highlight=False)
    return 1 if failed else 0
