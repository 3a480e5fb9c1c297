"""The HTTP interface of a store, in a process of its own or in an engine's: health, metrics, what operators do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from pdlink.events import listen
from pdlink.observe.metrics import StoreProcessMetrics
from pdlink.serve.cache_routes import CacheDesk, add_cache_routes
from pdlink.serve.http import (
    callers_with,
    errors_as_json,
    json_response,
    metrics_response,
    no_foreign_pages,
    shown_problems,
)

if TYPE_CHECKING:
    from pdlink.store.server.listener import Listener
    from pdlink.store.store import Store


def build_app(
    name: str,
    store: Store,
    listener: Listener | None = None,
    http_key: str | None = None,
    *,
    loopback: bool = True,
    setting: str = "http_key_file",
) -> web.Application:
    """The routes of one open store. listener: of its clients. http_key: callers must send it in X-Pdlink-Key, except
    for health and metrics. loopback: it serves this host alone. setting: that names the key's file."""
    check = no_foreign_pages(loopback=loopback, setting=setting)
    if http_key is not None:
        check = callers_with(http_key)
    app = web.Application(middlewares=[errors_as_json, check])

    metrics = StoreProcessMetrics()
    metrics.store.tiers(store.places[1:])

    def update() -> None:
        clients = listener.clients() if listener is not None else []
        connected = sum(bool(client["connected"]) for client in clients)
        metrics.sizes.set(store.gauges(), store.health(), store.problems())
        metrics.clients.set(store.held(), connected, len(clients) - connected)

    metrics.before_reading(update)
    stop = listen(metrics.counting)

    async def health(request: web.Request) -> web.Response:
        places = store.health()
        ok = places["memory"]  # a tier that does not answer is a miss, not an end
        body: dict[str, object] = {
            "status": "ok" if ok else "failed",
            "name": name,
            "role": "store",
            "places": places,
            "problems": shown_problems(request, http_key, store),
        }
        if listener is not None:
            body |= {
                "listen": str(listener.path),
                "kv_events": [listener.events] if listener.events else [],
                "clients": listener.clients(),
            }
        return json_response(body, status=200 if ok else 503)

    async def metrics_text(request: web.Request) -> web.Response:
        return metrics_response(metrics, request)

    async def cleanup(_: web.Application) -> None:
        stop()

    for path in ("/health", "/livez", "/readyz"):  # it takes clients as long as it lives
        app.router.add_get(path, health)
    app.router.add_get("/metrics", metrics_text)
    add_cache_routes(app, CacheDesk(store, keyed=http_key is not None, setting=setting))
    app.on_cleanup.append(cleanup)
    return app
