"""The proxy as a server: how it opens, takes requests and new settings, and drains.

The proxy starts without its workers, and only requests wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from aiohttp import web

from pdlink.api.errors import reworded
from pdlink.errors import ConfigError
from pdlink.observe.summary import tell

from .about import About
from .access import admin_keys
from .admin import add_routes
from .client_answer import ClientAnswer
from .fleet import wanted
from .membership import from_settings
from .page.reports import WorkerReports
from .page.routes import add_page, remember
from .passthrough import PATHS, PassThrough, own_headers
from .polling import polling
from .probe import add_probe
from .queue import Queue
from .reloading import WORKERS, taken
from .request import Request
from .services import Services
from .session_routes import add_sessions
from .shared import Shared
from .siblings import MEMBERS_FILE
from .spans import Tracer
from .steps import Leg
from .summary import ProxySummary
from .timeline import add_timeline
from .tokenizing import Tokenizing
from .upstream import open_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdlink.config import ProxyConfig

    from .siblings import Siblings

log = logging.getLogger("pdlink.proxy")


class Router:
    """One proxy, as it runs."""

    def __init__(self, config: ProxyConfig, siblings: Siblings | None = None) -> None:
        """As of `Services`."""
        self.services = Services(config, siblings)
        if siblings is not None:
            siblings.answers = self.services.answers(self.adopt)

    async def open(self, _app: web.Application) -> AsyncIterator[None]:
        """Connections and health watchers, for as long as the app runs."""
        services = self.services
        config = services.config
        bound = config.max_connections and max(1, config.max_connections // 2)  # 0: no limit
        headers = services.worker_headers
        async with (
            polling() as poller,
            open_client(config, poller, max_connections=bound, headers=headers) as prefill,
            open_client(config, poller, max_connections=bound, headers=headers) as decode,
            open_client(config, poller, max_connections=0, headers=headers) as control,
            contextlib.AsyncExitStack() as stack,
        ):
            queue = Queue(config.queue_size, config.shares, divided=services.entry.tenants)
            clients = {Leg.PREFILL: prefill, Leg.DECODE: decode}
            shared = Shared(
                config=config,
                dialect=services.dialect,
                pools=services.pools,
                metrics=services.metrics,
                clients=clients,
                poller=poller,
                control=control,
                records=services.records,
                queue=queue,
                sessions=services.sessions,
            )
            services.opened(shared, WorkerReports(shared))
            if config.tokenize_wait_s:
                wait_s = config.tokenize_wait_s
                shared.tokenizing = Tokenizing(services.pools, control, metrics=services.metrics, wait_s=wait_s)
                stack.push_async_callback(shared.tokenizing.close)
            if services.spans is not None:
                services.spans.open()
                stack.push_async_callback(asyncio.to_thread, services.spans.close)
                shared.tracer = Tracer(services.spans, config.tracing.share)
            shared.decision_log = services.decision_log
            if shared.decision_log is not None:
                shared.spawn(shared.decision_log.follow())

            services.membership.changed = shared.serve_queue
            services.membership.replace(services.membership.members)
            if services.siblings is not None:
                services.membership.keep(services.siblings.directory / MEMBERS_FILE)
                await stack.enter_async_context(services.siblings)
            if config.page:
                shared.spawn(remember(services))
            if config.summary_s:
                summary = ProxySummary(services.records, lambda: (services.num_running, services.num_queued))
                shared.spawn(tell(summary.take, config.summary_s))
            for name in services.discovery.sources:
                shared.spawn(services.discovery.follow(name))
            yield
            services.pools.kv_events.close()
            for task in shared.tasks:
                task.cancel()
            await asyncio.gather(*shared.tasks, return_exceptions=True)

    def reload(self) -> None:
        """Read files again: keys and workers; go on in a new decision log. Running requests go on."""
        try:
            self.services.entry.read_keys()
        except ConfigError as error:
            log.error("the keys are unchanged: %s", error)
        self.services.shared.queue.divided = self.services.entry.tenants
        if self.services.decision_log is not None:
            self.services.decision_log.reopen()

    def adopt(self, new: ProxyConfig) -> None:
        """Take what can be taken of new settings, and say what needs a restart. Running requests go on."""
        old = self.services.config
        config, changed, ignored = taken(old, new)
        if changed & WORKERS and not config.discover:
            try:
                self.services.membership.replace(from_settings(config, self.services.dialect))
            except ConfigError as error:
                log.error("the workers are unchanged: %s", error)
        self.services.adopt(config, limits_anew=bool(changed & {"rate_limit", "rate_limits"}))
        if changed:
            log.info("new settings: %s", ", ".join(sorted(changed)))
        if ignored:
            log.warning("settings that need a restart are as they were: %s", ", ".join(sorted(ignored)))

    async def drain(self) -> None:
        """Take no new request and give running ones `drain_s` to finish, then end them with an error."""
        self.services.entry.draining = True
        self.services.pools.leaving()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.services.config.drain_s):
                await self.services.idle.wait()
        for running in list(self.services.requests):
            running.shut_down()

    # ---- routes

    async def generate(self, request: web.Request) -> web.StreamResponse:
        entry = self.services.entry
        headers = entry.leg_headers(request.headers)
        call = await entry.checked(request)
        if isinstance(call, web.Response):
            call.headers["X-Request-Id"] = headers["X-Request-Id"]
            self.services.metrics.requests.add(1, "unavailable" if call.status == 503 else "rejected")
            return reworded(request.path, call)
        if entry.tenants:
            entry.own(headers["X-Request-Id"], request.headers)
        if entry.limits is not None:
            asked = wanted(call, None)
            if (refusal := entry.over_limit(request, asked.total_tokens)) is not None:
                refusal.headers["X-Request-Id"] = headers["X-Request-Id"]
                self.services.metrics.requests.add(1, "rejected")
                return reworded(request.path, refusal)
        if call.path in PATHS:
            headers = {**own_headers(self.services, request), **headers}
        client, over = ClientAnswer.of(request), asyncio.Event()
        made = Request(self.services.shared, client, call=call, headers=headers, said=request.headers, over=over.set)
        with self.services.running(made):
            made.begin()
            try:
                await over.wait()
            finally:  # cancelled if the client leaves
                made.leave()
            return client.result()


ROUTER = web.AppKey("router", Router)


def build_app(config: ProxyConfig, siblings: Siblings | None = None) -> web.Application:
    """The proxy as an aiohttp application; `app[ROUTER].drain()` takes it out of service.

    Run it by a `FrontRunner`, with `handler_cancellation=True` (or a client that leaves does not end its request) and
    without an access log (a line costs more than the request; /metrics counts requests). siblings: see `Services`.
    Raises ConfigError for an invalid worker URL.
    """
    router = Router(config, siblings)
    # client_max_size: the default of 1 MiB is a prompt of some 200k tokens sent as ids.
    app = web.Application(client_max_size=config.max_body_nbytes)
    app[ROUTER] = router
    services = router.services
    app.cleanup_ctx.append(router.open)
    for path in services.dialect.paths:
        app.router.add_post(path, router.generate)
    PassThrough(services).add_routes(app)
    about = About(services)
    about.add_routes(app)
    if config.page:
        add_page(app, services)
    add_probe(app, services)
    add_timeline(app, services)
    add_sessions(app, services)
    add_routes(app, services.membership, admin_keys(config), services.members_changed)
    app.router.add_route("*", "/{path:.*}", about.nowhere)
    return app
