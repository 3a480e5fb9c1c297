"""What every supervisor does with its posts: wait until all are ready, show them, keep them until it is stopped."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.fleet.child import ChildFailed, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.fleet.post import Post

log = logging.getLogger("pdlink.up")

_LOOK_S = 0.1
_START_LOOK_S = 0.05
_WORD_S = 5.0
"""Interval of progress lines while processes start."""


class _Stopped(BaseException):
    """SIGINT or SIGTERM. A BaseException, so that no handler of errors catches it."""


@contextlib.contextmanager
def until_stopped() -> Iterator[None]:
    """Leave this block at SIGINT or SIGTERM, wherever it is. Later ones are ignored: nothing disturbs the end."""
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise _Stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        yield
    except _Stopped:
        pass
    finally:
        stopping = True


def await_all(posts: Sequence[Post], timeout_s: float) -> None:
    """Return when all are ready, and log their progress. Raises ChildFailed."""
    began_s = said_s = time.monotonic()
    told = set[str]()
    try:
        for post in posts:
            post.look()
        log.info("starting %s", ", ".join(post.label for post in posts))
        while waiting := [post for post in posts if not post.ready]:
            for post in posts:  # ready ones, too: one may end before the others are ready
                post.look()
                if post.ready and post.label not in told:
                    told.add(post.label)
                    log.info("%s is ready after %.1f s", post.label, time.monotonic() - began_s)
            now_s = time.monotonic()
            doing = [f"{post.label} ({post.doing})" for post in waiting]
            if now_s - began_s > timeout_s:
                raise ChildFailed(f"not ready within {timeout_s:.0f} s: {', '.join(doing)}")
            if now_s - said_s > _WORD_S:
                said_s = now_s
                log.info("%.0f s: %s", now_s - began_s, ", ".join(doing))
            time.sleep(_START_LOOK_S)
    finally:
        warn_once([(post.label, post.warnings) for post in posts])


def keep(posts: Sequence[Post], ended: Callable[[], bool] = lambda: False) -> None:
    """Start them again when they end, until `ended`. Raises ChildFailed if a post gives up."""
    while not ended():
        for post in posts:
            post.look()
        time.sleep(_LOOK_S)


def picture(posts: Sequence[Post], model: str, head: str, note: str = "") -> str:
    """All processes with their addresses, the proxy last, and a line to try it with."""
    lines, proxy = [head, ""], posts[-1].url
    for post in posts:
        control = post.facts.get("control", "")
        more = f"control {control}" if control else ""
        lines.append(f"  {post.label:<12}{post.url:<28}{more}".rstrip())
    if note:
        lines += ["", note]
    body = json.dumps({"model": model, "prompt": "The KV cache crosses over", "max_tokens": 48, "stream": True})
    lines += [
        "",
        "try it:",
        f"  curl -N {proxy}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        "",
        "see where the KV goes, and where the time to the first token goes:",
        f"  {proxy}/pdlink/          in a browser",
        f"  {_command()} top {proxy}       in a terminal",
        "",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)


def _command() -> str:
    """What to type for pdlink; with its folder where that is not on the PATH, as after `make up`."""
    return "pdlink" if shutil.which("pdlink") else str(Path(sys.executable).with_name("pdlink"))
