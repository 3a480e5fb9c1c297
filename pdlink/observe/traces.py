"""A timeline as a file: whole or not at all, for everybody who reads it meanwhile."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError

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
    try:
        fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(json.dumps(timeline.trace()))
            os.chmod(partial, 0o644)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        log.log(logging.DEBUG if quiet else logging.WARNING, "timeline: cannot write %s: %s", path, error.strerror)
        return False
    return True
