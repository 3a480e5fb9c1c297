"""What operators ask and change at run time, over HTTP, with a key of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdlink.api.errors import refused
from pdlink.api.fields import decoded
from pdlink.errors import ConfigError, InvalidApiKey, InvalidRequest

from .access import may_enter
from .members import ListedWorker, Members, Role
from .membership import Membership, parse
from .steps import Leg

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Change = Callable[[web.Request], Awaitable[Members]]


class _Added(ListedWorker, frozen=True, kw_only=True):
    role: Role


def add_routes(
    app: web.Application,
    membership: Membership,
    keys: tuple[bytes, ...],
    changed: Callable[[], Awaitable[None]],
) -> None:
    """Routes below /workers. keys: of operators; without any these routes answer 403. changed: called after one."""

    def checked(change: Change | None) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            if not keys:
                return refused(403, "set admin_key_file to change workers at run time", "forbidden")
            if not may_enter(keys, request.headers):
                return refused(InvalidApiKey.http_status, "send a key of admin_key_file", InvalidApiKey.code)
            if change is not None and (source := membership.found_by):
                return refused(409, f"workers come from {source}; change that", "conflict")
            try:
                if change is not None:
                    membership.replace(await change(request))
                    await changed()
            except (ConfigError, InvalidRequest) as error:
                return refused(400, str(error), InvalidRequest.code)
            return web.Response(body=msgspec.json.encode(_shown()), content_type="application/json")

        return handle

    def _shown() -> dict[str, Any]:
        return {side.value: [worker.describe() for worker in membership.pools.workers[side]] for side in Leg}

    async def replace(request: web.Request) -> Members:
        return parse(decoded(await request.read(), Any), "workers", dialect=membership.dialect)

    async def add(request: web.Request) -> Members:
        added: _Added = decoded(await request.read(), _Added, strict=False)
        fields = {name: getattr(added, name) for name in ListedWorker.__struct_fields__}
        members = membership.members.with_entry(added.role, ListedWorker(**fields))
        return parse(msgspec.to_builtins(members), "workers", dialect=membership.dialect)

    async def remove(request: web.Request) -> Members:
        url = request.query.get("url", "")
        members = membership.members.without(url)
        if members == membership.members:
            raise InvalidRequest(f"url: got {url!r}; expected a listed worker; see GET /workers")
        return members

    app.router.add_get("/workers", checked(None))
    app.router.add_put("/workers", checked(replace))
    app.router.add_post("/workers", checked(add))
    app.router.add_delete("/workers", checked(remove))
