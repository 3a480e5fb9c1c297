"""`Line`: jobs done in order by threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Line:
    def __init__(self, name: str, num_threads: int = 1) -> None:
        """Daemon threads: one that is stuck in a medium must not keep the process."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        """Guards the jobs and `_ended`."""
        self._ended = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None]) -> bool:
        """Do it after what is in line. What it raises is logged. False after `end`: it is not done then."""
        with self._changed:
            if not self._ended:
                self._jobs.append(job)
                self._changed.notify()
            return not self._ended

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        """The same, and what becomes of it; after `end` a future that was cancelled."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except Exception as error:  # noqa: BLE001 - raised where the future is read
                done.set_exception(error)

        if not self.put(run):
            done.cancel()
        return done

    def wait(self) -> None:
        """Until what is in line now is done; of one thread."""
        try:
            self.submit(lambda: None).result()
        except CancelledError:
            for thread in self._threads:
                thread.join()

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    def end(self) -> None:
        """End when what is in line is done."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Do what is in line, and end; return after `timeout_s` if that takes longer."""
        self.end()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job of %s failed", threading.current_thread().name)
            del job  # what it refers to may be memory that somebody waits for

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._ended)
            return self._jobs.popleft() if self._jobs else None
