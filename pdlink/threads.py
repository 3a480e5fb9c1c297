"""Threads and tasks of pdlink: none ends in silence."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
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


def tell_failure(task: asyncio.Task[Any]) -> None:
    """Log why a task has ended that is awaited late or never: its `add_done_callback`."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task %s has died", task.get_name(), exc_info=error)
