"""The timeline of the last transfers, kept in a file: engines end their workers without telling them first.

The file is there whole or not at all, for everybody who reads it meanwhile.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdlink import threads
from pdlink.events import listen
from pdlink.observe.timeline import Timeline
from pdlink.observe.trace import Laid, make

if TYPE_CHECKING:
    from pdlink.events import Event

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
"""Least time between two writes of the file."""


class TraceFile:
    """Writes the file in a thread of its own, soon after something has happened."""

    def __init__(self, name: str, path: str) -> None:
        """path: a trace for ui.perfetto.dev; or, if the name ends in .json, its events for programs, as a
        `timeline.Dump`."""
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
        dump, path = self._timeline.dump(), self._path
        try:
            fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(msgspec.json.encode(dump) if path.suffix == ".json" else make([Laid(dump)]).data)
                os.chmod(partial, 0o644)
                os.replace(partial, path)
            except BaseException:
                os.unlink(partial)
                raise
        except OSError as error:
            level = logging.DEBUG if self._failed else logging.WARNING
            log.log(level, "timeline: cannot write %s: %s", path, error.strerror)
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        """Write what there is."""
        self._stop_listening()
        self._ended.set()
        self._changed.set()
        self._thread.join(_INTERVAL_S)
        self._write()
