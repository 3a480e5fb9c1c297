"""A vLLM server as the proxy sees it, after the sources of vLLM 0.32: entrypoints/openai/{completion,
chat_completion}, entrypoints/serve/instrumentator/health.py and kv_connector/v1/nixl. No connector and no model:
tokens are counted out.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from tests.proxy.fakes import DONE, FakeServer, Received, abort, serve

HELD = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_port": 18446744073709551615,
}
"""What a prefill server with NixlConnector hands out; the number is one that a careless JSON library rounds."""


@dataclass
class FakeVllm(FakeServer):
    """One server. Texts of a prefill leg begin with "P", so that one that reaches a client is seen."""

    connector: str = "pdlink"
    """Or "nixl"."""
    models: list[str] = field(default_factory=lambda: ["m"])
    api_key: str = ""
    metrics: str = ""
    """What it answers to GET /metrics."""
    cached_tokens: int | None = None
    """Told in the usage, as with --enable-prompt-tokens-details."""
    dead: bool = False
    """The engine has died; the API server answers 503."""
    fail_with: int | None = None
    misreads: int | None = None
    """Answer this status to a prefill leg that must call a tool, when its token is computed: it is no call yet."""
    words: str = ""
    """It adds these to each token, as a worker that computes something else."""
    resets: int = 0
    """Close the connections of this many requests without a byte of answer."""
    gate: asyncio.Event | None = None
    """Waited for before the first byte of an answer."""
    kv_gate: asyncio.Event | None = None
    """The same for decode legs whose KV is to come from a prefill leg."""
    error_at: int | None = None
    """Send an error event in place of this token, then [DONE], as vLLM does when its engine fails."""
    break_at: int | None = None
    """Close the connection in place of this token."""
    wait_at: dict[int, asyncio.Event] = field(default_factory=dict)
    answer_override: bytes | None = None
    stream_override: list[bytes] | None = None
    """Events of its streams, each sent by itself, in place of its own."""
    says_at_end: bool = False
    """A stream's last event has `kv_transfer_params`, as of vLLM 0.33."""
    kv_path: str = ""
    """What decode's PDLinkConnector says of a request with a transfer."""
    source: dict[str, Any] = field(default_factory=dict)
    """What it says of where its KV came from."""
    has_named: bool = True
    """It has the routes whose streams have named events (`NamedAnswer`)."""
    keeps_no_kv: bool = False
    """NixlConnector had nothing to hand out."""
    models_asked: int = 0
    version: str = "0.32.0"
    """Of GET /version; empty for a server without that route."""

    def routes(self) -> list[web.RouteDef]:
        asked = ["/v1/completions", "/v1/chat/completions"]
        if self.has_named:
            asked += ["/v1/responses", "/v1/messages"]
        found = [web.get("/health", self._health), web.get("/v1/models", self._models)]
        found += [web.get("/metrics", self._metrics), web.get("/version", self._version)]
        found += [web.post(path, self.generate) for path in asked]
        return found

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": self.version}) if self.version else _error(404, "Not Found")

    async def _models(self, request: web.Request) -> web.Response:
        self.models_asked += 1
        if not self._may_enter(request):
            return _error(401, "Unauthorized")
        return _json({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    def _may_enter(self, request: web.Request) -> bool:
        return not self.api_key or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        body = received.body
        if not self._may_enter(request):
            return _error(401, "Unauthorized")
        if problem := _problem(body):
            return _error(400, problem)
        if self.gate is not None:
            await self.gate.wait()
        if self.kv_gate is not None and (body.get("kv_transfer_params") or {}).get("leg") == "decode":
            await self.kv_gate.wait()
        if self.resets:
            self.resets -= 1
            abort(request)
        if self.fail_with is not None:
            return _error(self.fail_with, "Internal server error")
        named = request.path in ("/v1/responses", "/v1/messages")
        answer = NamedAnswer(self, request, body) if named else Answer(self, request, body)
        if self.misreads is not None and answer.is_prefill and body.get("tool_choice", "auto") != "auto":
            return _error(self.misreads, "Invalid JSON: EOF while parsing a list")
        if not body.get("stream"):
            return web.Response(body=self.answer_override or answer.whole(), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.stream_override is not None:
            for event in self.stream_override:
                await response.write(event)
                await asyncio.sleep(0.01)
            return response
        for event in answer.opening():
            await response.write(event)
        for token in range(answer.limit):
            if token in self.wait_at:
                await self.wait_at[token].wait()
            if token == self.break_at:
                abort(request)
            if token == self.error_at:
                await response.write(answer.failure())
                return response
            for event in answer.events(token):
                await response.write(event)
        await response.write(answer.closing())
        return response


class Answer:
    def __init__(self, server: FakeVllm, request: web.Request, body: dict[str, Any]) -> None:
        self.chat = "chat" in request.path
        params = body.get("kv_transfer_params") or {}
        self.is_prefill = bool(params.get("do_remote_decode") or params.get("leg") == "prefill")
        self.is_decode = params.get("leg") == "decode"
        limit = (
            body.get("max_completion_tokens", body.get("max_tokens", 3)) if self.chat else body.get("max_tokens", 3)
        )
        self.limit: int = body.get("max_output_tokens", limit)
        prompts = _prompts(body)
        self.num_prompt_tokens = sum(map(len, prompts))
        self.num_choices = body.get("n", 1) * len(prompts)
        request_id = request.headers.get("X-Request-Id", "made-here")
        self.head = {"id": ("chatcmpl-" if self.chat else "cmpl-") + request_id, "created": 1, "model": body["model"]}
        self.include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.logprobs = body.get("logprobs")
        self.server = server

    def text(self, choice: int, token: int) -> str:
        return f"{'P' if self.is_prefill else ''}{choice}.{token} {self.server.words}"

    def usage(self) -> dict[str, Any]:
        done = self.num_choices * self.limit
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + done,
        }
        usage["completion_tokens"] = done
        if self.server.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.server.cached_tokens}
        return usage

    def whole(self) -> bytes:
        choices: list[dict[str, Any]] = []
        for index in range(self.num_choices):
            text = "".join(self.text(index, token) for token in range(self.limit))
            said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            logprobs = {"token_logprobs": [-0.5] * self.limit} if self.logprobs else None
            choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": "length"})
        kind = "chat.completion" if self.chat else "text_completion"
        return msgspec.json.encode(
            {**self.head, "object": kind, "choices": choices, "usage": self.usage(), **self.handed()}
        )

    def handed(self) -> dict[str, Any]:
        handed: dict[str, Any] | None
        handed = HELD if self.is_prefill and self.server.connector == "nixl" and not self.server.keeps_no_kv else None
        if self.server.kv_path and self.is_decode:
            handed = {"pdlink_kv": self.server.kv_path}
        if self.server.source and (self.is_prefill or self.is_decode):
            handed = {**(handed or {}), "pdlink_source": self.server.source}
        return {"kv_transfer_params": handed}

    def opening(self) -> list[bytes]:
        """Chat begins with the role, once per choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._event({"index": i, "delta": delta}) for i in range(self.num_choices) if self.chat]

    def events(self, token: int) -> list[bytes]:
        last = token == self.limit - 1
        out = []
        for index in range(self.num_choices):
            text = self.text(index, token)
            said = {"delta": {"content": text}} if self.chat else {"text": text}
            logprobs = {"token_logprobs": [-0.5]} if self.logprobs else None
            more = self.handed() if last and self.server.says_at_end else {}
            choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": "length" * last or None}
            out.append(self._event(choice, **more))
        return out

    def closing(self) -> bytes:
        if not self.include_usage:
            return DONE
        return b"data: " + msgspec.json.encode({**self.head, "choices": [], "usage": self.usage()}) + b"\n\n" + DONE

    def failure(self) -> bytes:
        error = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
        return b"data: " + msgspec.json.encode(error) + b"\n\n" + DONE

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**self.head, "choices": [choice], **more}) + b"\n\n"


class NamedAnswer(Answer):
    """Of /v1/responses and /v1/messages (entrypoints/openai/responses, entrypoints/anthropic)."""

    def __init__(self, server: FakeVllm, request: web.Request, body: dict[str, Any]) -> None:
        super().__init__(server, request, body)
        self.messages = request.path == "/v1/messages"
        self.name = ("msg_" if self.messages else "resp_") + request.headers.get("X-Request-Id", "made-here")

    def usage(self) -> dict[str, Any]:
        cached = self.server.cached_tokens or 0
        if self.messages:
            read = {"cache_read_input_tokens": cached} if self.server.cached_tokens is not None else {}
            return {"input_tokens": self.num_prompt_tokens - cached, "output_tokens": self.limit, **read}
        details = {"cached_tokens": cached, "input_tokens_per_turn": []}
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": self.limit,
            "total_tokens": self.num_prompt_tokens + self.limit,
        }

    def document(self, *, whole: bool) -> dict[str, Any]:
        text = "".join(self.text(0, token) for token in range(self.limit)) if whole else ""
        said: dict[str, Any]
        if self.messages:
            said = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": text}]}
        else:
            content = [{"type": "output_text", "text": text}]
            said = {"object": "response", "output": [{"type": "message", "content": content}], "error": None}
        return {"id": self.name, "model": self.head["model"], **said, "usage": self.usage()}

    def whole(self) -> bytes:
        return msgspec.json.encode({**self.document(whole=True), **self.handed()})

    def opening(self) -> list[bytes]:
        if self.messages:
            return [_named("message_start", message=self.document(whole=False))]
        return [_named("response.created", response=self.document(whole=False))]

    def events(self, token: int) -> list[bytes]:
        text = self.text(0, token)
        if self.messages:
            return [_named("content_block_delta", index=0, delta={"type": "text_delta", "text": text})]
        return [_named("response.output_text.delta", delta=text)]

    def closing(self) -> bytes:
        if self.messages:
            return _named("message_delta", delta={}, usage=self.usage()) + _named("message_stop")
        return _named("response.completed", response={**self.document(whole=True), **self.handed()})

    def failure(self) -> bytes:
        return _named("error", error={"type": "internal_error", "message": "Internal server error"})


def _named(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode({"type": name, **fields}) + b"\n\n"


def _prompts(body: dict[str, Any]) -> list[Any]:
    if "input" in body:
        return [body["input"]]
    if "messages" in body:
        return ["".join(message["content"] for message in body["messages"])]
    found: list[Any] = []
    for prompt in (body.get("prompt_embeds"), body.get("prompt")):  # in the order of the answers
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            found += prompt
        elif prompt is not None:
            found.append(prompt)
    return found


def _problem(body: dict[str, Any]) -> str:
    """What vLLM answers 400 to, as far as a proxy could cause it."""
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and body.get("min_tokens", 0) > limit:
        return f"min_tokens must be less than or equal to max_tokens={limit}"
    if body.get("stream_options") and not body.get("stream"):
        return "Stream options can only be defined when `stream=True`."
    thinking, params = body.get("thinking") or {}, body.get("kv_transfer_params") or {}
    if thinking and thinking["budget_tokens"] >= body.get("max_tokens", 1) and not params.get("do_remote_decode"):
        return "thinking.budget_tokens must be less than max_tokens"
    if body.get("temperature", 1) < 0:
        return "temperature must be non-negative"
    return ""


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "type": "X", "param": None, "code": status}}, status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def main() -> None:
    """`vllm serve MODEL --served-model-name NAME --port N ...`, until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", type=msgspec.json.decode)
    args, _ = parser.parse_known_args()
    connector = "nixl" if args.kv_transfer_config["kv_connector"].startswith("Nixl") else "pdlink"
    serve(FakeVllm(connector, models=[args.served_model_name], port=args.port))
