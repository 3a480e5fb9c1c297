"""The HTTP interface of a worker: OpenAI routes, health, metrics, timeline, and the proxy's stop call."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdlink.errors import DeadlineExceeded, InvalidApiKey, InvalidRequest, PdlinkError
from pdlink.events import listen
from pdlink.observe.metrics import WorkerMetrics
from pdlink.observe.timeline import Timeline
from pdlink.protocol import kv_path
from pdlink.serve import health
from pdlink.serve.openai import (
    MAX_TRANSFER_ID_CHARS,
    Answer,
    ChatRequest,
    CompletionRequest,
    Generation,
    error_body,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from pdlink.serve.stream import Stream
    from pdlink.serve.worker import Worker

log = logging.getLogger(__name__)

MAX_BODY_NBYTES = 16 * 2**20
"""Two million token ids; aiohttp's default of 1 MiB answers 413 to a long prompt."""

_LONG_NBYTES = 32 * 1024
"""Larger bodies are parsed and tokenised in a thread: 1 to 3 s a megabyte would block all other requests."""

BODY_S = 60.0
"""Deadline for a body to arrive; aiohttp has none, so slow clients could hold every descriptor."""

_MAX_STOP_NBYTES = 4096


KEY_HEADER = "X-Pdlink-Key"
"""Carries the secret shared by proxy and workers; Authorization is the client's and passes through."""
_OPEN_TO_ALL = frozenset({("GET", "/health"), ("GET", "/metrics")})


class BodyTooLarge(InvalidRequest):
    """The body exceeds the limit of its route."""

    http_status = 413


def build_app(worker: Worker, http_key: str | None = None) -> web.Application:
    """The routes of one open worker. Cleanup of the app stops its event listeners; it does not close the worker.

    http_key: callers must send it in X-Pdlink-Key, except for health and metrics.
    """
    app = web.Application(middlewares=[_errors_as_json, _callers_with(http_key)])
    metrics, timeline = WorkerMetrics(lambda: health.gauges(worker)), Timeline(worker.name)
    stop = [listen(metrics), listen(timeline)]
    reader = ThreadPoolExecutor(1, thread_name_prefix="pdlink-long-prompts")

    async def completions(request: web.Request) -> web.StreamResponse:
        return await _generate(worker, CompletionRequest, request, reader)

    async def chat(request: web.Request) -> web.StreamResponse:
        return await _generate(worker, ChatRequest, request, reader)

    async def models(_: web.Request) -> web.Response:
        card = {"id": worker.model.name, "object": "model", "created": 0, "owned_by": "pdlink"}
        return _json({"object": "list", "data": [card]})

    async def health_of(_: web.Request) -> web.Response:
        ok, body = health.health(worker)
        return _json(body, status=200 if ok else 503)

    async def stop_transfer(request: web.Request) -> web.Response:
        transfer_id = request.match_info["transfer_id"]
        if len(transfer_id) > MAX_TRANSFER_ID_CHARS:
            raise InvalidRequest(f"transfer id: got {len(transfer_id)} characters, at most {MAX_TRANSFER_ID_CHARS}")
        body = await _body(request, _MAX_STOP_NBYTES)
        try:
            fields = msgspec.json.decode(body, type=dict[str, str])
        except (msgspec.DecodeError, UnicodeDecodeError):
            fields = {}
        worker.node.other_side_failed(transfer_id, fields.get("reason", "prefill failed")[:200])
        return web.Response(status=202)

    async def metrics_text(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def trace(_: web.Request) -> web.Response:
        return _json(timeline.trace())

    async def cleanup(_: web.Application) -> None:
        for stop_listening in stop:
            stop_listening()
        reader.shutdown(wait=False, cancel_futures=True)

    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health_of)
    app.router.add_get("/metrics", metrics_text)
    app.router.add_get("/pdlink/timeline", trace)
    app.router.add_post("/pdlink/transfers/{transfer_id}/stop", stop_transfer)
    app.on_cleanup.append(cleanup)
    return app


async def _generate(
    worker: Worker, kind: type[CompletionRequest] | type[ChatRequest], http: web.Request, reader: ThreadPoolExecutor
) -> web.StreamResponse:
    request, prompt = await _request(worker, kind, await _body(http), reader)
    params = request.kv_transfer_params
    transfer_id = params.transfer_id if params else secrets.token_hex(16)
    answer = Answer(request, transfer_id, params.created if params else int(time.time()), len(prompt))
    request_id = f"{params.leg}-{transfer_id}" if params else transfer_id
    stored = await worker.look(request_id, prompt, params, salt=request.cache_salt)
    stream = worker.start(request_id, prompt, request.sampling(), params, salt=request.cache_salt, stored=stored)
    response: web.StreamResponse | None = None
    try:
        async for token in stream:
            answer.add(token.text, token.num_cached_tokens, token.finish_reason)
            if request.stream:
                if response is None:
                    response = web.StreamResponse(
                        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_kv_path(stream)}
                    )
                    await response.prepare(http)
                await response.write(answer.event())
                if params is not None and params.leg == "prefill":
                    return response  # a prefill leg has one event; its transfer goes on without the client
            elif params is not None and params.leg == "prefill":
                return _json(answer.whole())
        if response is None:
            return _json(answer.whole(), headers=_kv_path(stream))
        await response.write(answer.last_events())
        return response
    except asyncio.CancelledError:
        log.info("request %s: the client has gone", request_id)
        worker.abort(stream)
        raise
    except ConnectionError:
        worker.abort(stream)
        assert response is not None
        return response
    except PdlinkError as error:
        worker.abort(stream)
        if response is None:
            raise
        body = error_body(error)
        body["error"]["type"] = "stream_error"
        await response.write(b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n")
        return response


async def _request(
    worker: Worker, kind: type[CompletionRequest] | type[ChatRequest], body: bytes, reader: ThreadPoolExecutor
) -> tuple[Generation, tuple[int, ...]]:
    """The checked request and its prompt's tokens. reader: runs long ones, one by one."""

    def read() -> tuple[Generation, tuple[int, ...]]:
        request = parse(kind, body, worker.model.name)
        return request, request.token_ids(worker.model)

    if len(body) < _LONG_NBYTES:
        return read()
    timeout_s = worker.config.timeouts.request_s
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.get_running_loop().run_in_executor(reader, read)
    except TimeoutError:
        raise DeadlineExceeded(f"the prompt was not read within {timeout_s} s") from None


def _kv_path(stream: Stream) -> dict[str, str]:
    """Known from the first token on."""
    return {kv_path.HEADER: stream.kv_path} if stream.kv_path else {}


async def _body(request: web.Request, max_nbytes: int = MAX_BODY_NBYTES) -> bytes:
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


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error as an OpenAI error object."""
    try:
        return await handler(request)
    except PdlinkError as error:
        headers = {"Retry-After": "1"} if error.http_status == 503 else {}
        return _json(error_body(error), status=error.http_status, headers=headers)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        body = {"message": error.reason, "type": "invalid_request_error", "param": None, "code": str(error.status)}
        return _json({"error": body}, status=error.status)


def _callers_with(http_key: str | None) -> Middleware:
    """Rejects callers without the key, before reading the body."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if http_key is not None and (request.method, request.path) not in _OPEN_TO_ALL:
            sent = request.headers.get(KEY_HEADER, "")
            if not hmac.compare_digest(sent.encode(errors="surrogateescape"), http_key.encode()):
                raise InvalidApiKey(f"this worker serves its proxy only: {KEY_HEADER} is missing or wrong")
        return await handler(request)

    return check


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers
    )
