"""`Cleared`: what was cleared and a tier may still have, in a file that outlives the process.

A tier may be away when its records are cleared. It is asked again until it has forgotten them; the file is what makes
that true for the next process, too. A row is written before `clear` is answered, and deleted when the tier has
forgotten the record. Stores that keep KV on one medium share its rows: the first one that removes a record is right.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

EVERYTHING = b""
"""The key of a clear of all that a tier has."""
_WAIT_S = 2.0
"""For another process that writes into the file."""
_TABLE = (
    "CREATE TABLE IF NOT EXISTS cleared (medium TEXT, key BLOB, clear BLOB, PRIMARY KEY (medium, key)) WITHOUT ROWID"
)


def places_of(disk: Path | None, state: Path | None) -> list[Path]:
    """Where a store keeps the file: beside its disk's records; where that fails, or there is none, in `state`."""
    return [directory / "cleared" for directory in (disk, state) if directory is not None]


class Cleared:
    """Thread-safe. Costs an fsync per call; nothing where no path is given."""

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        """paths: the first one that can be written is used; all are read."""
        self._paths = paths

    def add(self, clear: bytes, media: Iterable[str], keys: Sequence[bytes] | None) -> bool:
        """These records, or all, are to go from these media: whether it is noted, under what names the clear.

        What cannot be written is logged, too, if there is a path.
        """
        named = [EVERYTHING] if keys is None else list(keys)
        rows = [(medium, key, clear) for medium in media for key in named]
        if not rows:
            return True
        errors = []
        for path in self._paths:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with closing(_opened(path)) as database, database:
                    database.execute(_TABLE)
                    database.executemany("INSERT OR REPLACE INTO cleared VALUES (?, ?, ?)", rows)
            except (OSError, sqlite3.Error) as error:
                errors.append(f"{path}: {error}")
            else:
                return True
        if errors:
            log.error(
                "cleared KV of a tier that is away now can be found again after a restart: it cannot be noted "
                "(%s); make one of these paths writable and clear again",
                "; ".join(errors),
            )
        return False

    def of(self, medium: str) -> dict[bytes, bytes]:
        """Keys of a medium that are to go, with the clear that named them last."""
        found: dict[bytes, bytes] = {}
        for path in self._existing():
            try:
                with closing(_opened(path)) as database:
                    rows = database.execute("SELECT key, clear FROM cleared WHERE medium = ?", (medium,))
                    found.update((bytes(key), bytes(clear)) for key, clear in rows)
            except (OSError, sqlite3.Error) as error:
                log.warning("%s cannot be read: %s; what was cleared before may be found again", path, error)
        return found

    def done(self, medium: str, keys: Iterable[bytes], clear: bytes) -> None:
        """The medium has forgotten them, as far as nobody cleared them again since."""
        rows = [(medium, key, clear) for key in keys]
        for path in self._existing() if rows else ():
            try:
                with closing(_opened(path)) as database, database:
                    database.executemany("DELETE FROM cleared WHERE medium = ? AND key = ? AND clear = ?", rows)
            except (OSError, sqlite3.Error) as error:
                log.warning("%s cannot be written: %s; records that are gone are removed again", path, error)

    def _existing(self) -> list[Path]:
        return [path for path in self._paths if os.path.exists(path)]


def _opened(path: Path) -> sqlite3.Connection:
    """Each commit is on the disk when it returns, which is the default."""
    return sqlite3.connect(path, timeout=_WAIT_S)
