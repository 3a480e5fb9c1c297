"""On PYTHONPATH of every process of a run: takes the copy's modules, and writes down which test executes which line.

MUTATIONS_TRACED is the folder, MUTATIONS_LOG the file. pytest names the test in the environment, which helper
processes inherit; a line is written when it is first met, so a process that is killed has said what it did.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType, FrameType

_ENOUGH_CALLS = 500
"""Of one function in one test: later ones hardly go another way, and tracing them takes minutes."""

# An editable install would find the modules of the checkout before those of the copy.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]


def current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def _trace(folder: str, log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    met: set[tuple[str, int, str]] = set()
    calls: Counter[tuple[CodeType, str]] = Counter()
    folder += os.sep

    def call(frame: FrameType, event: str, arg: object) -> object:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        called = (frame.f_code, current_test())
        calls[called] += 1
        return line if calls[called] <= _ENOUGH_CALLS else None

    def line(frame: FrameType, event: str, arg: object) -> object:
        test = current_test()
        here = (frame.f_code.co_filename, frame.f_lineno, test)
        if test and here not in met:
            met.add(here)
            os.write(out, f"{here[0]} {here[1]} {test}\n".encode())
        return line

    threading.settrace(call)
    sys.settrace(call)


if os.environ.get("MUTATIONS_TRACED"):
    _trace(os.environ["MUTATIONS_TRACED"], os.environ["MUTATIONS_LOG"])
