"""The site is built from the pages as they are, without a link that leads nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_site_is_built_without_a_warning_and_asks_nobody_else(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    built = subprocess.run(
        [sys.executable, "tools/site.py", "--strict"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    page = (ROOT / "build/site/index.html").read_text()
    assert "X-Pdlink-KV" in page
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.https?:", page)
