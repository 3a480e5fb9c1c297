"""GET /pdlink/sessions, and DELETE of one of them, which workers are told."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdlink.api.errors import refused
from pdlink.api.keys import owner_of

from .http_connection import HttpError
from .upstream import Asking

if TYPE_CHECKING:
    from .services import Services

PATH = "/pdlink/sessions"
_SHOWN = 200


def add_sessions(app: web.Application, services: Services) -> None:
    entry = services.entry

    async def shown(request: web.Request) -> web.Response:
        if not entry.may_look(request):
            return entry.no_entry(request)
        if entry.sees_only(request) is not None:
            return entry.operators_only()
        found = services.sessions.shown(time.monotonic())
        return _json({"sessions": found[:_SHOWN], "of": len(found)})

    async def end(request: web.Request) -> web.Response:
        """Also one that only workers know, under the `cache_salt` that is asked for: the proxy may have been started
        since. They end what is of the same owner."""
        if not entry.may_look(request):
            return entry.no_entry(request)
        key, session_id = entry.sees_only(request), request.match_info["id"]
        owner = None if key is None else owner_of(key)
        salts = set(services.sessions.end(owner, session_id))
        if services.siblings is not None:
            found = await services.siblings.ask_all("end_session", [owner, session_id])
            salts.update(itertools.chain.from_iterable(found.values()))
        is_known = owner is None or bool(salts)
        if owner is None or not salts:
            salts.add(request.query.get("cache_salt", ""))
        told = [_told(services, url, session_id, salt, owner) for url in _urls(services) for salt in salts]
        ended = dict.fromkeys(_urls(services), False)
        for url, done in await asyncio.gather(*told):
            ended[url] |= done
        if not is_known and not any(ended.values()):
            return refused(404, f"session {session_id!r:.140}: not known, or not of this key", "not_found")
        return _json({"session_id": session_id, "ended": sum(ended.values()), "of": len(ended)})

    app.router.add_get(PATH, shown)
    app.router.add_delete(PATH + "/{id}", end)


def _urls(services: Services) -> list[str]:
    """Of workers that can be told."""
    return list(dict.fromkeys(each.url for each in services.pools.all)) if services.dialect.end_session else []


async def _told(services: Services, url: str, session_id: str, salt: str, owner: str | None) -> tuple[str, bool]:
    """A worker, and whether it kept something for the session. One that does not answer keeps it for its time."""
    end_session = services.dialect.end_session
    assert end_session is not None
    try:
        asking = Asking(services.shared.control, url, services.config.connect_timeout_s)
        return url, await end_session(asking, session_id, salt, owner)
    except (HttpError, OSError, ValueError):  # TimeoutError is an OSError
        return url, False


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
