"""How log lines look: text for people or JSON for programs, and whose request or transfer a line is about."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from pdlink.errors import without_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_ABOUT = ("request_id", "transfer_id")

summaries = logging.getLogger("pdlink.summary")
"""For one line every few seconds under load."""


def about(*, request_id: str = "", transfer_id: str = "") -> Mapping[str, str]:
    """For `extra=` of a line about one request or transfer: a field each in JSON. The text names them itself."""
    return {"request_id": request_id, "transfer_id": transfer_id}


def printable(text: str, max_chars: int) -> str:
    """A peer's text for a log or a report: one line without control characters, cut."""
    text = text[:max_chars]
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def set_up(level: str | None, form: str | None, label: str = "") -> None:
    """Log to standard error, until it is called again. level: None is warning, and info for summaries. label: of this
    process among others in one terminal.

    Changes nothing in a process whose log belongs to somebody else.
    """
    root = logging.getLogger()
    handler = next((each for each in root.handlers if isinstance(each, _Handler)), None)
    if handler is None:
        if root.handlers:
            return
        handler = _Handler()
        root.addHandler(handler)
    handler.setFormatter(_Json(label) if form == "json" else _Text(label))
    root.setLevel((level or "warning").upper())
    summaries.setLevel((level or "info").upper())


def level() -> str | None:
    """Of this process, as `set_up` takes it."""
    name = logging.getLevelName(logging.getLogger().level).lower()
    return name if name in LEVELS else None


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours."""


class _Text(logging.Formatter):
    def __init__(self, label: str) -> None:
        who = f"{label} ".replace("%", "%%") if label else ""
        super().__init__(f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return without_credentials(super().format(record))


class _Json(logging.Formatter):
    """A line, an object."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    def format(self, record: logging.LogRecord) -> str:
        at_s = record.created
        found = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at_s))}.{int(at_s % 1 * 1000):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._label:
            found["process"] = self._label
        for name in _ABOUT:
            if value := getattr(record, name, ""):
                found[name] = str(value)
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return without_credentials(msgspec.json.encode(found).decode())
