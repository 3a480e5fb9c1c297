"""The HTTP interface of a worker: OpenAI routes, health, metrics, timeline, and the proxy's stop call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdlink import threads
from pdlink.api import kv_path
from pdlink.api.errors import stream_error
from pdlink.api.fields import decoder
from pdlink.api.legs import MAX_ID_CHARS, AloneParams
from pdlink.api.openai import CHAT, COMPLETIONS
from pdlink.api.session import ID_HEADER, KEPT_HEADER, asked_session, owner_said
from pdlink.config import is_loopback
from pdlink.errors import DeadlineExceeded, InvalidRequest, PdlinkError
from pdlink.events import listen
from pdlink.logs import about
from pdlink.observe.summary import WorkerSummary, tell
from pdlink.observe.timeline import Timeline
from pdlink.observe.trace import TRACE_HEADER, TRACE_TYPE, Laid, make
from pdlink.serve import health
from pdlink.serve.cache_routes import CacheDesk, add_cache_routes
from pdlink.serve.http import (
    body_of,
    callers_with,
    errors_as_json,
    json_response,
    metrics_response,
    no_foreign_pages,
    shown_problems,
)
from pdlink.serve.openai import (
    AnswerWriter,
    ChatRequest,
    CompletionRequest,
    Generation,
    check_model,
    parse,
    tokenized_as,
)
from pdlink.serve.resumed import finish_of, rest_of
from pdlink.serve.state import state
from pdlink.serve.tiers import KeptTurn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from pdlink.engine.forward import LoadedModel
    from pdlink.serve.cache_routes import NamedPrompt
    from pdlink.serve.worker import Worker

log = logging.getLogger(__name__)

_LONG_NBYTES = 32 * 1024
"""Larger bodies are parsed and tokenised in a thread: 1 to 3 s a megabyte would block all other requests."""

_MAX_STOP_NBYTES = 4096


def build_app(worker: Worker, http_key: str | None = None) -> web.Application:
    """The routes of one open worker. Cleanup of the app stops its event listeners; it does not close the worker.

    http_key: callers must send it in X-Pdlink-Key, except for health and metrics.
    """
    loopback = is_loopback(worker.config.listen.host)
    check = no_foreign_pages(loopback=loopback, setting="security.http_key_file")
    if http_key is not None:
        check = callers_with(http_key)
    app = web.Application(middlewares=[errors_as_json, check])
    metrics, timeline = health.metrics_of(worker), Timeline(worker.name)
    stop = [listen(metrics.counting), listen(timeline)]
    every_s = worker.config.summary_s
    if every_s:
        summary = WorkerSummary()
        stop.append(listen(summary))
    reader = ThreadPoolExecutor(1, thread_name_prefix="pdlink-long-prompts")

    generate = partial(_generate, worker, reader, timeline)

    async def tokenize(request: web.Request) -> web.Response:
        """As vLLM's: the tokens that a completion of this prompt, or a chat of these messages, is computed from."""
        body = await body_of(request)
        prompt = (await _request(worker, tokenized_as(body), body, reader))[1]
        return json_response({"tokens": prompt, "count": len(prompt), "max_model_len": worker.model.max_tokens})

    card = {"id": worker.model.name, "object": "model", "created": 0, "owned_by": "pdlink"}

    async def models(_: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [card]})

    async def model(request: web.Request) -> web.Response:
        check_model(request.match_info["id"], worker.model.name)
        return json_response(card)

    async def health_of(request: web.Request) -> web.Response:
        body = health.health(worker)
        if body.problems and worker.source is not None:
            problems = shown_problems(request, http_key, worker.source.store)
            body = msgspec.structs.replace(body, problems=problems)
        return json_response(body, status=200 if body.status == "ok" else 503)

    async def live(_: web.Request) -> web.Response:
        """For supervisors: 503 if only a restart helps, and 200 while it drains."""
        reason = health.problem(worker)
        return json_response(
            {"status": "failed" if reason else "ok", "reason": reason}, status=503 if reason else 200
        )

    async def ready(_: web.Request) -> web.Response:
        """For load balancers: 200 if it takes new requests."""
        status = health.health(worker).status
        return json_response({"status": status}, status=200 if status == "ok" else 503)

    async def stop_transfer(request: web.Request) -> web.Response:
        transfer_id = request.match_info["transfer_id"]
        if len(transfer_id) > MAX_ID_CHARS:
            raise InvalidRequest(f"transfer id: got {len(transfer_id)} characters; expected 1 to {MAX_ID_CHARS}")
        body = await body_of(request, _MAX_STOP_NBYTES)
        try:
            fields = msgspec.json.decode(body, type=dict[str, str])
        except (msgspec.DecodeError, UnicodeDecodeError):
            fields = {}
        worker.node.other_side_failed(transfer_id, fields.get("reason", "prefill failed")[:200])
        return web.Response(status=202)

    async def metrics_text(request: web.Request) -> web.Response:
        return metrics_response(metrics, request)

    async def events_of(_: web.Request) -> web.Response:
        return json_response(timeline.dump())

    async def trace(request: web.Request) -> web.Response:
        only = request.query.get("request")
        made = make([Laid(timeline.dump())], only=None if only is None else {only})
        return web.Response(body=made.data, content_type=TRACE_TYPE, headers={TRACE_HEADER: str(made)})

    async def sources_of(request: web.Request) -> web.Response:
        found = timeline.sources(request.query.get("request", ""))
        return json_response({"sources": list(map(msgspec.structs.asdict, found))})

    async def state_of(_: web.Request) -> web.Response:
        return json_response(state(worker, metrics, timeline))

    async def cleanup(_: web.Application) -> None:
        for stop_listening in stop:
            stop_listening()
        reader.shutdown(wait=False, cancel_futures=True)

    for kind in (CompletionRequest, ChatRequest):
        decoder(kind)  # made here, in 2 ms that the first request would wait for
    app.router.add_post(COMPLETIONS, partial(generate, CompletionRequest))
    app.router.add_post(CHAT, partial(generate, ChatRequest))
    app.router.add_post("/tokenize", tokenize)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{id:.+}", model)
    app.router.add_get("/health", health_of)
    app.router.add_get("/livez", live)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/metrics", metrics_text)
    app.router.add_get("/pdlink/timeline", trace)
    app.router.add_get("/pdlink/events", events_of)
    app.router.add_get("/pdlink/state", state_of)
    app.router.add_get("/pdlink/sources", sources_of)
    if worker.source is not None:
        read, setting = partial(_tokens_of, worker.model), "security.http_key_file"
        add_cache_routes(app, CacheDesk(worker.source.store, read, keyed=http_key is not None, setting=setting))
    app.router.add_post("/pdlink/transfers/{transfer_id}/stop", stop_transfer)
    app.on_cleanup.append(cleanup)
    if every_s:
        app.cleanup_ctx.append(partial(_in_background, tell(summary.take, every_s)))
    return app


def _tokens_of(model: LoadedModel, asked: NamedPrompt) -> Sequence[int]:
    """Of a prompt as this worker's clients write it. Raises InvalidRequest, CapacityExceeded."""
    if asked.messages is None:
        return CompletionRequest(model=model.name, prompt=asked.prompt).token_ids(model)
    chat = ChatRequest(model=model.name, messages=asked.messages)
    chat.check()
    return chat.token_ids(model)


async def _in_background(work: Coroutine[Any, Any, None], _: web.Application) -> AsyncIterator[None]:
    """For as long as the app runs."""
    task = asyncio.create_task(work)
    task.add_done_callback(threads.tell_failure)
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _generate(
    worker: Worker,
    reader: ThreadPoolExecutor,
    timeline: Timeline,
    kind: type[CompletionRequest] | type[ChatRequest],
    http: web.Request,
) -> web.StreamResponse:
    """Answer one request; its client's leaving aborts it."""
    request, prompt = await _request(worker, kind, await body_of(http), reader)
    params = request.kv_transfer_params
    source = params.source if params is not None else ""
    if isinstance(params, AloneParams):
        params = None
    transfer_id = params.transfer_id if params else secrets.token_hex(16)
    answer = AnswerWriter(request, transfer_id, params.created if params else int(time.time()), len(prompt))
    request_id = f"{params.leg}-{transfer_id}" if params else transfer_id
    sampling, answered = request.sampling(), request.output_token_ids
    if answered:
        if finished := finish_of(worker.model, prompt, sampling, answered):
            answer.end(finished)
            return web.Response(body=answer.last_events(), content_type="text/event-stream")
        sampling = rest_of(sampling, answered)
    turn = None
    if ID_HEADER in http.headers or request.session_id or request.session_ttl_s is not None:
        asked = asked_session(request.session_id, request.session_ttl_s, http.headers)
        turn = KeptTurn(asked._replace(owner=owner_said(http.headers))) if asked is not None else None
    leg, caller_id = params.leg if params else "", http.headers.get("X-Request-Id", "")
    timeline.named(request_id, caller_id, leg)
    stream = worker.start(
        request_id,
        prompt + answered,
        sampling,
        params,
        num_answered=len(answered),
        salt=request.cache_salt or "",
        retention=request.retention(worker.config.tiers.priority_limit),
        turn=turn,
        source=source,
    )
    response: web.StreamResponse | None = None
    headers: dict[str, str] = {}
    try:
        async for token in stream:
            answer.add(token)
            if stream.kv_path:  # known from the first token on
                headers[kv_path.HEADER] = stream.kv_path
            if turn is not None and turn.kept_tokens is not None:
                headers[KEPT_HEADER] = f"kept={turn.kept_tokens} of={len(prompt)}"
            if request.stream:
                if response is None:
                    response = web.StreamResponse(
                        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
                    )
                    await response.prepare(http)
                await response.write(answer.event())
                if params is not None and params.leg == "prefill":
                    return response  # a prefill leg has one event; its transfer goes on without the client
            elif params is not None and params.leg == "prefill":
                return json_response(answer.whole(), headers=headers)
        if response is None:
            return json_response(answer.whole(), headers=headers)
        await response.write(answer.last_events())
        return response
    except asyncio.CancelledError:
        log.info(
            "request %s: the client has gone", request_id, extra=about(request_id=caller_id, transfer_id=transfer_id)
        )
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
        await response.write(stream_error(str(error), code=error.code))
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
