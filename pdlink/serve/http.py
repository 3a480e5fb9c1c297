"""What the HTTP interfaces of workers and stores have in common: errors as JSON, the callers' key, answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdlink.api.errors import refusal_of, refused
from pdlink.api.health import UNTOLD
from pdlink.api.keys import KEY_HEADER, is_one_of
from pdlink.api.pages import refused_page
from pdlink.errors import InvalidApiKey, InvalidRequest, PdlinkError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from pdlink.observe.series import Registry
    from pdlink.store.interface import AnyStore

_OPEN_TO_ALL = frozenset({("GET", path) for path in ("/health", "/livez", "/readyz", "/metrics")})


MAX_BODY_NBYTES = 16 * 2**20
"""Two million token ids; aiohttp's default of 1 MiB answers 413 to a long prompt."""

BODY_S = 60.0
"""Deadline for a body to arrive; aiohttp has none, so slow clients could hold every descriptor."""


class BodyTooLarge(InvalidRequest):
    """The body exceeds the limit of its route."""

    http_status = 413


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error as an OpenAI error object."""
    try:
        return await handler(request)
    except PdlinkError as error:
        return refusal_of(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return refused(error.status, error.reason, str(error.status))


def callers_with(http_key: str) -> Middleware:
    """Rejects callers without the key, before reading the body."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if (request.method, request.path) not in _OPEN_TO_ALL:
            sent = request.headers.get(KEY_HEADER, "")
            if not is_one_of(sent, (http_key.encode(),)):
                raise InvalidApiKey(f"this server is not open to all: {KEY_HEADER} is missing or wrong")
        return await handler(request)

    return check


def shown_problems(request: web.Request, http_key: str | None, store: AnyStore) -> dict[str, str]:
    """Of the places of a store that keep less KV than its settings say, for GET /health, which is open to all: why,
    for who sends the key; for the others only whether the place answers."""
    found = {place: why for place, why in store.problems().items() if why}
    if not found or http_key is None or is_one_of(request.headers.get(KEY_HEADER, ""), (http_key.encode(),)):
        return found
    answers = store.health()
    return {place: UNTOLD if answers.get(place, True) else "it does not answer" for place in found}


def no_foreign_pages(*, loopback: bool, setting: str) -> Middleware:
    """Rejects what a page of another site could have sent, for a server without a key. See `refused_page`."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        why = refused_page(request.headers, loopback=loopback, setting=setting)
        if why:
            return refused(403, why, "forbidden")
        return await handler(request)

    return check


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers
    )


def metrics_response(metrics: Registry, request: web.Request) -> web.Response:
    """GET /metrics, in the format that the scraper asks for."""
    body, content_type = metrics.exposition(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def body_of(request: web.Request, max_nbytes: int = MAX_BODY_NBYTES) -> bytes:
    """The whole body. Raises BodyTooLarge, HTTPRequestTimeout if it takes too long."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_any():
                body += part
                if len(body) > max_nbytes:
                    raise BodyTooLarge(f"the body: got more than {max_nbytes} bytes; send a shorter request")
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"the body did not arrive within {BODY_S:g} s") from None
    return bytes(body)
