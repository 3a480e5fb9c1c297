"""Errors as clients read them: OpenAI's object, on its own and in a stream; and Anthropic's on its own paths.

Every error is made in OpenAI's shape. `reworded` writes it anew just before it is sent to a client of Anthropic's.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from pdlink import errors
from pdlink.api.openai import MESSAGES
from pdlink.api.sse import DONE
from pdlink.errors import InvalidRequest, PdlinkError

COUNT_TOKENS = "/v1/messages/count_tokens"
_ANTHROPICS = frozenset({MESSAGES, COUNT_TOKENS})
_ANTHROPICS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status: docs.anthropic.com/en/api/errors."""
_MAX_MESSAGE_CHARS = 2000
_MAX_EXCERPT_CHARS = 300
_CODES = frozenset(
    found.code for found in vars(errors).values() if isinstance(found, type) and issubclass(found, PdlinkError)
)


class Error(msgspec.Struct):
    """What a worker said; empty where it said it otherwise."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Document(msgspec.Struct):
    error: Error


_DOCUMENT = msgspec.json.Decoder(_Document)


# ---- to write


def error_body(message: str, *, kind: str, code: str | int, param: str | None = None) -> bytes:
    """An OpenAI error object; cuts the message, which may quote a long request."""
    message = message[:_MAX_MESSAGE_CHARS]
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def refused(
    status: int, message: str, code: str, param: str | None = None, retry_after_s: int | None = None
) -> web.Response:
    """The answer to a request that is not served. retry_after_s: 1 for 503 if it is not given."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    if retry_after_s is None and status == 503:
        retry_after_s = 1
    return web.Response(
        status=status,
        body=error_body(message, kind=kind, code=code, param=param),
        content_type="application/json",
        headers={} if retry_after_s is None else {"Retry-After": str(retry_after_s)},
    )


def refusal_of(error: PdlinkError) -> web.Response:
    """The answer to a request that one of our errors has ended."""
    return refused(error.http_status, str(error), error.code, getattr(error, "param", None))


def stream_error(message: str, *, code: str, named: bool = False) -> bytes:
    """The event that ends a broken stream; without it a client takes half an answer for complete. named: of a route
    whose events have names (`openai.LAST_EVENTS`)."""
    if named:
        error = {"type": "api_error", "message": message[:_MAX_MESSAGE_CHARS], "code": code}
        return b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": error}) + b"\n\n"
    return b"data: " + error_body(message, kind="stream_error", code=code) + b"\n\n" + DONE


_A = TypeVar("_A", bound=web.StreamResponse)


def error_for(path: str, status: int, body: bytes) -> bytes:
    """The body of an answer to this path, with its error as the clients of the path read it."""
    if path not in _ANTHROPICS or status < 400:
        return body
    said = error_of(body)
    kind = _ANTHROPICS_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": said.message, "code": said.code}})


def reworded(path: str, answer: _A) -> _A:
    """The same for an answer that is not sent yet; one that is on its way stays as it is."""
    if path in _ANTHROPICS and isinstance(answer, web.Response) and not answer.prepared:
        assert isinstance(answer.body, bytes)
        answer.body = error_for(path, answer.status, answer.body)
    return answer


# ---- to read


def error_of(body: bytes) -> Error:
    """The error in a document."""
    try:
        return _DOCUMENT.decode(body).error
    except (ValueError, RecursionError):
        return Error()


def error_code(body: bytes) -> str:
    """The known code in a worker's error document, or `internal_error` for anything else."""
    code = error_of(body).code
    return code if isinstance(code, str) and code in _CODES else PdlinkError.code


def rejection(status: int, body: bytes) -> bytes:
    """The client's error after a worker rejected its request: the worker's message, if it sent an error document."""
    sent = error_of(body)
    return error_body(
        sent.message or f"the request was rejected with status {status}",
        kind=sent.type or "invalid_request_error",
        code=sent.code if sent.code is not None else InvalidRequest.code,
        param=sent.param,
    )


def is_rejection(document: bytes) -> bool:
    """Whether an error in a stream has a 4xx code, as vLLM's do: the request is at fault."""
    code = error_of(document).code
    return isinstance(code, int) and 400 <= code < 500


def excerpt(body: bytes) -> str:
    """What a worker's bytes say, for the log: the message of an error document, else how they begin; printable, in
    one line."""
    begin = body[: 4 * _MAX_EXCERPT_CHARS].decode(errors="replace")
    return ascii((error_of(body).message or begin)[:_MAX_EXCERPT_CHARS])
