"""`Line`: jobs done in order by threads of their own."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Line:
    def __init__(self, name: str, num_threads: int = 1) -> None:
        """Daemon threads: one that is stuck in a medium must not keep the process."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Do it after what is in line. What it raises is logged."""
        self._jobs.put(job)

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        """The same, and what becomes of it."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except Exception as error:  # noqa: BLE001 - raised where the future is read
                done.set_exception(error)

        self.put(run)
        return done

    def close(self, timeout_s: float) -> None:
        """Do what is in line, and end; return after `timeout_s` if that takes longer."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job of %s failed", threading.current_thread().name)
            del job  # what it refers to may be memory that somebody waits for
