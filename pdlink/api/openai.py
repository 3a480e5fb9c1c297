"""Requests as OpenAI's clients write them, with those of Anthropic's and SGLang's interfaces that are routed alike.

`CommonFields` has the fields that proxy and workers both read. The proxy reads no others; they pass through unchanged
to the engine.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_128

from pdlink._http import shortened
from pdlink.api.fields import BadField, Int32, Int64, NumAnswers, Tokens, decoded
from pdlink.api.session import SessionId, TimeToLive  # noqa: TC001  (msgspec reads annotations at run time)

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
"""Anthropic's."""
GENERATE = "/generate"
"""SGLang's own interface: its servers hold one model, so a request names none."""

# Input fields of which a request has one, and their JSON types by the first byte of the value.
_INPUT_FIELDS = {
    COMPLETIONS: {"prompt": (b'"[', "a string or a list")},
    CHAT: {"messages": (b"[", "a list")},
    RESPONSES: {"input": (b'"[', "a string or a list")},
    MESSAGES: {"messages": (b"[", "a list")},
    GENERATE: {"text": (b'"[', "a string or a list"), "input_ids": (b"[", "a list")},
}

_PLAIN = {COMPLETIONS: "prompt", CHAT: "messages"}
"""The one input of most requests."""

EMBEDS = "prompt_embeds"
"""Of COMPLETIONS on vLLM: beside the input, or in its place; base64 of a tensor, or a list of these."""
BYTES_PER_TOKEN = 4
"""Of a prompt in JSON; an estimate for English text."""
_TOKEN_OF_EMBEDS_NBYTES = 4096 * 2 * 4 // 3
"""Of a token in these: an estimate, of 4,096 elements with 16 bits each."""

# What stands before the input in the prompt.
_FIRST_FIELDS = {RESPONSES: "instructions", MESSAGES: "system"}

LAST_EVENTS = {
    RESPONSES: (b"response.completed", b"response.incomplete", b"response.failed", b"error"),
    MESSAGES: (b"message_stop", b"error"),
}
"""Names of the events of which one ends a stream; streams of the other routes end with [DONE]."""

KV_PARAMS = "kv_transfer_params"
_SMALL_NBYTES = 8192
"""Of a body: to read all of it twice is quicker than to read its small fields apart."""
_LONG_NBYTES = 1024
"""Of a value in a larger body, which is found natively then: msgspec goes through it byte by byte."""


class CommonFields(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Fields of a request that both proxy and workers read. Null is as if a field were left out."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    """Of CHAT, before `max_tokens`."""
    max_output_tokens: Tokens | None = None
    """Of RESPONSES."""
    seed: Int64 | None = None
    n: NumAnswers | None = None
    priority: Int32 | None = None
    """Lower is more urgent."""
    cache_salt: str | list[str] | None = None
    """Requests with different ones share no KV. A list of SGLang's, for a batch, is the engine's to judge."""
    user: str | None = None
    session_id: SessionId | None = None
    """Of an agent, whose KV is kept between its turns."""
    session_ttl_s: TimeToLive | None = None


_NULL = msgspec.Raw(b"null")
_SAID = frozenset(CommonFields.__struct_fields__)
_fields_in = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_common_in = msgspec.json.Decoder(CommonFields, strict=False).decode


class Sampling(msgspec.Struct):
    """`sampling_params` of a request to `GENERATE`."""

    max_new_tokens: Tokens | None = None
    n: NumAnswers | None = None


_ANY_SAMPLING = Sampling | list[Sampling] | None


class Call(msgspec.Struct, frozen=True, eq=False):
    """One client request, checked as far as routing needs."""

    path: str
    model: str
    streaming: bool
    seed: int | None
    """The client's own; then both legs sample with it."""
    fields: Mapping[str, msgspec.Raw]
    """The client's top level without `kv_transfer_params`, with which a client could name any address."""
    given: msgspec.Raw
    """Of these, the input: text, token ids, messages, or a list of prompts. Null if there are embeddings alone."""
    prompt: bytes
    """What it begins with, in JSON. Of embeddings a name, as long as a text of so many tokens: equal beginnings of
    their base64 say nothing."""
    said: CommonFields
    """As the client wrote it, also where `fields` are extended."""
    max_tokens: int | None = None
    """Of its answer, at most, as the client wrote it; None if it does not say."""

    @property
    def body(self) -> bytes:
        """`fields` as one JSON object."""
        return msgspec.json.encode(self.fields)

    @property
    def has_embeds(self) -> bool:
        """Whether a prompt, all or some of it, is given as embeddings in a field of their own."""
        return self.path == COMPLETIONS and not _is_null(self.fields.get(EMBEDS))

    def extended(self, more: Mapping[str, object], *, seed: int | None = None) -> Call:
        """The same request with these fields; seed: if they hold one."""
        fields = {**self.fields, **{name: msgspec.Raw(msgspec.json.encode(value)) for name, value in more.items()}}
        return msgspec.structs.replace(self, fields=fields, seed=self.seed if seed is None else seed)

    def with_params(self, params: object) -> bytes:
        """The body with `kv_transfer_params`."""
        return msgspec.json.encode({**self.fields, KV_PARAMS: params})


_SEVERAL = re.compile(rb'\[\s*["\[]')


def has_several(prompt: msgspec.Raw | bytes) -> bool:
    """Whether this JSON is a list of texts or of lists of token ids."""
    return _SEVERAL.match(prompt) is not None


def parse(path: str, data: bytes, model: str | None = None) -> Call:
    """Raises BadField unless it is a JSON object with the fields that every request needs. model: of a request to
    `GENERATE` that names none."""
    try:
        if len(data) >= _SMALL_NBYTES and (found := _long(data)) is not None:
            fields, said = found
        else:
            fields = _fields_in(data)
            said = _common_in(data if len(data) < _SMALL_NBYTES else _small(fields))
    except (ValueError, RecursionError):  # to say what is wrong takes longer
        fields = decoded(data, dict[str, msgspec.Raw])
        said = said_in(data, fields)
    if path == GENERATE:
        raw, sampling = fields.get("sampling_params"), None
        if raw is not None:
            sampling = decoded(raw, _ANY_SAMPLING, "sampling_params", strict=False)
        most = sampling.max_new_tokens if isinstance(sampling, Sampling) else None
        model = said.model or model
    else:
        most = said.max_output_tokens if path == RESPONSES else said.max_tokens
        if path == CHAT:
            most = said.max_completion_tokens or most
        model = said.model
    if model is None:
        raise BadField("model: missing; expected the name of a model that GET /v1/models lists", "model")
    known = _INPUT_FIELDS[path]
    given, number, plain = _NULL, 0, _PLAIN.get(path)
    if plain is not None and (raw := fields.get(plain)) is not None and memoryview(raw)[0] in known[plain][0]:
        given, number = raw, 1  # no copy of a long prompt
    for name in known if not number else ():
        raw = fields.get(name)
        if raw is None or (path in (COMPLETIONS, GENERATE) and _is_null(raw)):
            continue
        given, number = raw, number + 1
        if number == 1 and memoryview(raw)[0] not in known[name][0]:  # no copy of a long prompt
            raise BadField(f"{name}: expected {known[name][1]}", name)
    embeds = EMBEDS in fields and path == COMPLETIONS and not _is_null(fields[EMBEDS])
    if embeds and not number:
        number = 1
    if number != 1:
        names = " or ".join(known)
        raise BadField(f"{names}: got {number} of these fields, expected one", next(iter(known)))
    if embeds:
        prompt = _stand_in([fields[name] for name in (EMBEDS, "prompt") if name in fields])
    elif path in _FIRST_FIELDS and (first := fields.get(_FIRST_FIELDS[path])) is not None:
        prompt = bytes(first) + bytes(given)
    else:
        prompt = bytes(given)
    fields.pop(KV_PARAMS, None)
    return Call(path, model, said.stream or False, said.seed, fields, given, prompt, said, most)


def _long(data: bytes) -> tuple[dict[str, msgspec.Raw], CommonFields] | None:
    """What a long body says; None unless it has each field once, and only others than the common ones are long."""
    if (found := shortened(data, _LONG_NBYTES)) is None:
        return None
    small, num, longs = found
    fields = _fields_in(small)
    if len(fields) != num or not _SAID.isdisjoint(longs):
        return None
    for name, value in longs.items():
        fields[name] = msgspec.Raw(value)
    return fields, _common_in(small)


def said_in(data: bytes, fields: Mapping[str, msgspec.Raw]) -> CommonFields:
    """The small fields of a body, which has these fields. Numbers in quotes are taken as vLLM takes them. Raises
    BadField."""
    said: CommonFields = decoded(data if len(data) < _SMALL_NBYTES else _small(fields), CommonFields, strict=False)
    return said


def _small(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """An object with the small ones of these fields."""
    return msgspec.json.encode({name: fields[name] for name in _SAID.intersection(fields)})


def _is_null(raw: msgspec.Raw | None) -> bool:
    """Or absent."""
    return raw is None or bytes(memoryview(raw)[:4]) == b"null"


def _stand_in(raws: list[msgspec.Raw]) -> bytes:
    name, nbytes = xxh3_128(), 0
    for raw in raws:
        name.update(memoryview(raw))
        nbytes += memoryview(raw).nbytes
    num_tokens = nbytes // _TOKEN_OF_EMBEDS_NBYTES + 1
    word = name.hexdigest().encode()
    return word * -(-num_tokens * BYTES_PER_TOKEN // len(word))


def sampling_of(call: Call) -> Sampling:
    """Of a request to `GENERATE`; empty for a list of them."""
    raw = call.fields.get("sampling_params")
    found = decoded(raw, _ANY_SAMPLING, strict=False) if raw is not None else None
    return found if isinstance(found, Sampling) else Sampling()
