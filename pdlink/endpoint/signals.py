"""`Signal`: something that happens once. Threads wait for it, coroutines await it, callbacks run when it happens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

_lock = threading.Lock()
"""Of all signals: held for a list operation, so one is enough and a signal stays small."""

_notifying = threading.local()


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call all of them, even if one raises; what the first one raised is raised."""
    failure = None
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001, PERF203  the others have a right to be called
            failure = failure or error
    if failure is not None:
        raise failure


class Signal:
    """Not set, and then set for good. Every method may be called from any thread."""

    _callbacks: tuple[Callable[[], None], ...] | None = ()
    """None once it is set. In the class, and a tuple, so that making a signal costs next to nothing."""

    def is_set(self) -> bool:
        return self._callbacks is None

    def set(self) -> None:
        """Run the callbacks in this thread, all of them even if one raises; what the first one raised is raised."""
        with _lock:
            callbacks, self._callbacks = self._callbacks, None
        if not callbacks:
            return
        outer, _notifying.on = getattr(_notifying, "on", False), True
        try:
            call_all(callbacks)
        finally:
            _notifying.on = outer

    def then(self, callback: Callable[[], None]) -> None:
        """Run `callback` once, when this is set: in the thread that sets it, or now and here if it is set already.

        It must not wait: a node sets its signals in the one thread that serves all its peers.
        """
        with _lock:
            if self._callbacks is not None:
                self._callbacks = (*self._callbacks, callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """Do not run it any more, if it has not run yet."""
        with _lock:
            if self._callbacks is not None:
                self._callbacks = tuple(one for one in self._callbacks if one is not callback)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait in this thread; False if it is not set within `timeout_s` (None: no limit).

        Raises RuntimeError in a callback, where it would wait for itself.
        """
        if self._callbacks is None:
            return True
        if getattr(_notifying, "on", False):
            raise RuntimeError("a callback of a transfer cannot wait: it runs in the thread that it would wait for")
        event = threading.Event()
        wake = event.set
        self.then(wake)
        if event.wait(timeout_s):
            return True
        self.forget(wake)
        return self.is_set()

    def __await__(self) -> Generator[object, None, None]:
        if self._callbacks is None:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def set_result() -> None:
            if not future.done():
                future.set_result(None)

        def set_from_any_thread() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits any more
                loop.call_soon_threadsafe(set_result)

        self.then(set_from_any_thread)
        try:
            yield from future
        finally:
            self.forget(set_from_any_thread)
