"""How many Python calls a layer takes on its way, in each of its three roles, and how many functions a request."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).parents[2] / "tools/walk.py"
MOST_CALLS = {"engine": 10, "sender": 12, "receiver": 12}
MOST_FUNCTIONS, MOST_FILES = 252, 60
"""Of a request's own. On a busy machine a look at the sockets' memory falls into each walk, too."""


def walked(what: str) -> str:
    command = [sys.executable, str(WALK), what]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_layer_takes_no_more_calls_than_it_may() -> None:
    calls = {role: int(count) for role, count in re.findall(r"^(\w+): (\d+) calls", walked("layer"), re.MULTILINE)}
    assert calls.keys() == MOST_CALLS.keys()
    assert not {role: count for role, count in calls.items() if count > MOST_CALLS[role]}


def test_request_takes_no_more_functions_and_files_than_it_may() -> None:
    told = re.search(r"^the request's own: \d+ calls, (\d+) functions, (\d+) files$", walked("request"), re.MULTILINE)
    assert told is not None
    functions, files = map(int, told.groups())
    assert functions <= MOST_FUNCTIONS
    assert files <= MOST_FILES
