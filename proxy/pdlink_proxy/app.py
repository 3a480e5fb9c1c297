"""The proxy as a server: checks before a worker is involved, draining, what its routes share.

The proxy starts without its workers, and only requests wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import platform
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp import web

from pdlink.errors import ConfigError
from pdlink.extras import needed
from pdlink.observe.otlp import SpanSender
from pdlink.observe.summary import tell

from .about import About
from .access import admin_keys, worker_headers
from .admin import add_routes
from .anthropic import reworded
from .beats import Beats
from .client_answer import ClientAnswer
from .decision_log import DecisionLog
from .decisions import Decisions
from .dialects import DIALECTS
from .discovery.joined import Discovery
from .discovery.register import Door
from .entry import Entry
from .membership import Membership, from_settings
from .metrics import Metrics
from .openai import wanted
from .page.reports import Reports
from .page.routes import add_page
from .passthrough import PATHS, PassThrough, own_headers
from .placement import Alone, Placer
from .plain import opened as opened_request
from .pools import Pools
from .probe import add_probe
from .queue import Queue
from .records import Records, RequestRecord
from .relaying import opened_relays
from .reloading import WORKERS, taken
from .routes_only import Decider
from .shared import Shared
from .siblings import MEMBERS_FILE, Doing, answers_of
from .spans import Tracer
from .steps import Leg
from .summary import ProxySummary
from .timeline import add_timeline
from .tokenizing import Tokenizing, opened
from .upstream import Asking, open_client
from .watching import watch
from .worker import State, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from pdlink.config import ProxyConfig
    from pdlink.protocol.auth import Credentials

    from .exchange import Exchange
    from .plain import Plain
    from .siblings import Siblings

log = logging.getLogger("pdlink.proxy")


class Endable(Protocol):
    """A running request."""

    def shut_down(self) -> None:
        """End it now."""
        ...


class Router:
    """One proxy: its workers, its requests, and whether it takes new ones."""

    def __init__(
        self, config: ProxyConfig, siblings: Siblings | None = None, credentials: Credentials | None = None
    ) -> None:
        """siblings: the other processes of this proxy. credentials: of `key_file` and `allow_file`. Raises
        ConfigError for an invalid worker URL, and for a key file without keys."""
        self.config, self.siblings = config, siblings
        self.dialect = DIALECTS[config.dialect]
        alone = Alone(config.decode_alone_tokens, config.decode_alone_idle_tokens)
        placer = Placer(
            config.policy_of("prefill"),
            config.policy_of("decode"),
            alone,
            routers=config.routers,
            salt=int.from_bytes(os.urandom(8)) if config.routers > 1 else 0,
        )
        self.pools = Pools(placer, most_left_out=config.eject_share)
        members = from_settings(config, self.dialect)
        self.pools.replace(members)
        if siblings is not None:
            siblings.answers = answers_of(self)
        self.membership = Membership(self.pools, self._watch, self.dialect, config.workers_file, members=members)
        self.membership.found_by = ", ".join(config.discover)
        beats = Beats(self.pools, lambda: self.shared.serve_queue())
        door = Door(beats, credentials, config.insecure, siblings.number if siblings is not None else 0)
        self.discovery = Discovery.of(config.discover, self.dialect, self.membership.replace, members, door)
        self._worker_headers = worker_headers(config, bearer=self.dialect.key_as_bearer)
        self.entry = Entry(config, self.pools, keyed="Authorization" in self._worker_headers)
        self._tokenizers = opened(config.tokenizers)
        self.metrics = Metrics()
        self.metrics.before_reading(self._take_stock)
        self.decisions = Decisions()
        self._decision_log = DecisionLog(config.decision_log) if config.decision_log is not None else None
        self.records = Records()
        self.spans: SpanSender | None = None
        """To the collector, if there is one."""
        if config.tracing.endpoint is not None:
            with needed():
                self.spans = SpanSender(config.tracing, "pdlink-proxy", f"{platform.node()}-{os.getpid()}")
        self.started = int(time.time())
        self._shared: Shared | None = None
        self.decider: Decider | None = None
        """Of POST /route, if it is answered."""
        self._exchanges: set[Endable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def open(self, _app: web.Application) -> AsyncIterator[None]:
        """Connections and health watchers, for as long as the app runs."""
        config = self.config
        bound = config.max_connections and max(1, config.max_connections // 2)  # 0: no limit
        headers = self._worker_headers
        async with (
            open_client(config, max_connections=bound, headers=headers) as prefill,
            open_client(config, max_connections=bound, headers=headers) as decode,
            open_client(config, max_connections=0, headers=headers) as control,
            contextlib.AsyncExitStack() as stack,
        ):
            queue = Queue(config.queue_size, config.shares)
            clients = {Leg.PREFILL: prefill, Leg.DECODE: decode}
            self._shared = shared = Shared(
                config, self.dialect, self.pools, self.metrics, clients, control, self.decisions, self.records, queue
            )
            if (relays := opened_relays()) is not None:
                shared.relays = relays
                stack.callback(relays.close)
            if config.tokenize_wait_s:
                own, wait_s = self._tokenizers, config.tokenize_wait_s
                shared.tokenizing = Tokenizing(self.pools, control, self.metrics, own, wait_s)
                stack.push_async_callback(shared.tokenizing.close)
            if self.spans is not None:
                self.spans.open()
                stack.push_async_callback(asyncio.to_thread, self.spans.close)
                shared.tracer = Tracer(self.spans, config.tracing.share)
            shared.decision_log = self._decision_log
            if shared.decision_log is not None:
                shared.spawn(shared.decision_log.follow())
            self.reports = Reports(shared)
            self.membership.changed = shared.serve_queue
            self.pools.found_turning = self.membership.list_soon
            self.membership.replace(self.membership.members)
            if self.siblings is not None:
                self.membership.keep(self.siblings.directory / MEMBERS_FILE)
                await stack.enter_async_context(self.siblings)
            if config.summary_s:
                summary = ProxySummary(self.records, lambda: (self.num_running, self.num_queued))
                shared.spawn(tell(summary.take, config.summary_s))
            if config.workers_file is not None:
                shared.spawn(self.membership.follow())
            for name in self.discovery.sources:
                shared.spawn(self.discovery.follow(name))
            yield
            self.membership.close()
            self.pools.kv_events.close()
            for task in shared.tasks:
                task.cancel()
            await asyncio.gather(*shared.tasks, return_exceptions=True)

    @property
    def shared(self) -> Shared:
        """What all requests share, once the app runs."""
        if self._shared is None:
            raise RuntimeError("used before the app was started")
        return self._shared

    def _watch(self, workers: Sequence[Worker]) -> asyncio.Task[None]:
        shared, config = self.shared, self.config
        asking = Asking(shared.control, workers[0].url, config.connect_timeout_s)
        return shared.spawn(
            watch(self.pools, workers, asking, self.dialect, config.health_interval_s, shared.serve_queue)
        )

    async def members_changed(self) -> None:
        """An operator has changed the workers: the other processes read it, too."""
        if self.siblings is not None:
            self.membership.save()
            await self.siblings.ask_all("members")

    def reload(self) -> None:
        """Read files again: keys and workers; go on in a new decision log. Running requests go on."""
        try:
            self.entry.read_keys()
        except ConfigError as error:
            log.error("the keys are unchanged: %s", error)
        self.membership.read()
        if self._decision_log is not None:
            self._decision_log.reopen()

    def adopt(self, new: ProxyConfig) -> None:
        """Take what can be taken of new settings, and say what needs a restart. Running requests go on."""
        old = self.config
        config, changed, ignored = taken(old, new)
        if changed & WORKERS and config.workers_file is None and not config.discover:
            try:
                self.membership.replace(from_settings(config, self.dialect))
            except ConfigError as error:
                log.error("the workers are unchanged: %s", error)
        self.config = config
        if self._shared is not None:
            self._shared.adopt(config)
        self.entry.adopt(config, anew=bool(changed & {"rate_limit", "rate_limits"}))
        if changed:
            log.info("new settings: %s", ", ".join(sorted(changed)))
        if ignored:
            log.warning("settings that need a restart are as they were: %s", ", ".join(sorted(ignored)))

    async def drain(self) -> None:
        """Take no new request and give running ones `drain_s` to finish, then end them with an error."""
        self.entry.draining = True
        self.pools.leaving()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                await self._idle.wait()
        for exchange in list(self._exchanges):
            exchange.shut_down()

    # ---- routes

    async def generate(self, request: web.Request) -> web.StreamResponse:
        entry = self.entry
        headers = entry.leg_headers(request.headers)
        call = await entry.checked(request)
        if isinstance(call, web.Response):
            call.headers["X-Request-Id"] = headers["X-Request-Id"]
            self.metrics.requests.inc("unavailable" if call.status == 503 else "rejected")
            return reworded(request.path, call)
        if entry.limits is not None:
            asked = wanted(call, None)
            if (refusal := entry.over_limit(request, asked.total_tokens)) is not None:
                refusal.headers["X-Request-Id"] = headers["X-Request-Id"]
                self.metrics.requests.inc("rejected")
                return reworded(request.path, refusal)
        if call.path in PATHS:
            headers = {**own_headers(self, request), **headers}
        client, over = ClientAnswer.of(request), asyncio.Event()
        exchange = opened_request(self.shared, client, call, headers, request.headers, over.set)
        with self.running(exchange):
            exchange.begin()
            try:
                await over.wait()
            finally:  # cancelled if the client leaves
                exchange.leave()
            return client.result()

    def taken(
        self, path: str, said: dict[str, str], body: bytes, client: ClientAnswer, ended: Callable[[], None]
    ) -> Plain | Exchange | None:
        """A request that `Front` has read, ready to begin; None for one that is to be refused, which `generate` does.

        ended: called when its answer is written.
        """
        call = self.entry.taken(path, said, body)
        if call is None:
            return None

        def over() -> None:
            self._exchanges.discard(exchange)
            if not self._exchanges:
                self._idle.set()
            ended()

        assert self._shared is not None
        exchange = opened_request(self._shared, client, call, self.entry.leg_headers(said), said, over)
        if not self._exchanges:
            self._idle.clear()
        self._exchanges.add(exchange)
        return exchange

    @contextlib.contextmanager
    def running(self, exchange: Endable) -> Iterator[None]:
        """A request runs: the end of the proxy waits for it, and ends it if it takes too long."""
        self._exchanges.add(exchange)
        self._idle.clear()
        try:
            yield
        finally:
            self._no_more(exchange)

    def _no_more(self, exchange: Endable) -> None:
        self._exchanges.discard(exchange)
        if not self._exchanges:
            self._idle.set()

    @property
    def num_running(self) -> int:
        return len(self._exchanges)

    @property
    def num_queued(self) -> int:
        return len(self._shared.queue) if self._shared else 0

    def standing(self) -> tuple[str, str]:
        """The status, and the reason if it is not plainly ok."""
        if self.entry.draining:
            return "draining", "the proxy is shutting down"
        missing = [side for side in Leg if not self.pools.usable(side)]
        if missing == [Leg.PREFILL] and self.pools.has_plain():
            return "ok", "no healthy prefill worker: plain servers serve all"
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
        if stranded := [each for each in self.pools.mismatches if each.stranded]:
            return "degraded", f"degraded: {'; '.join(map(str, stranded[:8]))}"
        return "ok", "no healthy prefill worker: decode computes prompts itself" if alone else ""

    async def beside(self, *, records: bool = False) -> dict[int, Doing]:
        """By number, what the other processes of this proxy do now that answer."""
        if self.siblings is None:
            return {}
        found = await self.siblings.ask_all("doing", records)
        return {number: msgspec.convert(each, Doing) for number, each in found.items()}

    def recorded(self, beside: Mapping[int, Doing]) -> Sequence[RequestRecord]:
        """The last requests of all processes, oldest first. beside: with records."""
        if not beside:
            return self.records
        found = [*self.records, *(record for each in beside.values() for record in each.records)]
        return sorted(found, key=lambda record: record.at_s)

    def described(self, side: Leg, beside: Mapping[int, Doing]) -> list[dict[str, Any]]:
        """The workers of one side, with the legs of all processes."""
        found = []
        for worker in self.pools.workers[side]:
            said = worker.describe()
            said["in_flight"] += sum(each.in_flight.get(f"{side.value} {worker.id}", 0) for each in beside.values())
            found.append(said)
        return found

    def _take_stock(self) -> None:
        """Bring the gauges up to date."""
        legs = {(worker.id, worker.side.value): worker for worker in self.pools.all}
        self.metrics.healthy.replace({leg: worker.state is State.OK for leg, worker in legs.items()})
        self.metrics.in_flight.replace({leg: worker.in_flight for leg, worker in legs.items()})
        self.metrics.left_out.replace({leg: worker.outlier.out for leg, worker in legs.items()})
        self.metrics.queued.set(self.num_queued)
        if self._decision_log is not None:
            self.metrics.log_dropped.set(self._decision_log.num_dropped)
        if self.spans is not None:
            self.metrics.spans_dropped.set(self.spans.num_dropped)
        self.metrics.known_blocks.set(len(self.pools.kv_events.index))
        self.metrics.known_nbytes.set(self.pools.kv_events.index.nbytes)


ROUTER = web.AppKey("router", Router)


def build_app(
    config: ProxyConfig, siblings: Siblings | None = None, credentials: Credentials | None = None
) -> web.Application:
    """The proxy as an aiohttp application; `app[ROUTER].drain()` takes it out of service.

    Run it by a `FrontRunner`, with `handler_cancellation=True` (or a client that leaves does not end its request) and
    without an access log (a line costs more than the request; /metrics counts requests). siblings, credentials: see
    `Router`. Raises ConfigError for an invalid worker URL.
    """
    router = Router(config, siblings, credentials)
    # client_max_size: the default of 1 MiB is a prompt of some 200k tokens sent as ids.
    app = web.Application(client_max_size=config.max_body_nbytes)
    app[ROUTER] = router
    app.cleanup_ctx.append(router.open)
    for path in router.dialect.paths:
        app.router.add_post(path, router.generate)
    PassThrough(router).add_routes(app)
    if config.route_s:
        router.decider = Decider(router)
        router.decider.add_routes(app)
        app.on_cleanup.append(router.decider.close)
    about = About(router)
    about.add_routes(app)
    if config.page:
        add_page(app, router)
    add_probe(app, router)
    add_timeline(app, router)
    add_routes(app, router.membership, admin_keys(config), router.members_changed)
    app.router.add_route("*", "/{path:.*}", about.nowhere)
    return app
