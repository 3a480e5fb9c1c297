"""Fetch a running worker's timeline into a file."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

from pdlink.errors import RemoteError


class CannotFetch(RemoteError):
    """A worker did not answer a command of `pdlink`."""

    code = "cannot_fetch"


def fetch_timeline(url: str, output: str, timeout_s: float = 10.0, *, key: str | None = None) -> str:
    """Write the trace of the worker at `url` to `output`; returns a sentence about it. Raises CannotFetch.

    key: the secret that the worker asks callers for, if it does.
    """
    if not url.startswith(("http://", "https://")):
        raise CannotFetch(f"URL must begin with http:// or https://, got {url!r}")
    try:
        asked = urllib.request.Request(f"{url.rstrip('/')}/pdlink/timeline", headers={"X-Pdlink-Key": key or ""})
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            text = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise CannotFetch(f"{url} did not answer with a timeline: {error}; is it a pdlink worker?") from None
    Path(output).write_bytes(text)
    events = json.loads(text)["traceEvents"]
    transfers = {event["args"]["transfer_id"] for event in events if "transfer_id" in event.get("args", {})}
    return f"{output}: {len(transfers)} transfers, {len(events)} events; open it at ui.perfetto.dev"
