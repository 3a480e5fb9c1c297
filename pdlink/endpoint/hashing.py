"""Reads KV in a thread of its own: a gigabyte takes a quarter of a second, for which nobody else may wait."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Hashing:
    """One thread, which starts with the first job. Each push or transfer that is verified has one job at most."""

    def __init__(self, call: Callable[[Callable[[], None], Callable[[str], None]], None]) -> None:
        """call(command, cost): runs the command in the endpoint's thread, under its lock, or `cost(reason)`."""
        self._call = call
        self._executor: ThreadPoolExecutor | None = None
        self._closing = threading.Event()

    @property
    def closing(self) -> bool:
        """Whether jobs are to give up: what they read will be unmapped."""
        return self._closing.is_set()

    def submit(self, work: Callable[[], T], then: Callable[[T], None], cost: Callable[[str], None]) -> None:
        """Run `work`, then `then(result)` in the endpoint's thread and under its lock, or `cost(reason)`."""
        if self.closing:
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "pdlink-hashing")

        def ended(future: Future[T]) -> None:
            if not future.cancelled():
                self._call(lambda: then(future.result()), cost)

        self._executor.submit(work).add_done_callback(ended)

    def close(self) -> None:
        """Return when nothing is read any more. What was to be done is not."""
        self._closing.set()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
