"""The OpenAI request and response shapes of a worker: parse, check, and write answers."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdlink.engine.request import SamplingParams
from pdlink.errors import InvalidRequest, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.errors import PdlinkError

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when the client gives none, as OpenAI documents it."""
DEFAULT_CHAT_TOKENS = 256
"""The same for chat, where OpenAI sets no limit: all blocks are reserved up front, so there has to be one."""

MAX_MESSAGE_CHARS = 2000
MAX_TRANSFER_ID_CHARS = 128


class _Shape(BaseModel):
    """Unknown fields are ignored, as clients of this interface expect; known ones must have the right type."""

    model_config = ConfigDict(strict=True, extra="ignore")


class PrefillAddress(_Shape):
    name: str
    control: str


class TransferParams(_Shape):
    """`kv_transfer_params`, written by the proxy for one leg of one attempt."""

    transfer_id: Annotated[str, Field(min_length=1, max_length=MAX_TRANSFER_ID_CHARS)]
    leg: Literal["prefill", "decode"]
    seed: int
    created: int
    prefill: PrefillAddress | None = None
    """Where the KV comes from; on the decode leg."""


class _Generation(_Shape):
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: Literal[1] | None = 1
    logprobs: Literal[False, 0] | None = None
    cache_salt: str = ""
    kv_transfer_params: TransferParams | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    def limit(self) -> int:
        """Tokens to generate."""
        raise AssertionError("every kind of request has its own limit")

    def sampling(self) -> SamplingParams:
        """What the engine needs. Without a seed of the client, the proxy's is taken, so that both legs agree."""
        seed = self.seed
        if seed is None:
            seed = self.kv_transfer_params.seed if self.kv_transfer_params else secrets.randbits(63)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=self.limit(),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(_Generation):
    prompt: str | list[int] | list[str] | list[list[int]]
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = 1
    suffix: Literal[""] | None = None

    def limit(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    def token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The one prompt of this request as token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) != 1:
                raise InvalidRequest(f"prompt: one prompt per request, got {len(prompt)}; send them one by one")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return tuple(tokenizer.encode(prompt))
        return tuple(prompt)


class _Message(_Shape):
    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | None = None


class ChatRequest(_Generation):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens or DEFAULT_CHAT_TOKENS

    def token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The conversation through the model's chat template, as token ids."""
        if not tokenizer.chat_template:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions")
        text = tokenizer.apply_chat_template(
            [message.model_dump(exclude_none=True) for message in self.messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        return tuple(tokenizer.encode(text, add_special_tokens=False))


Generation = CompletionRequest | ChatRequest


def parse(kind: type[CompletionRequest] | type[ChatRequest], body: bytes, model: str) -> Generation:
    """A checked request. Raises InvalidRequest naming the field, UnknownModel if it is for another model."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(data).__name__}")
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest("; ".join(_explain(item) for item in error.errors()[:3])) from None
    if request.model != model:
        raise UnknownModel(f"model {request.model!r} is not served here; this worker holds {model!r}")
    return request


def _explain(item: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in item["loc"] if isinstance(part, int) or part.isidentifier())
    value = item.get("input")
    shown = f", got {value!r}" if isinstance(value, str | int | float | bool) and len(repr(value)) < 100 else ""
    return f"{where}: {item['msg']}{shown}"


def error_body(error: PdlinkError) -> dict[str, Any]:
    """The OpenAI error object for one of our errors."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    message = str(error)[:MAX_MESSAGE_CHARS]  # it may quote the request
    return {"error": {"message": message, "type": kind, "param": None, "code": error.code}}


class Answer:
    """Writes one answer, whole or as server-sent events. Both legs of a request write the same id and times."""

    def __init__(self, request: Generation, transfer_id: str, created: int, num_prompt_tokens: int) -> None:
        self._chat = isinstance(request, ChatRequest)
        self._include_usage = request.include_usage
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + transfer_id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": created,
            "model": request.model,
        }
        self._num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._text: list[str] = []
        self._finish_reason: str | None = None

    def add(self, text: str, num_cached_tokens: int, finish_reason: str | None) -> None:
        """One more token."""
        self.num_tokens += 1
        self.num_cached_tokens = num_cached_tokens
        self._finish_reason = finish_reason
        self._text.append(text)

    def whole(self) -> dict[str, Any]:
        """The JSON of an answer that is not streamed."""
        text = "".join(self._text)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {**self._head, "choices": [choice], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self._num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def event(self) -> bytes:
        """The newest token as an event. The first one holds exactly token 0, with chat's role beside its text."""
        if self._chat:
            delta = {"content": self._text[-1]}
            if self.num_tokens == 1:
                delta = {"role": "assistant", **delta}
            return self._sse([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])
        return self._sse([{"index": 0, "text": self._text[-1], "logprobs": None, "finish_reason": None}])

    def last_events(self) -> bytes:
        """What closes a stream: the finish reason, the usage if it was asked for, and [DONE]."""
        body: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        events = self._sse([{"index": 0, **body, "logprobs": None, "finish_reason": self._finish_reason}])
        if self._include_usage:
            events += self._sse([], usage=self.usage())
        return events + b"data: [DONE]\n\n"

    def _sse(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        return b"data: " + msgspec.json.encode({**head, "choices": choices, **more}) + b"\n\n"
