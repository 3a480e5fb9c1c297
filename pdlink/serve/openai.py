"""The OpenAI requests and answers of a worker: parse, check, write.

msgspec parses requests because it stops at the first error, in C. A library that collects all errors took 170 s for
16 MB of a mixed list, with the GIL held.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pdlink.engine.request import SamplingParams
from pdlink.errors import CapacityExceeded, InvalidRequest, UnknownModel
from pdlink.serve.unserved import check_unserved
from pdlink.store.turns import DEFAULT_PRIORITY, MAX_PRIORITY, MAX_PRIORITY_S, MIN_PRIORITY, Retention

if TYPE_CHECKING:
    from pdlink.engine.models import LoadedModel
    from pdlink.engine.request import TokenOutput
    from pdlink.errors import PdlinkError

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when the client gives none, as OpenAI documents it."""
DEFAULT_CHAT_TOKENS = 256
"""The same for chat, where OpenAI has no default: a worker reserves all blocks up front, so it needs a limit."""

MAX_STOPS = 4
"""Stop strings of a request, OpenAI's limit: each costs a search at every token."""
MAX_STOP_TOKEN_IDS = 1024
MAX_MESSAGE_CHARS = 2000
MAX_TRANSFER_ID_CHARS = 128


_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class PrefillAddress(Struct, frozen=True):
    name: str
    control: str


class TransferParams(Struct, frozen=True, kw_only=True):
    """`kv_transfer_params`, written by the proxy for one leg of one attempt."""

    transfer_id: Annotated[str, Meta(min_length=1, max_length=MAX_TRANSFER_ID_CHARS)]
    leg: Literal["prefill", "decode"]
    seed: _Int64
    created: _Int64
    prefill: PrefillAddress | None = None
    """The source of the KV; on the decode leg."""


class KVRetention(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kv_retention`: how the tiers keep the KV of this prompt."""

    priority: Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = DEFAULT_PRIORITY
    """Lower ones are evicted first."""
    duration_s: Annotated[float, Meta(gt=0, le=MAX_PRIORITY_S)] = MAX_PRIORITY_S
    """How long a priority above the default lasts."""
    ttl_s: Annotated[float, Meta(gt=0)] | None = None
    """How long it is found."""


_NumTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False
    """Padding that this worker never adds."""


class _Generation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is served. Other fields are refused unless they say what changes nothing (`unserved.py`)."""

    model: str
    max_tokens: _NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    seed: _Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Int32] | None = None
    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: _Int32 | None = 1
    logprobs: bool | _Int32 | None = None
    cache_salt: str | None = ""
    priority: _Int32 | None = 0
    """Lower is more urgent."""
    kv_retention: KVRetention | None = None
    kv_transfer_params: TransferParams | None = None
    return_token_ids: bool | None = False
    """Write each token's id into its event, as vLLM does."""
    output_token_ids: tuple[_Int32, ...] = ()
    """First tokens of the answer, which the client of a stream has already: the stream goes on behind them. If it is
    greedy, as if it had not been interrupted; drawn with the same `seed`, up to what another batch changes."""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Check limits that the types do not express. Raises InvalidRequest."""
        for name, given, limit in (
            ("stop", self.stop if isinstance(self.stop, list) else (), MAX_STOPS),
            ("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKEN_IDS),
        ):
            if len(given) > limit:
                raise InvalidRequest(f"{name}: got {len(given)}; limit {limit}; send fewer")
        if self.stream_options and self.stream_options.continuous_usage_stats:
            raise InvalidRequest("stream_options.continuous_usage_stats: usage comes at the end alone; leave it out")
        if self.n not in (None, 1):
            raise InvalidRequest(f"n: got {self.n}; expected 1; send the request {self.n} times")
        if self.output_token_ids and not (self.stream and len(self.output_token_ids) <= self.limit()):
            raise InvalidRequest(
                f"output_token_ids: got {len(self.output_token_ids)}; limit max_tokens = {self.limit()}, "
                "and a stream; leave them out"
            )
        if self.logprobs:
            raise InvalidRequest(f"logprobs: got {self.logprobs}; this worker computes none; leave it out")

    def retention(self, priority_limit: int | None) -> Retention | None:
        """How the tiers keep the prompt's KV; None for one that is less urgent than `priority_limit`: not at all."""
        if priority_limit is not None and (self.priority or 0) > priority_limit:
            return None
        asked = self.kv_retention or KVRetention()
        ttl_s = float("inf") if asked.ttl_s is None else asked.ttl_s
        return Retention(priority=asked.priority, priority_s=asked.duration_s, ttl_s=ttl_s)

    def limit(self) -> int:
        """Tokens to generate."""
        raise AssertionError("every kind of request has its own limit")

    def token_ids(self, model: LoadedModel) -> tuple[int, ...]:
        """The prompt. Raises InvalidRequest, CapacityExceeded."""
        raise AssertionError("every kind of request has its own prompt")

    def sampling(self) -> SamplingParams:
        """The engine's parameters. Without the client's seed, the proxy's: both legs must sample alike."""
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
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos or False,
        )


class CompletionRequest(_Generation, frozen=True, kw_only=True):
    prompt: msgspec.Raw
    """A string or token ids, alone or as the only item of a list: `_the_one`."""
    echo: bool | None = False
    best_of: _Int32 | None = 1
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        for name, given, usual in (
            ("echo", self.echo, False),
            ("best_of", self.best_of, 1),
            ("suffix", self.suffix, ""),
        ):
            if given not in (None, usual):
                raise InvalidRequest(f"{name}: got {given!r:.100}; only {usual!r} is served; leave it out")

    def limit(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    def token_ids(self, model: LoadedModel) -> tuple[int, ...]:
        """The one prompt of this request as token ids."""
        prompt = _the_one(self.prompt)
        return _tokenized(prompt, model) if isinstance(prompt, str) else prompt


def _the_one(prompt: msgspec.Raw) -> str | tuple[int, ...]:
    """A text or token ids, alone or as the only item of a list.

    The first bytes choose the type to decode, so a wrong type is found at the first item.
    """
    begin = bytes(memoryview(prompt)[:_BEGIN_NBYTES])
    if begin.startswith(b'"'):
        return decoded(prompt, str, "prompt")  # type: ignore[no-any-return]
    if not begin.startswith(b"["):
        raise InvalidRequest("prompt: expected a string or a list of token ids")
    first = begin[1:].lstrip()[:1]
    if first not in (b'"', b"["):
        return decoded(prompt, _Tokens, "prompt")  # type: ignore[no-any-return]
    try:
        return decoded(prompt, _OneText if first == b'"' else _OneTokens, "prompt")[0]  # type: ignore[no-any-return]
    except InvalidRequest as error:
        if "of length 1" not in str(error):
            raise
        raise InvalidRequest("prompt: got several; expected 1; send one request for each") from None


_BEGIN_NBYTES = 64
"""Enough to find the type of a JSON value; a list that begins with more white space counts as token ids."""
_Tokens = tuple[_Int32, ...]
_OneText = tuple[str]
_OneTokens = tuple[_Tokens]


class ChatRequest(_Generation, frozen=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """Each with its role, and other fields for the model's chat template."""
    max_completion_tokens: _NumTokens | None = None

    def limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens or DEFAULT_CHAT_TOKENS

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str):
                raise InvalidRequest(f"messages[{index}].role: expected `str`, got {type(role).__name__}")
            _text_of(content, f"messages[{index}].content")

    def token_ids(self, model: LoadedModel) -> tuple[int, ...]:
        """The conversation through the model's chat template, as token ids."""
        if not model.tokenizer.chat_template:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions")
        messages = [
            {key: value for key, value in message.items() if value is not None and key != "content"}
            | ({"content": _text_of(message["content"])} if message.get("content") is not None else {})
            for message in self.messages
        ]
        _check_length("messages", sum(len(message.get("content", "")) for message in messages), model)
        text = model.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
        )
        return _tokenized(text, model, field="messages", add_special_tokens=False)


def _text_of(content: Any, field: str = "") -> str:
    """A text, or its parts with a line each, as vLLM joins them. Raises InvalidRequest for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{field}: expected `str`, got {type(content).__name__}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{field}[{index}]: expected type 'text' with a text, got {kind!r:.100}")
    return "\n".join(part["text"] for part in content)


Generation = CompletionRequest | ChatRequest


def _tokenized(text: str, model: LoadedModel, field: str = "prompt", **options: Any) -> tuple[int, ...]:
    _check_length(field, len(text), model)
    return tuple(model.tokenizer.encode(text, **options))


def _check_length(field: str, num_chars: int, model: LoadedModel) -> None:
    """Refuse a text too long for any tokens, before tokenising it: that takes 1 to 3 s a megabyte."""
    limit = model.max_tokens * model.longest_token
    if num_chars > limit:
        raise CapacityExceeded(
            f"{field}: got {num_chars} characters; this worker serves at most {model.max_tokens} tokens, "
            f"which hold no more than {limit} characters; send a shorter text"
        )


def tokenized_as(body: bytes) -> type[CompletionRequest] | type[ChatRequest]:
    """What a body of POST /tokenize is read as. Raises InvalidRequest."""
    return ChatRequest if "messages" in decoded(body, dict[str, msgspec.Raw]) else CompletionRequest


def parse(kind: type[CompletionRequest] | type[ChatRequest], body: bytes, model: str) -> Generation:
    """A checked request. Raises InvalidRequest with the field, UnknownModel for another model."""
    request: Generation
    try:
        request = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        request = _read_closely(kind, body)
    request.check()
    check_model(request.model, model)
    return request


def check_model(asked: str, served: str) -> None:
    """Raise UnknownModel for another one than this worker's."""
    if asked != served:
        raise UnknownModel(f"model {asked!r:.200} is not served here; this worker holds {served!r}")


def _read_closely(kind: type[CompletionRequest] | type[ChatRequest], body: bytes) -> Generation:
    """A request with fields that are not served but change nothing. Raises InvalidRequest, also for what is wrong."""
    fields: dict[str, msgspec.Raw] = decoded(body, dict[str, msgspec.Raw])
    known = kind.__struct_fields__
    others = {name: fields.pop(name) for name in [*fields] if name not in known}
    request: Generation = decoded(msgspec.json.encode(fields), kind)
    values = {name: decoded(raw, Any, name[:100]) for name, raw in others.items()}
    check_unserved(values, known, chat=kind is ChatRequest, greedy=request.temperature == 0)
    return request


_SHOWN_NBYTES = 64 * 1024
"""JSON up to this size is parsed again to show the wrong value."""


def decoded(data: bytes | msgspec.Raw, kind: Any, field: str = "") -> Any:
    """The value of this JSON. field: its name in the request; empty for the body. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_explain(str(error), data, field)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field or 'the body'}: not valid JSON: {error}") from None


def _explain(problem: str, data: bytes | msgspec.Raw, field: str) -> str:
    """msgspec's "Expected X - at `$.path`" as "path: Expected X, got VALUE"."""
    what, _, path = problem.partition(" - at `$")
    path = path.rstrip("`")
    shown = ""
    if path and ", got " not in what and len(memoryview(data)) <= _SHOWN_NBYTES:
        with contextlib.suppress(msgspec.DecodeError):  # a number too large for any type
            value = msgspec.json.decode(data)
            for key in re.findall(r"[^.\[\]]+", path):
                value = value[int(key)] if isinstance(value, list) else value[key]
            shown = f", got {value!r}" if isinstance(value, str | int | float) and len(repr(value)) < 100 else ""
    return f"{(field + path).lstrip('.') or 'the body'}: {what}{shown}"


def error_body(error: PdlinkError) -> dict[str, Any]:
    """The OpenAI error object for one of our errors."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    message = str(error)[:MAX_MESSAGE_CHARS]  # it may quote the request
    return {"error": {"message": message, "type": kind, "param": None, "code": error.code}}


class Answer:
    """Writes one answer, whole or as server-sent events. Both legs of a request write the same id and time."""

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
        self._token_ids: list[int] | None = [] if request.return_token_ids else None
        self.num_tokens = len(request.output_token_ids)
        """Of the answer, with the tokens that the client had before."""
        self.num_cached_tokens = 0
        self._text: list[str] = []
        self._finish_reason: str | None = None

    def add(self, token: TokenOutput) -> None:
        """One more token."""
        self.num_tokens += 1
        self.num_cached_tokens = token.num_cached_tokens
        self._finish_reason = token.finish_reason
        self._text.append(token.text)
        if self._token_ids is not None:
            self._token_ids.append(token.token_id)

    def end(self, finish_reason: str) -> None:
        """There are no more tokens."""
        self._finish_reason = finish_reason

    def whole(self) -> dict[str, Any]:
        """The JSON of a whole answer."""
        text = "".join(self._text)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._finish_reason}
        if self._token_ids is not None:
            choice["token_ids"] = self._token_ids
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
        """The newest token as an event. The first event has exactly token 0, and chat's role."""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            delta = {"content": self._text[-1]}
            choice["delta"] = {"role": "assistant", **delta} if self.num_tokens == 1 else delta
        else:
            choice["text"] = self._text[-1]
        choice |= {"logprobs": None, "finish_reason": None}
        if self._token_ids is not None:
            choice["token_ids"] = [self._token_ids[-1]]
        return self._sse([choice])

    def last_events(self) -> bytes:
        """The end of a stream: the finish reason, the usage if asked for, and [DONE]."""
        body: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        events = self._sse([{"index": 0, **body, "logprobs": None, "finish_reason": self._finish_reason}])
        if self._include_usage:
            events += self._sse([], usage=self.usage())
        return events + b"data: [DONE]\n\n"

    def _sse(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        return b"data: " + msgspec.json.encode({**head, "choices": choices, **more}) + b"\n\n"
