"""`Late`: opened in a thread of its own, because a frozen file system answers nobody who opens a file on it."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

from pdlink import threads
from pdlink.errors import PdlinkError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
_T = TypeVar("_T")

WAIT_S = 5.0
"""For the first attempt, from its begin; a disk of a million records opens in 0.3 s."""
PAUSE_S = 10.0
"""Between two attempts."""


class Late(Generic[_T]):
    """Tried until it is open, as long as what fails is the medium. Thread-safe; nobody waits but in `wait`."""

    def __init__(self, what: str, attempt: Callable[[], _T]) -> None:
        """what: for messages. attempt: opens it, or raises OSError or PdlinkError, in the thread."""
        self.opened: _T | None = None
        self.problem = f"{what} does not answer; it is used as soon as it does"
        """Why it is not open; empty when it is."""
        self._what, self._attempt = what, attempt
        self._first: Future[None] = Future()
        self._begun_s = time.monotonic()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Guards the calls, and `opened` with them."""
        self._calls: list[Callable[[_T], None]] = []
        self._told = ""
        threads.guarded("pdlink-store-open", self._run, self._died).start()

    def wait(self) -> None:
        """Until the first attempt has ended, or is `WAIT_S` old: several take no longer than one. Raises what it
        raised."""
        try:
            self._first.result(max(0.0, self._begun_s + WAIT_S - time.monotonic()))
        except TimeoutError:
            self.tell()

    def tell(self) -> None:
        """Log why it is not open, if that is new."""
        problem = self.problem
        if problem and problem != self._told:
            log.warning("%s", problem)
            self._told = problem

    def then(self, call: Callable[[_T], None]) -> None:
        """Call it with what is opened, after earlier calls: now, or later in the thread that opens it."""
        with self._lock:
            if self.opened is None:
                self._calls.append(call)
                return
        call(self.opened)

    def close(self) -> None:
        """Try no more. What is open, or opens still, is closed by a call of `then`."""
        self._closed.set()

    def _died(self, why: str) -> None:
        self.problem = why

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                opened = self._attempt()
            except Exception as error:
                self.problem = str(error)
                if not self._first.done():
                    self._first.set_exception(error)
                if not isinstance(error, (OSError, PdlinkError)):  # a fault of ours, which ends the thread
                    raise
                if self._told:
                    self.tell()
                self._closed.wait(PAUSE_S)
                continue
            while calls := self._calls_or_open(opened):
                for call in calls:
                    call(opened)
            if self._told:
                log.warning("%s is used now", self._what)
            if not self._first.done():
                self._first.set_result(None)
            return

    def _calls_or_open(self, opened: _T) -> list[Callable[[_T], None]]:
        """The calls to make first; it is open when there are none left."""
        with self._lock:
            calls, self._calls = self._calls, []
            if not calls:
                self.opened, self.problem = opened, ""
            return calls
