"""Errors as Anthropic's clients read them.

The proxy makes every error in OpenAI's shape, and rewrites it here just before it is sent to a client of these paths.
Types by status: docs.anthropic.com/en/api/errors.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from pdlink.api.openai import MESSAGES, error_of

COUNT_TOKENS = "/v1/messages/count_tokens"
_PATHS = frozenset({MESSAGES, COUNT_TOKENS})

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_for(path: str, status: int, body: bytes) -> bytes:
    """The body of an answer to this path, with its error as the clients of the path read it."""
    if path not in _PATHS or status < 400:
        return body
    said = error_of(body)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": said.message, "code": said.code}})


_A = TypeVar("_A", bound=web.StreamResponse)


def reworded(path: str, answer: _A) -> _A:
    """The same for an answer that is not sent yet; one that is on its way stays as it is."""
    if path in _PATHS and isinstance(answer, web.Response) and not answer.prepared:
        assert isinstance(answer.body, bytes)
        answer.body = error_for(path, answer.status, answer.body)
    return answer
