"""Lines of the log that strangers cause: short, and few of them.

A stranger who reaches a port may send it anything. With a line for each, or a traceback, strangers fill a disk. But
where our own code has failed, the log says where.
"""

from __future__ import annotations

import logging
import time
import traceback

from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from pdlink.logs import printable

LINES = 10
WINDOW_S = 10.0
"""At most so many lines in so long; how many more there were stands in the first line after it."""
_MAX_CHARS = 200
_OURS = ("pdlink", "pdlink_proxy")
_THEIRS = (HttpProcessingError, ClientPayloadError, OSError)
"""What a stranger's bytes, or his leaving, raise in our code too."""


class FewLines(logging.Filter):
    """Of one logger, or of one place that logs."""

    def __init__(self) -> None:
        super().__init__()
        self._since_s = float("-inf")
        self._num = 0

    def admits(self, now_s: float) -> str | None:
        """What to write behind the line; None: leave it out."""
        left_out = 0
        if now_s - self._since_s >= WINDOW_S:
            left_out, self._since_s, self._num = max(0, self._num - LINES), now_s, 0
        self._num += 1
        if self._num > LINES:
            return None
        return f" ({left_out} such lines were left out)" if left_out else ""

    def filter(self, record: logging.LogRecord) -> bool:
        """An exception becomes its name: its text may quote what was sent. Of a bug of ours its frames stay, too."""
        more = self.admits(time.monotonic())
        if more is None:
            return False
        text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        what = f"{text}: {type(error).__name__}" if error is not None else text
        record.msg, record.args, record.exc_info = printable(what, _MAX_CHARS) + more, (), None
        if error is not None and not isinstance(error, _THEIRS):
            record.msg += _frames(error)
        return True


def _frames(error: BaseException) -> str:
    """Where it was raised, in lines; empty unless it came through code of ours."""
    walked = list(traceback.walk_tb(error.__traceback__))
    if not any(frame.f_globals.get("__name__", "").partition(".")[0] in _OURS for frame, _ in walked):
        return ""
    return "\n" + "".join(traceback.StackSummary.extract(iter(walked)).format()).rstrip()


def http_logger(name: str) -> logging.Logger:
    """For aiohttp's server: what clients send that is no HTTP."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, FewLines) for each in logger.filters):
        logger.addFilter(FewLines())
    return logger
