"""Workers that speak the contract and misbehave on demand, and a proxy in front of them, all in this process."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from typing import Protocol as TypingProtocol

import aiohttp
import msgspec
from aiohttp import web

from pdlink._http import FINISH as FINISH_MARK
from pdlink._http import marks_of
from pdlink.config import ProxyConfig
from pdlink_proxy.app import ROUTER, Router, build_app
from pdlink_proxy.front import Doors, FrontRunner
from pdlink_proxy.queue import Queue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from pdlink_proxy.flow import Flow
    from pdlink_proxy.siblings import Siblings
    from pdlink_proxy.steps import Leg

DEADLINE_S = 60.0
"""Of every wait in these tests; reaching it is a failure."""

DONE = b"data: [DONE]\n\n"
FINISH = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
END = FINISH + DONE
"""Of a whole answer: an answer without a reason of its end is none."""


async def until(true: Callable[[], bool], what: str = "condition", deadline_s: float = DEADLINE_S) -> None:
    """Wait for something that has no event of its own."""
    try:
        async with asyncio.timeout(deadline_s):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"still waiting for {what}") from None


def event(text: str, **more: Any) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"index": 0, "text": text}], **more}) + b"\n\n"


_KV_COMMENT = re.compile(rb"(?:: Server-Timing: [^\n]*\n)?: X-Pdlink-KV: ([^\n]*)\n\n(?=data: ?\[DONE\])")


def passed(flow: Flow, attempt: int, leg: Leg, data: bytes, now: float) -> bool:
    """Whether these bytes of a stream pass without a look, as `Exchange.pass_to` does it."""
    if not flow.passes(attempt, leg) or not data.endswith(b"\n\n") or marks_of(data, flow.look):
        return False
    flow.passed(data, now, finished=marks_of(data, FINISH_MARK) != 0)
    return True


def settled(data: bytes) -> tuple[bytes, str]:
    """A stream without the proxy's closing comment, and what that says of the KV's way."""
    (value,) = _KV_COMMENT.findall(data)
    return _KV_COMMENT.sub(b"", data), value.decode()


def tokens_of(data: bytes) -> bytes:
    return settled(data)[0]


@dataclass
class Received:
    """One generation request a worker got."""

    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: dict[str, Any]
    aborted: bool = False
    """The proxy closed the connection before the answer was complete."""
    answered: bool = False

    @property
    def transfer_id(self) -> str:
        return str(self.body["kv_transfer_params"]["transfer_id"])


@dataclass(kw_only=True)
class FakeServer:
    """A server in this process: what it was asked, a port, start and end. Those of engines say what they answer."""

    received: list[Received] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    """What somebody asked for, and the engine's server does not have."""
    port: int = 0
    _runner: web.AppRunner | None = None

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    async def answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        """To a request of `generate`."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> Self:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_routes([*self.routes(), web.route("*", "/{path:.*}", self._nowhere)])
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Go away; `start` comes back on the same port."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """The handler of a generation request."""
        raw = await request.read()
        received = Received(request.path, request.headers, raw, msgspec.json.decode(raw))
        self.received.append(received)
        try:
            response = await self.answer(request, received)
        except (asyncio.CancelledError, ConnectionError):
            received.aborted = True
            raise
        received.answered = True
        return response

    async def _nowhere(self, request: web.Request) -> web.Response:
        self.strange.append(f"{request.method} {request.path}")
        return web.json_response({"detail": "Not Found"}, status=404)


@dataclass
class FakeWorker(FakeServer):
    """A prefill or decode worker whose output tokens are `tokens`."""

    role: str
    name: str = ""
    model: str = "m"
    epoch: str = "e1"
    status: str = "ok"
    running: int = 0
    free_blocks: int | None = None
    """Of 16 tokens; None is not said."""
    key: str = ""
    """What callers must send in X-Pdlink-Key, other than for its health."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    """Said in its health."""
    control: str = ""
    fingerprint: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    """Said in its health, as the next two."""
    version: str = ""
    revision: str = ""
    tokens: list[str] = field(default_factory=lambda: ["zero", "one", "two"])
    fail_with: int | None = None
    """Answer every generation request with this status."""
    fail_body: bytes = b""
    """With this body, instead of an error that names the worker."""
    fail_legs_only: bool = False
    """Not the requests that decode is to serve alone."""
    answer_override: bytes | None = None
    """The whole answer to a request that does not stream."""
    content_type: str = "application/json"
    """Of that answer."""
    redirect_to: str = ""
    """Base URL in the Location header of such an answer."""
    resets: int = 0
    """Close the connections of this many requests without a byte of answer."""
    silent: bool = False
    """Never answer a generation request."""
    hung: bool = False
    """As a stopped host: it takes connections and answers nothing, nor its health."""
    break_after: int | None = None
    """Close the connection in the middle of the stream, after this many events."""
    end_after: int | None = None
    """End the stream politely, but without [DONE], after this many events."""
    gate: asyncio.Event | None = None
    """Waited for before the first byte of an answer."""
    needs: FakeWorker | None = None
    """Wait until this worker has answered the other leg of the same transfer, as decode does for its KV."""
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    """Waited for before event i."""
    resumes: bool = False
    """It tells token ids, if it is asked to, and goes on behind `output_token_ids`."""
    split: int | None = None
    """Write the stream in pieces of this many bytes."""
    kv_events: tuple[str, ...] = ()
    """Said in its health."""
    tokenizes: bool = False
    """It has POST /tokenize; see `tokens_in`."""
    tokenize_gate: asyncio.Event | None = None
    """Waited for before an answer to that."""
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    """What it was asked to tokenise."""
    kv: str = "transferred"
    """Said in X-Pdlink-KV of every answer to a decode leg; empty says nothing."""
    cached_tokens: int | None = None
    """Told in its usage."""
    stream_override: bytes | None = None
    """The whole stream, instead of one made from `tokens`."""
    report: bytes | None = None
    """What it answers to GET /pdlink/state; None does not know that route."""
    reported: int = 0
    """How often it was asked for that."""
    on_stop: Callable[[FakeWorker], None] | None = None
    probed: int = 0
    """How often it was asked for its health."""
    stops: list[tuple[str, str]] = field(default_factory=list)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.get("/pdlink/state", self._state),
            *(web.post(path, self.generate) for path in ("/v1/completions", "/v1/chat/completions")),
            web.post("/pdlink/transfers/{id}/stop", self._stop),
            web.post("/tokenize", self._tokenize),
        ]

    async def start(self) -> Self:
        await super().start()
        self.name = self.name or f"{self.role}-{self.port}"
        return self

    async def _health(self, _: web.Request) -> web.Response:
        self.probed += 1
        if self.hung:
            await asyncio.Event().wait()
        return web.json_response(self.health(), status=200 if self.status == "ok" else 503)

    def health(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "name": self.name,
            "epoch": self.epoch,
            "role": self.role,
            "model": self.model,
            "control": self.control or f"tcp://127.0.0.1:{self.port + 1}",
            "refused": self.refused,
            "running": self.running,
            "waiting": 0,
            "free_blocks": self.free_blocks,
            "block_tokens": 16,
            "fingerprint": self.fingerprint,
            "problems": self.problems,
            "version": self.version,
            "revision": self.revision,
            "kv_events": self.kv_events,
        }

    async def _state(self, _: web.Request) -> web.Response:
        self.reported += 1
        return web.Response(status=404) if self.report is None else web.Response(body=self.report)

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.tokenized.append(msgspec.json.decode(await request.read()))
        if not self.tokenizes:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.tokenize_gate is not None:
            await self.tokenize_gate.wait()
        asked = self.tokenized[-1]
        text = "".join(each["content"] for each in asked["messages"]) if "messages" in asked else asked["prompt"]
        found = tokens_in(text)
        return web.json_response({"count": len(found), "max_model_len": 2**20, "tokens": found})

    def _bars(self, request: web.Request) -> bool:
        return bool(self.key) and request.headers.get("X-Pdlink-Key") != self.key

    async def _models(self, request: web.Request) -> web.Response:
        if self._bars(request):
            return web.json_response({"error": {"code": "invalid_api_key"}}, status=401)
        return web.json_response({"data": [{"id": self.model}]})

    async def _stop(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.stops.append((request.match_info["id"], body["reason"]))
        if self.on_stop is not None:
            self.on_stop(self)
        return web.Response(status=202)

    async def answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        if self._bars(request):
            error = {"message": "X-Pdlink-Key is missing or wrong", "type": "x", "param": None}
            return web.json_response({"error": {**error, "code": "invalid_api_key"}}, status=401)
        if self.silent or self.hung:
            await asyncio.Event().wait()
        if self.gate is not None:
            await self.gate.wait()
        if (other := self.needs) is not None:
            mine = received.transfer_id
            await until(lambda: any(got.answered and got.transfer_id == mine for got in other.received), "the KV")
        if self.resets:
            self.resets -= 1
            abort(request)
        if self.fail_with is not None and (not self.fail_legs_only or received.body.get("kv_transfer_params")):
            error = {"message": f"no: {self.name}", "type": "x", "param": None, "code": f"code_{self.fail_with}"}
            headers = {"Location": self.redirect_to + request.path} if self.redirect_to else {}
            if self.fail_body:
                return web.Response(body=self.fail_body, status=self.fail_with, content_type=self.content_type)
            return web.json_response({"error": error}, status=self.fail_with, headers=headers)
        params = received.body.get("kv_transfer_params")
        leg = params["leg"] if params else "alone"
        said = {"X-Pdlink-KV": self.kv} if leg == "decode" and self.kv else {}
        if not received.body.get("stream"):
            if self.answer_override is not None:
                return web.Response(body=self.answer_override, content_type=self.content_type)
            text = "".join(self.tokens)
            body: dict[str, Any] = {"id": "cmpl-x", "choices": [{"text": text}], "worker": self.name, "leg": leg}
            body |= {"usage": self.usage()} if self.cached_tokens is not None else {}
            return web.json_response(body, headers=said)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **said})
        await response.prepare(request)
        if self.stream_override is not None:
            await self._write(response, self.stream_override)
            return response
        events = self._events(received.body)
        if leg == "prefill":
            events = events[:1]
        for index, data in enumerate(events):
            if index == self.break_after:
                abort(request)
            if index == self.end_after:
                return response
            if index in self.gates:
                await self.gates[index].wait()
            await self._write(response, data)
        if len(events) == self.break_after:
            abort(request)
        if self.cached_tokens is not None and (received.body.get("stream_options") or {}).get("include_usage"):
            await self._write(
                response, b"data: " + msgspec.json.encode({"choices": [], "usage": self.usage()}) + b"\n\n"
            )
        if leg != "prefill":
            await self._write(response, END)
        return response

    def usage(self) -> dict[str, Any]:
        details = {"cached_tokens": self.cached_tokens}
        return {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11, "prompt_tokens_details": details}

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        if not (self.resumes and body.get("return_token_ids")):
            return [event(token) for token in self.tokens]
        name = body["kv_transfer_params"]["transfer_id"] if "kv_transfer_params" in body else "alone"
        begin = len(body.get("output_token_ids", ()))
        assert body.get("output_token_ids", []) == list(range(begin))
        return [
            b"data: "
            + msgspec.json.encode({"id": name, "choices": [{"index": 0, "text": token, "token_ids": [index]}]})
            + b"\n\n"
            for index, token in enumerate(self.tokens)
        ][begin:] + [event("", id=name)]

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        step = self.split or len(data)
        for start in range(0, len(data), step):
            await response.write(data[start : start + step])
            if self.split:
                await asyncio.sleep(0)


def tokens_in(text: str) -> list[int]:
    """Tokens of a fake worker: one for each five characters."""
    data = text.encode()
    return [int.from_bytes(data[at : at + 5]) % 2**31 for at in range(0, len(data), 5)]


def abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("scripted")


def serve(server: FakeServer) -> None:
    """Until SIGTERM."""

    async def run() -> None:
        await server.start()
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        await told.wait()

    asyncio.run(run())


def command(directory: Path, engine: str = "vllm", *, fails: str = "") -> Path:
    """An executable that takes the arguments of this engine's own and serves its fake, without a model.

    fails: its last words.
    """
    path = directory / engine
    code = f"""#!{sys.executable}
import sys
sys.path[:0] = {[str(Path(__file__).parents[2]), *sys.path]!r}
from tests.proxy.fake_{engine} import main
print("ARGUMENTS", sys.argv[1:], flush=True)
if {fails!r}:
    sys.exit({fails!r})
main()
"""
    path.write_text(code)
    path.chmod(0o755)
    return path


@dataclass
class Proxy:
    """A running proxy and a client for it."""

    url: str
    router: Router
    client: aiohttp.ClientSession
    config: ProxyConfig
    doors: Doors

    @property
    def queue(self) -> Queue:
        """The requests that wait for workers."""
        assert self.router.services._shared is not None
        return self.router.services._shared.queue

    def post(self, path: str = "/v1/completions", **body: Any) -> Any:
        """A request context; `stream` and the like are passed as keywords."""
        needed: dict[str, Any] = {"messages": []} if "chat" in path else {"prompt": "hello"}
        return self.client.post(self.url + path, json={"model": "m", **needed, **body})

    async def stream(self, **body: Any) -> bytes:
        """The whole body of a streamed completion, without the proxy's closing comment."""
        async with self.post(stream=True, **body) as response:
            data: bytes = await response.read()
            assert response.status == 200, data
            return tokens_of(data)

    def counted(self, name: str, **labels: str) -> float:
        """A sample of the proxy's own metrics; 0 if it does not exist yet."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.router.services.metrics.exposition()[0].decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"pdlink_proxy_{name}" and sample.labels == labels
        )


class Listed(TypingProtocol):
    """A server that a proxy is told of."""

    @property
    def url(self) -> str: ...


def settings(prefill: Sequence[Listed], decode: Sequence[Listed], **more: Any) -> ProxyConfig:
    defaults: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "policy": "round_robin",
        "health_interval_s": 0.02,
        "no_worker_timeout_s": 0,
        "connect_timeout_s": 5,
    }
    urls = {"prefill": [worker.url for worker in prefill], "decode": [worker.url for worker in decode]}
    return ProxyConfig.model_validate(defaults | urls | more)


@contextlib.asynccontextmanager
async def proxy_of(
    prefill: Sequence[Listed],
    decode: Sequence[Listed],
    *,
    settled: bool = True,
    siblings: Siblings | None = None,
    **more: Any,
) -> AsyncIterator[Proxy]:
    """A proxy before these workers. settled: wait until each of them has been heard once. siblings: it is one
    process of a proxy."""
    config = settings(prefill, decode, **more)
    app = build_app(config, siblings)
    runner = FrontRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    router, doors = app[ROUTER], runner.server
    assert isinstance(doors, Doors)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        try:
            if settled:
                await until(
                    lambda: all(worker.heard_s for worker in router.services.pools.all), "every worker's health"
                )
            yield Proxy(f"http://127.0.0.1:{runner.addresses[0][1]}", router, client, config, doors)
        finally:
            await runner.cleanup()
            leftover = {worker.url: worker.in_flight for worker in router.services.pools.all if worker.in_flight}
            assert leftover == {}, "legs were left behind"
