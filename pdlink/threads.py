"""Threads of pdlink: each has one outermost frame, so that none ends in silence."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


def guarded(name: str, run: Callable[[], None], failed: Callable[[str], None]) -> threading.Thread:
    """A daemon thread, not started, that does `run`.

    failed(why): what `run` raises is logged, and this ends what the thread served, in the thread. What it raises
    itself is logged, too.
    """

    def main() -> None:
        try:
            run()
        except Exception as error:
            log.exception("thread %s has died", name)
            try:
                failed(f"thread {name} has died: {type(error).__name__}: {error}")
            except Exception:
                log.exception("what thread %s served could not be ended", name)

    return threading.Thread(target=main, name=name, daemon=True)
