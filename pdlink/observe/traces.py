"""A timeline as a file: whole or not at all, for everybody who reads it meanwhile.

A trace for ui.perfetto.dev; or, if its name ends in .json, the events of it for programs, as a `timeline.Dump`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdlink.errors import ConfigError
from pdlink.observe.trace import Laid, make

if TYPE_CHECKING:
    from pdlink.observe.timeline import Timeline

log = logging.getLogger(__name__)


def path_of(setting: str, name: str) -> Path:
    """Where the setting `timeline` says that the trace of the worker `name` goes.

    Raises ConfigError if nothing can be written there; at the end nobody would be there to be told.
    """
    path = Path(setting.replace("{name}", name))
    if path.is_dir():
        raise ConfigError(f"timeline: {path} is a directory; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        reason = "is not writable" if path.parent.exists() else "is not there"
        raise ConfigError(f"timeline: cannot write {path}: the directory {path.parent} {reason}")
    return path


def write(timeline: Timeline, path: Path, *, quiet: bool = False) -> bool:
    """Whether the trace is in the file now; why not is logged, unless `quiet`."""
    dump = timeline.dump()
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
        log.log(logging.DEBUG if quiet else logging.WARNING, "timeline: cannot write %s: %s", path, error.strerror)
        return False
    return True
