"""Routes that one worker serves whole: passed to a worker that has them, answers forwarded verbatim.

Which worker has which route its /openapi.json says, asked for once in its life; where it has none, a 404 is
remembered. Among those the decode leg's policy chooses. Nothing is known of the shapes of these requests but `model`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import msgspec
from aiohttp import web

from pdlink.api.errors import COUNT_TOKENS, refusal_of, refused, reworded
from pdlink.api.fields import BadField
from pdlink.api.keys import key_of
from pdlink.api.openai import BYTES_PER_TOKEN, MESSAGES, RESPONSES, CommonFields, said_in
from pdlink.errors import NoWorker, Overloaded, PeerLost

from .access import clean
from .fleet import PlacementRequest
from .http_connection import HttpError
from .leg import LegAccount
from .queue import Waiting
from .steps import Leg, Loss, Outcome
from .upstream import Asking, ask, loss_of, streamed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from .services import Services
    from .shared import Shared
    from .upstream import Streamed
    from .worker import Worker

PATHS = (
    *(RESPONSES, MESSAGES),  # where the dialect does not serve them in two legs
    *(COUNT_TOKENS, "/v1/embeddings", "/embeddings", "/pooling", "/classify", "/v1/classify"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
)
_MAX_OPENAPI_NBYTES = 8 * 2**20
_MAX_NOT_FOUND_NBYTES = 64 * 1024
_OWN_HEADERS = ("anthropic-version", "anthropic-beta", "openai-beta", "accept")
"""Of a client, passed on with the ones that every leg gets."""


class _OpenApi(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


class _Said(msgspec.Struct):
    message: str = ""


class _NotFound(msgspec.Struct):
    detail: str = ""
    error: _Said = msgspec.field(default_factory=_Said)


class PassThrough:
    """These routes of one proxy."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def add_routes(self, app: web.Application) -> None:
        for path in PATHS:
            if path in self._services.dialect.paths:
                continue
            app.router.add_post(path, self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        services = self._services
        headers = services.entry.leg_headers(request.headers)
        outcome = Outcome.FAILED
        try:
            body = await services.entry.admitted(request)
            if isinstance(body, web.Response):
                outcome = Outcome.UNAVAILABLE if body.status == 503 else Outcome.REJECTED
                answer: web.StreamResponse = body
            else:
                if services.entry.tenants:
                    services.entry.own(headers["X-Request-Id"], request.headers)
                with services.running(_Running()):
                    answer, outcome = await self._pass(request, body, {**own_headers(services, request), **headers})
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_LEFT
            raise
        finally:
            services.metrics.requests.add(1, outcome.value)
        if not answer.prepared:
            answer.headers.setdefault("X-Request-Id", headers["X-Request-Id"])
        return reworded(request.path, answer)

    async def _pass(
        self, request: web.Request, body: bytes, headers: Mapping[str, str]
    ) -> tuple[web.StreamResponse, Outcome]:
        services, shared, loop = self._services, self._services.shared, asyncio.get_running_loop()
        try:
            said = _said(body)
        except BadField as error:
            return refusal_of(error), Outcome.REJECTED
        if said.model is not None and (unknown := services.entry.unknown_model(said.model)) is not None:
            return unknown, Outcome.REJECTED
        most = said.max_tokens or said.max_output_tokens or 0
        wanted = PlacementRequest(said.model or "", len(body) // BYTES_PER_TOKEN + 1, answer_tokens=most, prompt=body)
        if (refusal := services.entry.over_limit(request, wanted.total_tokens)) is not None:
            return refusal, Outcome.REJECTED
        shared.retries.num_new += 1
        if (refusal := await self._wait_for_any(request, wanted, said.model)) is not None:
            return refusal, Outcome.UNAVAILABLE
        tried: set[str] = set()
        lost = 0
        while (worker := await self._worker(request.path, wanted, said.model, tried)) is not None:
            tried.add(worker.url)
            found = await self._ask(request, worker, body, headers, wanted)
            if found is None:
                continue
            if not isinstance(found, Loss):
                return found
            if found is Loss.STALE:
                tried.discard(worker.url)
            lost += 1
            if lost > services.config.retries or not shared.retries.spend(loop.time()):
                break
        if lost:
            return refused(502, "the worker of this request was lost", PeerLost.code), Outcome.FAILED
        if services.pools.usable(Leg.DECODE, said.model):
            return refused(404, f"no worker here serves POST {request.path}", "not_found"), Outcome.REJECTED
        return self._nobody(), Outcome.UNAVAILABLE

    async def _wait_for_any(
        self, request: web.Request, wanted: PlacementRequest, model: str | None
    ) -> web.Response | None:
        """Wait in the queue, as requests of two legs do, while there is no worker; the error after that."""
        shared, config, loop = self._services.shared, self._services.config, asyncio.get_running_loop()
        waits = _Waits(self._services, model)
        if waits.place_now():
            return None
        if not config.no_worker_timeout_s or not config.queue_size:
            return self._nobody()
        waiting = Waiting(
            key_of(request.headers), model or "", tokens=wanted.total_tokens, since_s=loop.time(), item=waits
        )
        if not shared.queue.put(waiting):
            message = f"queue_size: {config.queue_size} requests wait already; try again later"
            return refused(
                Overloaded.http_status, message, Overloaded.code, retry_after_s=shared.queue.retry_after_s()
            )
        try:
            async with asyncio.timeout(config.no_worker_timeout_s):
                await waits.over
        except TimeoutError:
            return self._nobody()
        finally:
            shared.queue.remove(waiting)
        return None

    def _nobody(self) -> web.Response:
        retry_after_s = self._services.shared.queue.retry_after_s()
        return refused(503, "no healthy worker; see /health", NoWorker.code, retry_after_s=retry_after_s)

    async def _worker(self, path: str, wanted: PlacementRequest, model: str | None, tried: set[str]) -> Worker | None:
        """One that may have this route and was not tried: of the decode leg, or else of the other.

        Only a worker that is chosen is asked for its routes: a fleet has thousands.
        """
        pools = self._services.pools
        for side in (Leg.DECODE, Leg.PREFILL):
            while found := [
                worker for worker in pools.usable(side, model) if worker.url not in tried and _may_have(worker, path)
            ]:
                worker = pools.pick(wanted, found)
                if worker.routes is None:
                    worker.routes = await self._routes_of(worker)
                if _may_have(worker, path):
                    return worker
        return None

    async def _routes_of(self, worker: Worker) -> frozenset[str]:
        """What its /openapi.json lists; empty if it has none."""
        shared = self._services.shared
        asking = Asking(shared.control, worker.url, self._services.config.connect_timeout_s)
        with suppress(HttpError, OSError, TimeoutError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            reply = await ask(asking, "/openapi.json", _MAX_OPENAPI_NBYTES)
            if reply.status == 200:
                return frozenset(msgspec.json.decode(reply.body, type=_OpenApi).paths)
        return frozenset()

    async def _ask(
        self, request: web.Request, worker: Worker, body: bytes, headers: Mapping[str, str], wanted: PlacementRequest
    ) -> tuple[web.StreamResponse, Outcome] | Loss | None:
        """The answer; a loss, after which another worker may give one; or None if this one has no such route."""
        config, shared = self._services.config, self._services.shared
        loop = asyncio.get_running_loop()
        response: web.StreamResponse | None = None
        with _Count(shared, worker, wanted) as count:
            try:
                async with (
                    asyncio.timeout(config.first_byte_timeout_s) as silence,
                    streamed(shared.clients[worker.side], "POST", worker.url + request.path, body, headers) as answer,
                ):
                    peeked = await answer.read(_MAX_NOT_FOUND_NBYTES) if answer.status == 404 else b""
                    if peeked and _is_no_route(peeked):
                        worker.lacks.add(request.path)
                        return None
                    if answer.status >= 500:
                        count.failed(str(answer.status))
                        status = 502 if answer.status < 503 else answer.status
                        message = f"the worker answered {answer.status}"
                        return refused(status, message, PeerLost.code), Outcome.FAILED
                    response = web.StreamResponse(status=answer.status, headers=_answer_headers(answer, headers))
                    silence.reschedule(None)  # while the client is waited for
                    await self._say(response.prepare(request))
                    if peeked:
                        await self._say(response.write(peeked))
                    silence.reschedule(loop.time() + config.idle_timeout_s)
                    async for data in answer.parts():
                        silence.reschedule(None)
                        await self._say(response.write(data))
                        silence.reschedule(loop.time() + config.idle_timeout_s)
                    silence.reschedule(None)
                    await self._say(response.write_eof())
            except _ClientLost:
                _abort(request)
                return response or web.Response(), Outcome.CLIENT_LEFT
            except (HttpError, OSError, ValueError) as error:  # ValueError: a body unlike its Content-Length
                loss = Loss.TIMEOUT if isinstance(error, TimeoutError) else loss_of(error)
                count.lost(loss)
                if response is None:
                    return loss
                if "event-stream" not in response.headers["Content-Type"]:
                    _abort(request)  # half an answer must not look whole
                else:
                    with suppress(_ClientLost):
                        await self._say(response.write(_broken_event(loss)))
                return response, Outcome.BROKEN
            count.served()
            return response, Outcome.OK if answer.status < 400 else Outcome.REJECTED

    async def _say(self, said: Awaitable[object]) -> None:
        """Raises _ClientLost if the client has left, or reads nothing for `idle_timeout_s`."""
        try:
            async with asyncio.timeout(self._services.config.idle_timeout_s):
                await said
        except (ConnectionError, TimeoutError):
            raise _ClientLost from None


def own_headers(services: Services, request: web.Request) -> dict[str, str]:
    """The headers of a client that mean something to the servers of these routes."""
    names = _OWN_HEADERS if services.entry.api_keys else (*_OWN_HEADERS, "x-api-key")  # else it is ours, to check
    return {name: said for name in names if (said := clean(request.headers.get(name)))}


class _Waits:
    """A request in the queue."""

    def __init__(self, services: Services, model: str | None) -> None:
        self._pools, self._model = services.pools, model
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def place_now(self) -> bool:
        """Whether there is a worker to ask, or nobody waits any more."""
        if not self.over.done():
            if not any(self._pools.usable(side, self._model) for side in Leg):
                return False
            self.over.set_result(None)
        return True


class _ClientLost(Exception):
    """Nobody reads the answer."""


class _Running:
    """A request that is passed through: ended by the proxy's end."""

    request_id, decided = "", ()

    def __init__(self) -> None:
        self._task = asyncio.current_task()

    def shut_down(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Count:
    """The request counts in the worker's load while this context lasts."""

    def __init__(self, shared: Shared, worker: Worker, wanted: PlacementRequest) -> None:
        self._shared, self._worker = shared, worker
        self._account = LegAccount(worker, wanted.total_tokens, time.monotonic(), shared)
        self._well: bool | None = None
        """As of `LegAccount.end`."""

    def __enter__(self) -> Self:
        self._worker.passing += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.passing -= 1
        self._account.end(time.monotonic(), well=self._well)

    def failed(self, reason: str) -> None:
        """By the worker's own fault."""
        self._well = False
        self._shared.metrics.leg_failures.add(1, self._worker.side.value, reason)

    def lost(self, loss: Loss) -> None:
        self.failed(loss.value)
        if loss in (Loss.CONNECT, Loss.RESET):
            self._shared.pools.fault(self._worker, f"a request's connection failed ({loss.value})")
        if loss in (Loss.STALE, Loss.LOCAL):
            self._well = None

    def served(self) -> None:
        self._well = True


def _may_have(worker: Worker, path: str) -> bool:
    return path not in worker.lacks and (not worker.routes or path in worker.routes)


def _said(body: bytes) -> CommonFields:
    """The fields that are read here. Raises BadField; what is no object of JSON is the worker's to judge."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return CommonFields()
    return said_in(body, fields)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _is_no_route(body: bytes) -> bool:
    """Whether a 404 is about the path (FastAPI's, aiohttp's, pdlink's), and not about a model or an id."""
    if body == b"404: Not Found":
        return True
    try:
        said = msgspec.json.decode(body, type=_NotFound)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return said.detail == "Not Found" or said.error.message == "Not Found"


def _answer_headers(answer: Streamed, headers: Mapping[str, str]) -> dict[str, str]:
    found = {"Content-Type": answer.headers.get("content-type", "application/json")}
    for name in ("Content-Length", "Retry-After"):
        if (said := answer.headers.get(name)) is not None:
            found[name] = said
    return {**found, "X-Request-Id": headers["X-Request-Id"], "X-Accel-Buffering": "no"}


def _broken_event(loss: Loss) -> bytes:
    """An error event as both APIs that stream here have it."""
    error = {"type": "error", "error": {"type": "api_error", "message": f"the worker was lost ({loss.value})"}}
    return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
