"""`make docs`: the pages of this repository as a site in build/site. Needs no network.

They are written to be read where they lie: in docs/, with links to files beside it. A site has pages only, so copies
are staged in build/site-source: docs/ is its root; what a page links to elsewhere is below repo/, with links changed
to fit. A link to a folder becomes plain text. --strict (and the tests) fail for links that lead nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build/site-source"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def staged(path: Path) -> Path:
    """Where a file of the repository goes, relative to the site."""
    return path.relative_to("docs") if path.is_relative_to("docs") else Path("repo", path)


def stage() -> set[Path]:
    """Copy pages and all that they link to, relative to the repository; returns what was copied."""
    shutil.rmtree(STAGE, ignore_errors=True)
    waiting = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").iterdir()) if path.suffix != ".1"]
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        target = STAGE / staged(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copy(ROOT / path, target)
            continue

        def moved(link: re.Match[str], path: Path = path) -> str:
            picture, text, name, anchor = link.groups()
            there = Path(os.path.normpath(path.parent / name))
            if (ROOT / there).is_file():
                waiting.append(there)
                return f"{picture}[{text}]({os.path.relpath(staged(there), staged(path).parent)}{anchor or ''})"
            return text if (ROOT / there).is_dir() else link[0]

        parts = re.split(r"(```.*?```)", (ROOT / path).read_text(), flags=re.DOTALL)
        target.write_text("".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in parts))
    return done


def build(*options: str) -> int:
    stage()
    command = [sys.executable, "-m", "zensical", "build", "--clean", *options]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(build(*sys.argv[1:]))
