"""The requests that the built-in engine serves, and its answers: `CommonFields`, and what the engine alone reads.

msgspec parses requests because it stops at the first error, in C. A library that collects all errors took 170 s for
16 MB of a mixed list, with the GIL held.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from pdlink.api.fields import BadField, Int32, SomeTokens, decoded, decoder
from pdlink.api.legs import AloneParams, AnyParams, LegParams
from pdlink.api.openai import CommonFields
from pdlink.api.sse import DONE
from pdlink.engine.request import SamplingParams
from pdlink.errors import CapacityExceeded, UnknownModel
from pdlink.serve.unserved import check_unserved
from pdlink.store.slots import DEFAULT_PRIORITY, MAX_PRIORITY, MAX_PRIORITY_S, MIN_PRIORITY, Retention

if TYPE_CHECKING:
    from pdlink.engine.forward import LoadedModel
    from pdlink.engine.request import TokenOutput

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when the client gives none, as OpenAI documents it."""
DEFAULT_CHAT_TOKENS = 256
"""The same for chat, where OpenAI has no default: a worker reserves all blocks up front, so it needs a limit."""

_MAX_STOPS = 4
"""Stop strings of a request, OpenAI's limit: each costs a search at every token."""
_MAX_STOP_TOKEN_IDS = 1024


class KVRetention(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kv_retention`: how the tiers keep the KV of this prompt."""

    priority: Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = DEFAULT_PRIORITY
    """Lower ones are evicted first."""
    duration_s: Annotated[float, Meta(gt=0, le=MAX_PRIORITY_S)] = MAX_PRIORITY_S
    """How long a priority above the default lasts."""
    ttl_s: Annotated[float, Meta(gt=0)] | None = None
    """How long it is found."""


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False
    """Padding that this worker never adds."""


class _Generation(CommonFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is served. Other fields are refused unless they say what changes nothing (`unserved.py`)."""

    unserved: ClassVar[tuple[str, ...]] = ("n", "max_output_tokens")
    """Fields of `CommonFields` that the engine does not do."""
    default_tokens: ClassVar[int]
    """Of an answer, where the client gives no number."""
    is_chat: ClassVar[bool] = False
    model: str
    max_tokens: SomeTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    stop: str | Annotated[list[str], Meta(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Int32], Meta(max_length=_MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    kv_retention: KVRetention | None = None
    kv_transfer_params: AnyParams | AloneParams | None = None
    return_token_ids: bool | None = False
    """Write each token's id into its event, as vLLM does."""
    output_token_ids: tuple[Int32, ...] = ()
    """First tokens of the answer, which the client of a stream has already: the stream goes on behind them. If it is
    greedy, as if it had not been interrupted; drawn with the same `seed`, up to what another batch changes."""

    def check(self) -> None:
        """Check what the types do not express. Raises BadField."""
        if others := {name: value for name in self.unserved if (value := getattr(self, name)) is not None}:
            check_unserved(others, (), chat=self.is_chat, greedy=self.temperature == 0)
        if self.stream_options and self.stream_options.continuous_usage_stats:
            raise BadField("stream_options.continuous_usage_stats: usage comes at the end alone; leave it out")

    def retention(self, priority_limit: int | None) -> Retention | None:
        """How the tiers keep the prompt's KV; None for one that is less urgent than `priority_limit`: not at all."""
        if priority_limit is not None and (self.priority or 0) > priority_limit:
            return None
        asked = self.kv_retention or KVRetention()
        ttl_s = float("inf") if asked.ttl_s is None else asked.ttl_s
        return Retention(priority=asked.priority, priority_s=asked.duration_s, ttl_s=ttl_s)

    def token_ids(self, model: LoadedModel) -> tuple[int, ...]:
        """The prompt. Raises InvalidRequest, CapacityExceeded."""
        raise AssertionError("every kind of request has its own prompt")

    def sampling(self) -> SamplingParams:
        """The engine's parameters. Without the client's seed, the proxy's: both legs must sample alike.

        Raises BadField for more `output_token_ids` than tokens.
        """
        max_tokens = self.max_completion_tokens or self.max_tokens or self.default_tokens
        if self.output_token_ids and not (self.stream and len(self.output_token_ids) <= max_tokens):
            raise BadField(
                f"output_token_ids: got {len(self.output_token_ids)}; expected at most max_tokens = {max_tokens}, "
                "and a stream; leave them out"
            )
        seed = self.seed
        if seed is None:
            params = self.kv_transfer_params
            seed = params.seed if isinstance(params, LegParams) else secrets.randbits(63)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed,
            stop=stop,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos or False,
        )


class CompletionRequest(_Generation, frozen=True, kw_only=True):
    unserved = ("n", "max_output_tokens", "max_completion_tokens")
    default_tokens = DEFAULT_COMPLETION_TOKENS
    prompt: msgspec.Raw
    """A string or token ids, alone or as the only item of a list: `_the_one`."""

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
        raise BadField("prompt: expected a string or a list of token ids")
    first = begin[1:].lstrip()[:1]
    if first not in (b'"', b"["):
        return decoded(prompt, _Tokens, "prompt")  # type: ignore[no-any-return]
    try:
        return decoded(prompt, _OneText if first == b'"' else _OneTokens, "prompt")[0]  # type: ignore[no-any-return]
    except BadField as error:
        if "of length 1" not in str(error):
            raise
        raise BadField("prompt: got several; expected 1; send one request for each") from None


_BEGIN_NBYTES = 64
"""Enough to find the type of a JSON value; a list that begins with more white space counts as token ids."""
_Tokens = tuple[Int32, ...]
_OneText = tuple[str]
_OneTokens = tuple[_Tokens]


class ChatRequest(_Generation, frozen=True, kw_only=True):
    is_chat = True
    default_tokens = DEFAULT_CHAT_TOKENS
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """Each with its role, and other fields for the model's chat template."""
    max_completion_tokens: SomeTokens | None = None

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str):
                raise BadField(f"messages[{index}].role: expected `str`, got {type(role).__name__}")
            _text_of(content, f"messages[{index}].content")

    def token_ids(self, model: LoadedModel) -> tuple[int, ...]:
        """The conversation through the model's chat template, as token ids."""
        if not model.tokenizer.chat_template:
            raise BadField("messages: this model has no chat template; use /v1/completions")
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
        raise BadField(f"{field}: expected `str`, got {type(content).__name__}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadField(f"{field}[{index}]: expected type 'text' with a text, got {kind!r:.100}")
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
    """What a body of POST /tokenize is read as. Raises BadField."""
    return ChatRequest if "messages" in decoded(body, dict[str, msgspec.Raw]) else CompletionRequest


def parse(kind: type[CompletionRequest] | type[ChatRequest], body: bytes, model: str) -> Generation:
    """A checked request. Raises BadField, and UnknownModel for another model."""
    request: Generation
    try:
        request = decoder(kind).decode(body)
    except (ValueError, RecursionError):
        request = _read_closely(kind, body)
    request.check()
    check_model(request.model, model)
    return request


def check_model(asked: str, served: str) -> None:
    """Raise UnknownModel for another one than this worker's."""
    if asked != served:
        raise UnknownModel(f"model {asked!r:.200} is not served here; this worker holds {served!r}")


def _read_closely(kind: type[CompletionRequest] | type[ChatRequest], body: bytes) -> Generation:
    """A request with fields that are not served but change nothing. Raises BadField, also for what is wrong."""
    fields: dict[str, msgspec.Raw] = decoded(body, dict[str, msgspec.Raw])
    known = kind.__struct_fields__
    others = {name: fields.pop(name) for name in [*fields] if name not in known}
    request: Generation = decoded(msgspec.json.encode(fields), kind)
    values = {name: decoded(raw, Any, name[:100]) for name, raw in others.items()}
    check_unserved(values, known, chat=kind.is_chat, greedy=request.temperature == 0)
    return request


class AnswerWriter:
    """Writes one answer, whole or as server-sent events. Both legs of a request write the same id and time."""

    def __init__(self, request: Generation, transfer_id: str, created: int, num_prompt_tokens: int) -> None:
        self._chat = isinstance(request, ChatRequest)
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
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
        return events + DONE

    def _sse(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        return b"data: " + msgspec.json.encode({**head, "choices": choices, **more}) + b"\n\n"
