"""An SGLang server as the proxy sees it, after the sources of SGLang 0.5.23: entrypoints/http_server.py,
entrypoints/openai/{serving_completions,serving_chat}.py, managers/io_struct.py. No model: tokens are counted out; the
log-probability of a prompt's token is minus its number, and 0 for those of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from pdlink.api.legs import PrefillAddress
from pdlink.api.session import SGLANG_END
from pdlink_proxy.dialects import TransferTerms
from tests.proxy.fakes import DONE, FakeServer, Received, abort, serve

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
TERMS = TransferTerms(
    transfer_id="xfer-1",
    created=1,
    seed=0,
    prefill=PrefillAddress("tcp://127.0.0.1:1"),
    prefill_url="http://127.0.0.1:1",
    link={"bootstrap_port": 8998},
)
"""Of an attempt at such servers."""


@dataclass
class FakeSglang(FakeServer):
    """One server. Texts of a prefill server begin with "P"."""

    mode: str = "null"
    """disaggregation_mode: "prefill", "decode", or "null" of a plain server."""
    bootstrap_port: int = 9123
    fail_with: int | None = None
    gate: asyncio.Event | None = None
    """Waited for before the first byte of an answer."""
    steps: asyncio.Semaphore | None = None
    """Each event of /generate's streams waits for one."""
    break_at: int | None = None
    """Close the connection in place of this event of a stream."""
    streams: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    """By path, the events of its streams, in place of its own."""
    more_info: dict[str, Any] = field(default_factory=dict)
    """In /server_info."""
    cached_tokens: int | None = None
    """Told in the usage, as with --enable-cache-report."""
    words: str = ""
    """It adds these to each token, as a server that computes something else."""
    kv_events: dict[str, Any] | None = None
    """The publisher that /server_info describes (runtime_context.describe_kv_events_publisher)."""
    aborts: list[str] = field(default_factory=list)
    """Ids given to POST /abort_request."""
    ended: list[dict[str, Any]] = field(default_factory=list)
    """Sessions that POST /set_internal_state was to end: see pdlink/integrations/sglang_parts/sessions.py."""
    has_plugin: bool = True
    """Without ours it knows no such setting."""
    models: list[str] = field(default_factory=lambda: ["m"])

    def routes(self) -> list[web.RouteDef]:
        asked = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")
        return [
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.get("/server_info", self._info),
            web.get("/metrics", self._metrics),
            web.post("/abort_request", self._abort),
            web.post("/set_internal_state", self._set),
            *(web.post(path, self.generate) for path in asked),
        ]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _info(self, _: web.Request) -> web.Response:
        said = {"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": self.bootstrap_port}
        return web.json_response(
            {
                **said,
                "page_size": 16,
                "version": "0.5.23",
                "max_total_num_tokens": 16384,
                "internal_states": [{}],
                "kv_events": self.kv_events,
                **self.more_info,
            }
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        stages = {"prefill_forward": 5.0, "prefill_transfer_kv_cache": 0.25 * len(self.received)}
        name = "sglang:per_stage_req_latency_seconds_sum"
        return web.Response(text="".join(f'{name}{{stage="{stage}"}} {said}\n' for stage, said in stages.items()))

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts.append((await request.json())["rid"])
        return web.Response()

    async def _set(self, request: web.Request) -> web.Response:
        (name,) = (await request.json())["server_args"]
        assert name.startswith(SGLANG_END)
        self.ended.append(msgspec.json.decode(name.removeprefix(SGLANG_END)))
        return web.json_response([False, self.has_plugin])

    async def answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        body = received.body
        if self.gate is not None:
            await self.gate.wait()
        if self.fail_with is not None:
            return web.json_response(
                {"object": "error", "message": "no", "code": self.fail_with}, status=self.fail_with
            )
        if body.get("stream") and (events := self.streams.get(request.path)) is not None:
            return await self._replayed(request, events)
        if request.path == "/generate":
            return await self._native(request, body)
        prompts = body.get("prompt", "")
        num = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        if self.mode != "null" and (problem := _problem(body, num)):
            self.strange.append(problem)
            return web.json_response({"object": "error", "message": problem, "code": 500}, status=500)
        if request.path in ("/v1/responses", "/v1/messages"):
            return await self._named(request, body)
        limit = 1 if self.mode == "prefill" else body.get("max_tokens", 3)
        chat, sign = "chat" in request.path, "P" if self.mode == "prefill" else ""
        said = [f"{sign}{index}.{token} {self.words}" for index in range(num) for token in range(limit)]
        if not body.get("stream"):
            choices = [
                {"index": index, **_text("".join(said[index * limit : (index + 1) * limit]), chat, "message")}
                for index in range(num)
            ]
            return web.json_response({"id": body.get("rid", "made"), "choices": choices, "usage": self._usage()})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, text in enumerate(said):
            if number == self.break_at:
                abort(request)
            end = "length" if number % limit == limit - 1 else None
            event = {"choices": [{"index": number // limit, **_text(text, chat, "delta"), "finish_reason": end}]}
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        if (body.get("stream_options") or {}).get("include_usage"):
            last = {"choices": [], "usage": self._usage()}
            await response.write(b"data: " + msgspec.json.encode(last) + b"\n\n")
        await response.write(DONE)
        return response

    def _usage(self) -> dict[str, Any]:
        details = {"cached_tokens": self.cached_tokens} if self.cached_tokens is not None else None
        return {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11, "prompt_tokens_details": details}

    async def _replayed(self, request: web.Request, events: Sequence[bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(events):
            if number == self.break_at:
                abort(request)
            await response.write(event)
        return response

    async def _named(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        messages, text = request.path == "/v1/messages", "P" if self.mode == "prefill" else "0.0 "
        said = {"content": [{"type": "text", "text": text}]} if messages else {"output": [{"text": text}]}
        if not body.get("stream"):
            return web.json_response({"id": body.get("request_id", "made"), **said})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for name in ("message_start", "message_stop") if messages else ("response.created", "response.completed"):
            data = msgspec.json.encode({"type": name, **said})
            await response.write(f"event: {name}\ndata: ".encode() + data + b"\n\n")
        return response

    async def _native(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompts = body.get("text") or body["input_ids"]
        batch = isinstance(prompts, list) and not isinstance(prompts[0], int)
        num = len(prompts) if batch else 1
        problem = _problem(body, num) if self.mode != "null" else ""
        if not problem and body.get("rid") is not None and isinstance(body["rid"], list) != batch:
            problem = "rid is not as many as the prompts"
        if problem:
            self.strange.append(problem)
            return web.json_response({"error": {"message": problem}}, status=400)
        limit = 1 if self.mode == "prefill" else body.get("sampling_params", {}).get("max_new_tokens", 3)
        sign = "P" if self.mode == "prefill" else ""

        def said(index: int, tokens: int) -> dict[str, Any]:
            info: dict[str, Any] = {"id": f"made-{index}", "completion_tokens": tokens, "prompt_tokens": 3}
            if body.get("return_logprob"):
                computed = [] if self.mode == "decode" else [[-float(at), at, None] for at in range(3)]
                info |= {"input_token_logprobs": computed, "output_token_logprobs": [[0.0, 7, None]] * tokens}
            if tokens == limit:
                info["finish_reason"] = {"type": "length", "length": limit}
            text = "".join(f"{sign}{index}.{token} " for token in range(tokens))
            return {"text": text, "output_ids": [7] * tokens, "meta_info": info}

        if not body.get("stream"):
            answers = [said(index, limit) for index in range(num)]
            return web.json_response(answers if batch else answers[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in range(limit):
            for index in range(num):
                event = {**said(index, token + 1), **({"index": index} if batch else {})}
                if self.steps is not None:
                    await self.steps.acquire()
                await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        await response.write(DONE)
        return response


def _text(text: str, chat: bool, what: str) -> dict[str, Any]:
    return {what: {"role": "assistant", "content": text}} if chat else {"text": text}


def _problem(body: dict[str, Any], num: int) -> str:
    """Why these legs would not meet: a batch needs a list of each, a single prompt may have plain values."""
    for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        said = body.get(name)
        if said is None:
            return f"a P/D server was asked without {name}"
        if isinstance(said, list) and len(said) != num:
            return f"{name} has {len(said)} values for {num} prompts"
    rooms = body["bootstrap_room"]
    if len(set(rooms if isinstance(rooms, list) else [rooms])) != (num if isinstance(rooms, list) else 1):
        return "one room for two prompts"
    return ""


def main() -> None:
    """`sglang serve --model-path MODEL --served-model-name NAME --port N ...`, until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
    args, _ = parser.parse_known_args()
    mode, port = args.disaggregation_mode, args.disaggregation_bootstrap_port
    serve(FakeSglang(mode, port, models=[args.served_model_name], port=args.port))
