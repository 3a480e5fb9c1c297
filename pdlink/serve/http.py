"""What the HTTP interfaces of workers and stores have in common: errors as JSON, the callers' key, answers."""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdlink.api import route_token
from pdlink.api.errors import refusal_of, refused
from pdlink.api.legs import KEY_HEADER
from pdlink.api.openai import CHAT, COMPLETIONS
from pdlink.errors import InvalidApiKey, PdlinkError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from pdlink.observe.series import Registry

ROUTE = web.RequestKey("route", route_token.RouteToken)
"""What a caller without the key may do: the handler compares its request with it."""
GENERATING = frozenset({("POST", COMPLETIONS), ("POST", CHAT)})
_OWN_KEYS = ("POST", "/role")
"""Asks for a key of operators instead."""
_OPEN_TO_ALL = frozenset({("GET", path) for path in ("/health", "/livez", "/readyz", "/metrics")})


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


def callers_with(http_key: str, route_key: str | None = None) -> Middleware:
    """Rejects callers without the key, before reading the body. route_key: takes legs that a router signed, too."""
    secret = None if route_key is None else route_key.encode()

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        route = request.method, request.path
        if route not in _OPEN_TO_ALL and route != _OWN_KEYS:
            token = request.headers.get(route_token.HEADER) if secret is not None else None
            if secret is not None and token is not None and route in GENERATING:
                request[ROUTE] = route_token.read_token(secret, token, time.time())
                return await handler(request)
            sent = request.headers.get(KEY_HEADER, "")
            if not hmac.compare_digest(sent.encode(errors="surrogateescape"), http_key.encode()):
                raise InvalidApiKey(f"this server is not open to all: {KEY_HEADER} is missing or wrong")
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
