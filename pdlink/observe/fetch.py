"""Questions to a running process over HTTP, for commands; a timeline into a file."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdlink.api.keys import KEY_HEADER
from pdlink.errors import ConfigError, RemoteError
from pdlink.observe.trace import TRACE_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message


class CannotFetch(RemoteError):
    """A worker did not answer a command of `pdlink`."""

    code = "cannot_fetch"


_TIMEOUT_S = 10.0


def fetch_timeline(url: str, output: str, *, request: str | None = None, key: str | None = None) -> str:
    """Write the trace of the proxy or worker at `url` to `output`; returns a sentence about it.

    request: show this one alone. key: one of the proxy's `api_keys`, or the secret that the worker asks callers for.
    Raises CannotFetch, or ConfigError if the file cannot be written.
    """
    url = base_url(url)
    path = "/pdlink/timeline" + ("" if request is None else f"?request={urllib.parse.quote(request, safe='')}")
    keys = {} if key is None else {KEY_HEADER: key, "Authorization": f"Bearer {key}"}
    found = fetch(url, path, keys)
    words = found.headers.get(TRACE_HEADER)
    if found.status != 200:
        raise CannotFetch(f"{url}: {_meaning(found, key)}")
    if words is None:
        raise CannotFetch(f"{url} answered with something that is no timeline; is it a pdlink proxy or worker?")
    try:
        Path(output).write_bytes(found.body)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {output}: {error.strerror}") from None
    return f"{output}: {words}; open it at ui.perfetto.dev"


def base_url(url: str) -> str:
    """http:// may be left out."""
    return url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"


class FetchedAnswer(NamedTuple):
    status: int
    body: bytes
    headers: Message


def ask(
    url: str, path: str, headers: Mapping[str, str], body: bytes | None = None, *, timeout_s: float = _TIMEOUT_S
) -> tuple[int, bytes]:
    """Status and body of a GET, or with a body, in JSON, of a POST, whatever the status is. Raises CannotFetch."""
    return fetch(url, path, headers, body, timeout_s=timeout_s)[:2]


def fetch(
    url: str, path: str, headers: Mapping[str, str], body: bytes | None = None, *, timeout_s: float = _TIMEOUT_S
) -> FetchedAnswer:
    """As `ask`, with the headers of the answer."""
    kind = {} if body is None else {"Content-Type": "application/json"}
    try:
        asked = urllib.request.Request(url + path, data=body, headers={**headers, **kind})
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            return FetchedAnswer(answer.status, answer.read(), answer.headers)
    except urllib.error.HTTPError as error:
        return FetchedAnswer(error.code, _body_of(error), error.headers)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise CannotFetch(f"{url} did not answer: {getattr(reason, 'strerror', None) or reason}") from None


def _body_of(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read()
    except (OSError, http.client.HTTPException):
        return b""


def proxys_remedy(status: int, key: str | None) -> str:
    """What to do about an answer of a proxy to a question with this key, unless it is 200."""
    if status != 401:
        return "is it a pdlink proxy?"
    return f"{'give --key-file FILE with' if key is None else 'the key in --key-file is not'} one of its api_keys"


def _meaning(found: FetchedAnswer, key: str | None) -> str:
    """Why a server that answers gives no timeline, and what to do."""
    if found.status == 401:
        wanted = "one of the proxy's api_keys, or a worker's security.http_key_file"
        return f"it asks for a key; give --key-file FILE with {wanted}" if key is None else f"the key is not {wanted}"
    try:
        return str(json.loads(found.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"answered {found.status} when asked for a timeline; is it a pdlink proxy or worker?"
