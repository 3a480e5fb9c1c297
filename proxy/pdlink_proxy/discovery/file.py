"""`file:PATH`: a directory with one JSON file for each worker, or one file with all of them; looked at all the time.

A worker writes its file under a name that begins with a dot, and renames it to NAME.json: no reader sees half of it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pdlink.errors import ConfigError

from ..members import Members
from ..membership import parse
from .base import ROLES, SourceDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..dialects import Dialect

log = logging.getLogger("pdlink.proxy")

_LOOK_S = 0.5
_MAX_FILE_NBYTES = 64 << 20


class FileSource:
    """Workers that a path lists."""

    def __init__(self, path: str, dialect: Dialect, *, look_s: float = _LOOK_S) -> None:
        """look_s: between two looks."""
        self._path, self._dialect, self._look_s = Path(path), dialect, look_s
        self._good: dict[str, tuple[tuple[int, int, int], Members]] = {}
        """By file name, its stamp and what it listed when it could last be used."""
        self._bad: dict[str, str] = {}
        """By file name, why it cannot be used; logged once."""

    async def follow(self, tell: Callable[[Members], None]) -> None:
        last: Members | None = None
        while True:
            members = await asyncio.to_thread(self._read)
            if members != last:
                tell(members)
                last = members
            await asyncio.sleep(self._look_s)

    def _read(self) -> Members:
        try:
            if not self._path.is_dir():
                return self._read_one(self._path)
            files = sorted(path for path in self._path.glob("*.json") if not path.name.startswith("."))
        except OSError as error:
            raise SourceDown(f"cannot read {self._path}: {error.strerror}") from None
        for gone in self._good.keys() - {path.name for path in files}:
            del self._good[gone]
        found = [members for path in files if (members := self._of(path)) is not None]
        return Members(*(tuple(each for members in found for each in getattr(members, role)) for role in ROLES))

    def _of(self, path: Path) -> Members | None:
        """What one worker's file lists; what it listed before if it cannot be used now."""
        try:
            members = self._read_one(path)
        except FileNotFoundError:
            return None
        except (OSError, SourceDown) as error:
            if self._bad.get(path.name) != str(error):
                self._bad[path.name] = str(error)
                log.warning("%s is not used: %s", path, error)
            before = self._good.get(path.name)
            return before[1] if before is not None else None
        if self._bad.pop(path.name, None) is not None:
            log.warning("%s is used again", path)
        return members

    def _read_one(self, path: Path) -> Members:
        """Raises OSError, SourceDown."""
        stat = path.stat()
        stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
        known = self._good.get(path.name)
        if known is not None and known[0] == stamp:
            return known[1]
        if stat.st_size > _MAX_FILE_NBYTES:
            raise SourceDown(
                f"{path}: got {stat.st_size} bytes; expected at most {_MAX_FILE_NBYTES}; list fewer workers"
            )
        try:
            document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(document, dict) and "role" in document:
                role = document.pop("role")
                if role not in ROLES:
                    raise ConfigError(f"role: got {role!r}; expected prefill, decode or both; write one of them")
                document = {role: [document]}
            members = parse(document, str(path), dialect=self._dialect)
        except (ValueError, yaml.YAMLError, ConfigError, RecursionError) as error:
            raise SourceDown(" ".join(str(error).split())) from None
        self._good[path.name] = stamp, members
        return members
