"""What a proxy tells about itself over HTTP: health, models, metrics, decisions."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdlink import __version__
from pdlink.api.errors import refused
from pdlink.api.openai import CHAT, COMPLETIONS
from pdlink.observe.series import Numbers

from .decisions import Decision, Told
from .findings import find
from .http_connection import HttpError
from .page.view import WINDOW_S, recent_of, summary_of
from .records import MAX_RECORDS
from .steps import Leg
from .upstream import Asking, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .services import Services
    from .worker import Worker

_SERVING = ("ok", "degraded")

_ABOUT = f"""This is the proxy of pdlink: it serves OpenAI's API from separate prefill and decode workers.

POST {COMPLETIONS}
POST {CHAT}
POST /generate   with SGLang
POST /v1/responses, /v1/messages, /v1/embeddings, /v1/rerank, /tokenize, ...  where a worker has them
GET  /v1/models
GET  /health     its workers, and what is wrong, the worst first
GET  /readyz     200 if a request could be served now
GET  /livez      200 while the proxy runs
GET  /metrics    for Prometheus
GET  /version
GET  /pdlink/    a page that shows workers, transfers and requests
GET  /decisions  why the last requests went where they went; ?request=ID for one of them
"""


class About:
    """Routes of one proxy."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def add_routes(self, app: web.Application) -> None:
        """GET of each, and last, what answers every other path and method."""
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{id:.+}", self.model)
        app.router.add_get("/health", self.health)
        app.router.add_get("/readyz", self.ready)
        app.router.add_get("/livez", self.live)
        app.router.add_get("/version", self.version)
        app.router.add_get("/decisions", self.explain)
        app.router.add_get("/", self.about)
        app.router.add_get("/metrics", self.exposition)

    async def models(self, request: web.Request) -> web.Response:
        if not self._services.entry.may_enter(request):
            return self._services.entry.no_entry(request)
        return _json(200, {"object": "list", "data": [self._card(name) for name in self._services.pools.models()]})

    async def model(self, request: web.Request) -> web.Response:
        if not self._services.entry.may_enter(request):
            return self._services.entry.no_entry(request)
        name = request.match_info["id"]
        known = name in self._services.pools.models()
        return _json(200, self._card(name)) if known else self._services.entry.no_model(name)

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._services.started, "owned_by": "pdlink"}

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if a request could be served now, from the last polls.

        Without a key (load balancers) only the status is shown, no workers and addresses.
        """
        status, reason = self._services.standing()
        http_status = 200 if status in _SERVING else 503
        if not self._services.entry.may_look(request):
            return _json(http_status, {"status": status})
        sees_all = self._services.entry.sees_only(request) is None  # findings name requests, of any key
        beside = await self._services.beside(self._services.record_share if sees_all else 0)
        running, _ = self._services.num_doing(beside)
        body: dict[str, Any] = {"status": status, "reason": reason, "active_requests": running}
        for side in Leg:
            body[side.value] = self._services.described(side, beside, in_full=sees_all)
        if self._services.discovery.sources:
            body["sources"] = self._services.discovery.describe()
        body["refused_pairs"] = [pair.describe() for pair in self._services.pools.refusals]
        body["mismatched"] = [each.describe() for each in self._services.pools.mismatches]
        now_s = time.time()
        recent = recent_of(self._services.recorded(beside, now_s - WINDOW_S) if sees_all else (), now_s)
        body["findings"] = find(
            status=status,
            reason=reason,
            workers=[{**worker, "side": side.value} for side in Leg for worker in body[side.value]],
            refused_pairs=body["refused_pairs"],
            mismatched=body["mismatched"],
            recent=recent,
            summary=summary_of(recent, self._services.reports.newest),
        )
        if self._services.siblings is not None:
            body["processes"] = self._services.siblings.said(beside)
        # Tells which proxy answers: another one may listen on the same port.
        body["proxy"] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": self._services.started,
            "version": __version__,
        }
        return _json(http_status, body)

    async def ready(self, _: web.Request) -> web.Response:
        """GET /readyz: the status of /health alone. For load balancers."""
        status, _reason = self._services.standing()
        return _json(200 if status in _SERVING else 503, {"status": status})

    async def live(self, _: web.Request) -> web.Response:
        """GET /livez: 200 while this process runs. A proxy without workers needs no restart."""
        return _json(200, {"status": "ok"})

    async def explain(self, request: web.Request) -> web.Response:
        """GET /decisions: why the last requests, or that of `?request=ID`, went where they went."""
        entry = self._services.entry
        if not entry.may_look(request):
            return entry.no_entry(request)
        request_id, only = request.query.get("request"), entry.sees_only(request)
        if only is not None and request_id is not None and not await self._services.owns(only, request_id):
            return _json(200, {"decisions": []})
        decisions = self._services.decisions_of(request_id, only)
        if self._services.siblings is not None:
            for found in (await self._services.siblings.ask_all("decisions", [request_id, only])).values():
                decisions += msgspec.convert(found, list[Decision])
            decisions.sort(key=lambda each: each.at_s)
        if request_id is None:
            return _json(200, {"decisions": decisions})
        sources, course = await asyncio.gather(self._sources(request_id, decisions), self._course(request_id))
        return _json(200, {"decisions": decisions, "sources": sources, **course})

    async def _course(self, request_id: str) -> dict[str, Any]:
        """How long a request that has ended took for what, among the last ones, and its transfers as far as workers
        still know them."""
        here, beside = self._services.records, await self._services.beside(MAX_RECORDS)
        others = [each for process in beside.values() for each in process.records]
        found = [each.record() for each in here.of(request_id)]
        found += [each for each in others if each.request_id == request_id]
        if not found:
            return {"record": None, "slower_than": None, "transfers": []}
        record = max(found, key=lambda each: each.at_s)
        known = [each.ttft_s for each in here.heads()] + [each.ttft_s for each in others]
        waits = [each for each in known if each is not None]
        faster = sum(each < record.ttft_s for each in waits) if record.ttft_s is not None else 0
        ids = {leg.transfer_id for leg in record.legs} | {record.transfer_id}
        reports = (await self._services.reports.now()).values()
        ended = [msgspec.structs.asdict(each) for report in reports for each in report.ended]
        return {
            "record": record,
            "slower_than": faster / len(waits) if record.ttft_s is not None else None,
            "transfers": [each for each in ended if each["transfer_id"] in ids],
        }

    async def _sources(self, request_id: str, decisions: Sequence[Decision]) -> list[dict[str, Any]]:
        """What the workers that had this request say of its prompt's KV; of one that does not say, why."""
        ask = self._services.dialect.sources
        labels = {label for each in decisions for label in (each.prefill, each.decode) if label is not None}

        async def of(worker: Worker) -> list[dict[str, Any]]:
            assert ask is not None
            try:
                asking = Asking(self._services.shared.control, worker.url, self._services.config.connect_timeout_s)
                found = await ask(asking, request_id)
            except (HttpError, OSError, ValueError) as error:  # TimeoutError is an OSError
                return [{"worker": worker.label, "error": describe(error)}]
            return [{"worker": worker.label, **msgspec.structs.asdict(each)} for each in found]

        asked = [worker for worker in self._services.pools.all if worker.label in labels] if ask is not None else []
        told = self._services.shared.told.of(request_id)
        if self._services.siblings is not None:
            for found in (await self._services.siblings.ask_all("told", request_id)).values():
                told += msgspec.convert(found, list[Told])
        said = [{"worker": each.worker, **msgspec.structs.asdict(each.said)} for each in told]
        return list(itertools.chain(said, *await asyncio.gather(*map(of, asked))))

    async def version(self, request: web.Request) -> web.Response:
        entry = self._services.entry
        return _json(200, {"version": __version__}) if entry.may_look(request) else entry.no_entry(request)

    async def about(self, _: web.Request) -> web.Response:
        """GET /: a page for people."""
        return web.Response(text=_ABOUT)

    async def exposition(self, request: web.Request) -> web.Response:
        if not self._services.entry.may_look(request):
            return self._services.entry.no_entry(request)
        siblings, others = self._services.siblings, list[Numbers]()
        if siblings is not None:
            found = await siblings.ask_all("numbers")
            others = [msgspec.convert(each, Numbers) for each in found.values()]
            self._services.metrics.count_processes(siblings.said(found))
        body, content_type = self._services.metrics.exposition(request.headers.get("Accept", ""), others)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def nowhere(self, request: web.Request) -> web.Response:
        """Every other path or method."""
        message = f"no such route: {request.method} {request.path}"
        return refused(404, message, "not_found")


def _json(status: int, value: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
