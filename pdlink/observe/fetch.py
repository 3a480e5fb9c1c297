"""Fetch a running worker's timeline into a file."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pdlink.errors import ConfigError, RemoteError


class CannotFetch(RemoteError):
    """A worker did not answer a command of `pdlink`."""

    code = "cannot_fetch"


def fetch_timeline(url: str, output: str, timeout_s: float = 10.0, *, key: str | None = None) -> str:
    """Write the trace of the worker at `url` to `output`; returns a sentence about it.

    key: the secret that the worker asks callers for, if it does.
    Raises CannotFetch, or ConfigError if the file cannot be written.
    """
    url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    try:
        text = _get(f"{url}/pdlink/timeline", timeout_s, key)
        num_events, num_transfers = _count(json.loads(text))
    except urllib.error.HTTPError as error:
        raise CannotFetch(f"{url}: {_meaning(url, error.code, timeout_s, key)}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise CannotFetch(f"{url} did not answer: {getattr(reason, 'strerror', None) or reason}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CannotFetch(f"{url} answered with something that is no timeline; is it a pdlink worker?") from None
    try:
        Path(output).write_bytes(text)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {output}: {error.strerror}") from None
    return f"{output}: {num_transfers} transfers, {num_events} events; open it at ui.perfetto.dev"


def _count(trace: Any) -> tuple[int, int]:
    """Events and transfers; raises whatever comes where the trace is none."""
    events = trace["traceEvents"]
    transfers = {event["args"]["transfer_id"] for event in events if "transfer_id" in event.get("args", {})}
    return len(events), len(transfers)


def _get(url: str, timeout_s: float, key: str | None) -> bytes:
    asked = urllib.request.Request(url, headers={"X-Pdlink-Key": key or ""})
    with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
        text: bytes = answer.read()
        return text


def _meaning(url: str, status: int, timeout_s: float, key: str | None) -> str:
    """Why a server that answers gives no timeline, and what to do."""
    if status == 401:
        if key is None:
            return "the worker asks for its key; give --key-file FILE, its security.http_key_file"
        return "the worker has another key; --key-file must be its security.http_key_file"
    health: Any = None
    try:
        health = json.loads(_get(f"{url}/health", timeout_s, key))
    except urllib.error.HTTPError as error:
        try:
            health = json.loads(error.read())  # a proxy that lacks workers says so with a 503
        except (OSError, ValueError, http.client.HTTPException):
            health = None
    except (OSError, ValueError, http.client.HTTPException):
        health = None
    if isinstance(health, dict) and isinstance(health.get("prefill"), list):
        urls = [str(one["url"]) for one in health["prefill"] if isinstance(one, dict) and "url" in one]
        return f"this is a proxy, and timelines are of workers; ask {' or '.join(urls) or 'a prefill worker'}"
    return f"answered {status} when asked for a timeline; is it a pdlink worker?"
