"""The timeline of the last transfers, kept in a file: engines end their workers without telling them first."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink import threads
from pdlink.events import listen
from pdlink.observe import traces
from pdlink.observe.timeline import Timeline

if TYPE_CHECKING:
    from pdlink.events import Event

_INTERVAL_S = 1.0
"""Least time between two writes of the file."""


class TraceFile:
    """Writes the file in a thread of its own, soon after something has happened."""

    def __init__(self, name: str, path: str) -> None:
        """path: a trace for ui.perfetto.dev, or its events if the name ends in .json (`pdlink.observe.traces`)."""
        self._timeline, self._path = Timeline(name), Path(path)
        self._changed, self._ended = threading.Event(), threading.Event()
        self._failed = False
        self._stop_listening = listen(self._on_event)
        self._thread = threads.guarded("pdlink-timeline", self._main, lambda _: self._stop_listening())
        self._thread.start()

    def _on_event(self, event: Event) -> None:
        self._timeline(event)
        self._changed.set()

    def _main(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._changed.wait()
            self._changed.clear()
            self._write()

    def _write(self) -> None:
        """The first failure is logged, and no later one: a full disk stays full for long."""
        self._failed = not traces.write(self._timeline, self._path, quiet=self._failed)

    def close(self) -> None:
        """Write what there is."""
        self._stop_listening()
        self._ended.set()
        self._changed.set()
        self._thread.join(_INTERVAL_S)
        self._write()
