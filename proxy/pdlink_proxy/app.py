"""The proxy's HTTP interface: routes, checks before a worker is involved, draining.

The proxy starts without its workers, and only requests wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdlink import __version__
from pdlink.errors import InvalidApiKey, InvalidRequest, NoWorker, UnknownModel

from .access import api_keys, may_enter, worker_headers
from .decisions import Decisions
from .dialects import DIALECTS
from .exchange import Exchange, Shared
from .metrics import Metrics
from .openai import CHAT, COMPLETIONS, BadField, Call, error_body, parse
from .placement import Placer
from .pools import Pools, State, watch
from .queue import Queue
from .steps import Leg
from .upstream import Asking, open_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdlink.config import ProxyConfig

_MAX_HEADER_CHARS = 4096
_TRACE_HEADERS = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context


class Router:
    """One proxy: its workers, its requests, and whether it takes new ones."""

    def __init__(self, config: ProxyConfig) -> None:
        """Raises ConfigError for an invalid worker URL, and for a key file without keys."""
        self.config = config
        self.dialect = DIALECTS[config.dialect]
        self.api_keys = api_keys(config)
        placer = Placer(config.policy_of("prefill"), config.policy_of("decode"))
        self.pools = Pools(config.prefill, config.decode, placer, config.control)
        self._worker_headers = worker_headers(config, bearer=self.dialect.key_as_bearer)
        self.metrics = Metrics()
        self.decisions = Decisions()
        self.started = int(time.time())
        self._shared: Shared | None = None
        self._exchanges: set[Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def open(self, _app: web.Application) -> AsyncIterator[None]:
        """Connections and health watchers, for as long as the app runs."""
        config = self.config
        bound = config.max_connections and max(1, config.max_connections // 2)  # 0: no limit
        headers, timeout_s = self._worker_headers, config.connect_timeout_s
        async with (
            open_session(config, max_connections=bound, headers=headers) as prefill,
            open_session(config, max_connections=bound, headers=headers) as decode,
            open_session(config, max_connections=0, headers=headers) as control,
        ):
            queue = Queue(config.queue_size, config.shares)
            sessions = {Leg.PREFILL: prefill, Leg.DECODE: decode}
            self._shared = shared = Shared(
                config, self.dialect, self.pools, self.metrics, sessions, control, self.decisions, queue
            )
            for worker in self.pools.all:
                asking = Asking(control, worker.url, timeout_s)
                shared.spawn(
                    watch(self.pools, worker, asking, self.dialect, config.health_interval_s, shared.serve_queue)
                )
            yield
            for task in shared.tasks:
                task.cancel()
            await asyncio.gather(*shared.tasks, return_exceptions=True)

    async def drain(self) -> None:
        """Take no new request and give running ones `drain_s` to finish, then end them with an error."""
        self._draining = True
        self.pools.leaving()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                await self._idle.wait()
        for exchange in list(self._exchanges):
            exchange.shut_down()

    # ---- routes

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        request_id = _clean(request.headers.get("X-Request-Id")) or f"req-{secrets.token_hex(16)}"
        headers = {"X-Request-Id": request_id}
        call = await self._checked(request)
        if isinstance(call, web.Response):
            call.headers.update(headers)
            self.metrics.requests.labels("unavailable" if call.status == 503 else "rejected").inc()
            return call
        for name in _TRACE_HEADERS:  # or each worker would begin its own trace
            if said := _clean(",".join(request.headers.getall(name, ()))):
                headers[name] = said
        authorization = _clean(request.headers.get("Authorization"))
        if authorization and "Authorization" not in self._worker_headers:
            headers["Authorization"] = authorization
        if self._shared is None:
            raise RuntimeError("a request before the app was started")
        exchange = Exchange(self._shared, request, call, headers)
        self._exchanges.add(exchange)
        self._idle.clear()
        try:
            return await exchange.run()
        finally:
            self._exchanges.discard(exchange)
            if not self._exchanges:
                self._idle.set()

    async def _checked(self, request: web.Request) -> Call | web.Response:
        """The client's checked request, or the error response."""
        if not self._may_enter(request):
            return self._no_entry()
        if self._draining:
            refusal = _error(503, "the proxy is shutting down", NoWorker.code)
            refusal.force_close()
            return refusal
        try:
            async with asyncio.timeout(self.config.idle_timeout_s):
                data = await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = self.config.max_body_nbytes
            return _error(413, f"the body is larger than max_body_nbytes = {limit}", InvalidRequest.code)
        except TimeoutError:
            limit_s = self.config.idle_timeout_s
            return _error(408, f"the body did not arrive within {limit_s:g} s", InvalidRequest.code)
        try:
            call = parse(request.path, data)
        except BadField as error:
            return _error(error.http_status, str(error), error.code, error.param)
        workers = self.pools.workers[Leg.DECODE]
        known = self.pools.models()
        if call.model not in known and known and all(worker.health for worker in workers):
            message = f"model {call.model!r} is not served here; known: {', '.join(known)}"
            return _error(UnknownModel.http_status, message, UnknownModel.code, "model")
        return call

    def _may_enter(self, request: web.Request) -> bool:
        return may_enter(self.api_keys, request.headers.get("Authorization"))

    def _no_entry(self) -> web.Response:
        """The answer without a valid key. It closes the connection, so that the client stops sending the body."""
        refusal = _error(
            InvalidApiKey.http_status, "send a valid key as `Authorization: Bearer KEY`", InvalidApiKey.code
        )
        refusal.headers["WWW-Authenticate"] = "Bearer"
        refusal.force_close()
        return refusal

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        if not self._may_enter(request):
            return self._no_entry()
        data = [
            {"id": model, "object": "model", "created": self.started, "owned_by": "pdlink"}
            for model in self.pools.models()
        ]
        return _json(200, {"object": "list", "data": data})

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if a request could be served now, from the last polls.

        Without a key (load balancers) only the status is shown, no workers and addresses.
        """
        status, reason = self._standing()
        http_status = 200 if status in _SERVING else 503
        if not self._may_enter(request):
            return _json(http_status, {"status": status})
        body: dict[str, Any] = {"status": status, "reason": reason, "active_requests": len(self._exchanges)}
        for side, workers in self.pools.workers.items():
            body[side.value] = [worker.describe() for worker in workers]
        body["refused_pairs"] = [pair.describe() for pair in self.pools.refusals]
        # Tells which proxy answers: another one may listen on the same port.
        body["proxy"] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": self.started,
            "version": __version__,
        }
        return _json(http_status, body)

    def _standing(self) -> tuple[str, str]:
        """The status, and the reason if it is not plainly ok."""
        if self._draining:
            return "draining", "the proxy is shutting down"
        missing = [side for side in Leg if not self.pools.usable(side)]
        alone = missing == [Leg.PREFILL] and self.config.on_no_prefill == "decode_only"
        if alone and any(worker.state is State.UNKNOWN for worker in self.pools.workers[Leg.PREFILL]):
            alone = False  # not known yet
        if missing and not alone:
            reason = f"no healthy {' and no healthy '.join(side.value for side in missing)} worker"
            if any(self.pools.barred(side) for side in missing):
                reason += ": its workers refuse this proxy's key, see worker_key_file"
            return "unavailable", reason
        if len(self.pools.refusals):
            return "degraded", f"degraded: {'; '.join(map(str, itertools.islice(self.pools.refusals, 8)))}"
        return "ok", "no healthy prefill worker: decode computes prompts itself" if alone else ""

    async def ready(self, _: web.Request) -> web.Response:
        """GET /readyz: the status of /health alone. For load balancers."""
        status, _reason = self._standing()
        return _json(200 if status in _SERVING else 503, {"status": status})

    async def live(self, _: web.Request) -> web.Response:
        """GET /livez: 200 while this process runs. A proxy without workers needs no restart."""
        return _json(200, {"status": "ok"})

    async def explain(self, request: web.Request) -> web.Response:
        """GET /decisions: why the last requests, or that of `?request=ID`, went where they went."""
        if not self._may_enter(request):
            return self._no_entry()
        return _json(200, {"decisions": self.decisions.of(request.query.get("request"))})

    async def version(self, request: web.Request) -> web.Response:
        """GET /version."""
        return _json(200, {"version": __version__}) if self._may_enter(request) else self._no_entry()

    async def about(self, _: web.Request) -> web.Response:
        """GET /: a page for people."""
        return web.Response(text=_ABOUT)

    async def exposition(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        if not self._may_enter(request):
            return self._no_entry()
        for worker in self.pools.all:
            self.metrics.healthy.labels(worker.url, worker.side.value).set(worker.state is State.OK)
        self.metrics.queued.set(len(self._shared.queue) if self._shared else 0)
        body = self.metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def nowhere(self, request: web.Request) -> web.Response:
        """Every other path or method."""
        return _error(404, f"no such route: {request.method} {request.path}", "not_found")


_SERVING = ("ok", "degraded")

_ABOUT = f"""This is the proxy of pdlink: it serves OpenAI's API from separate prefill and decode workers.

POST {COMPLETIONS}
POST {CHAT}
GET  /v1/models
GET  /health     its workers, and which of them do not fit together
GET  /readyz     200 if a request could be served now
GET  /livez      200 while the proxy runs
GET  /metrics    for Prometheus
GET  /version
GET  /decisions  why the last requests went where they went; ?request=ID for one of them
"""


ROUTER = web.AppKey("router", Router)


def build_app(config: ProxyConfig) -> web.Application:
    """The proxy as an aiohttp application; `app[ROUTER].drain()` takes it out of service.

    Run it with `handler_cancellation=True` (or a client that leaves does not end its request) and without an access
    log (a line costs more than the request; /metrics counts requests). Raises ConfigError for an invalid worker URL.
    """
    router = Router(config)
    # client_max_size: the default of 1 MiB is a prompt of some 200k tokens sent as ids.
    app = web.Application(client_max_size=config.max_body_nbytes)
    app[ROUTER] = router
    app.cleanup_ctx.append(router.open)
    app.router.add_post(COMPLETIONS, router.generate)
    app.router.add_post(CHAT, router.generate)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/health", router.health)
    app.router.add_get("/readyz", router.ready)
    app.router.add_get("/livez", router.live)
    app.router.add_get("/version", router.version)
    app.router.add_get("/decisions", router.explain)
    app.router.add_get("/", router.about)
    app.router.add_get("/metrics", router.exposition)
    app.router.add_route("*", "/{path:.*}", router.nowhere)
    return app


def _clean(value: str | None) -> str | None:
    """A client's header value if it may be sent on: printable ASCII of bounded length; else None."""
    if value is None or len(value) > _MAX_HEADER_CHARS or not value.isascii() or not value.isprintable():
        return None
    return value


def _json(status: int, value: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, message: str, code: str, param: str | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = error_body(message, kind=kind, code=code, param=param)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
