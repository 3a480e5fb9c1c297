"""`pdlink route`: where a proxy would send a request now."""

from __future__ import annotations

import json
from pathlib import Path

from pdlink.errors import ConfigError
from pdlink.observe.fetch import CannotFetch, ask, base_url


def fetch_decision(url: str, model: str, num_tokens: int, *, file: str | None = None, key: str | None = None) -> str:
    """The decision in JSON, indented. file: a request's body, in place of `num_tokens`. key: one of the `api_keys`.

    Raises CannotFetch, and ConfigError for a file that holds no JSON object.
    """
    url = base_url(url)
    body = json.dumps({"model": model, "num_tokens": num_tokens}).encode() if file is None else _body(file, model)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    status, text = ask(url, "/route", headers, body)
    if status == 404:
        raise CannotFetch(f"{url} decides for nobody; set route_s of the proxy")
    try:
        answer = json.loads(text)
        if status != 200:
            raise CannotFetch(f"{url} answered {status}: {answer['error']['message']}")
    except (ValueError, KeyError, TypeError):
        raise CannotFetch(f"{url} answered {status} with something else; is it a pdlink proxy?") from None
    return json.dumps(answer, indent=2)


def _body(file: str, model: str) -> bytes:
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        return json.dumps({"model": model, **found}).encode()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--request: cannot use {file}: {error}; give a file with a JSON object") from None
