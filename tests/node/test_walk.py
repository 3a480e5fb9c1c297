"""How many Python calls a layer takes on its way, in each of its three roles."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).parents[2] / "tools/walk.py"
MOST_CALLS = {"engine": 10, "sender": 12, "receiver": 12}


def test_layer_takes_no_more_calls_than_it_may() -> None:
    command = [sys.executable, str(WALK), "layer"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    calls = {role: int(count) for role, count in re.findall(r"^(\w+): (\d+) calls", told, re.MULTILINE)}
    assert calls.keys() == MOST_CALLS.keys()
    assert not {role: count for role, count in calls.items() if count > MOST_CALLS[role]}
