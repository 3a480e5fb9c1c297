"""Requests and errors as OpenAI's clients write and read them.

Only the top level of a client's JSON is parsed (msgspec: 1.1 us for 88 bytes and 37 us for 4096 token ids; json: 24
and 734 us; measured on 2 cores). Unknown fields pass through unchanged to the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from xxhash import xxh3_128

from pdlink import errors
from pdlink.api.bounds import Count, OutOfRange, Priority, Seed, Tokens, check_numbers, check_sampling
from pdlink.api.sse import DONE, fails
from pdlink.errors import InvalidRequest, PdlinkError

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
LIMITS = {COMPLETIONS: ("max_tokens",), CHAT: ("max_completion_tokens", "max_tokens")} | {
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}

LAST_EVENTS = {
    RESPONSES: (b"response.completed", b"response.incomplete", b"response.failed", b"error"),
    MESSAGES: (b"message_stop", b"error"),
}
"""Names of the events of which one ends a stream; streams of the other routes end with [DONE]."""

KV_PARAMS = "kv_transfer_params"
_MAX_MESSAGE_CHARS = 2000
_SMALL_NBYTES = 8192
"""Of a body: a copy of it is quicker than a view."""


# A decoder is made once: each call of `msgspec.json.decode` with such a type works it out anew.
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUES: dict[type, msgspec.json.Decoder[Any]] = {
    str: msgspec.json.Decoder(str | None),
    bool: msgspec.json.Decoder(bool | None),
    int: msgspec.json.Decoder(int | None),
}


class Said(msgspec.Struct, gc=False):
    """Small fields that placement reads, of a request in which all of them are of their types."""

    model: str | None = None
    stream: bool | None = None
    seed: Seed | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    cache_salt: str | None = None
    user: str | None = None
    priority: Priority | None = None


_SAID = msgspec.json.Decoder(Said)


class BadField(InvalidRequest):
    """An invalid request body, or one invalid field of it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Call(msgspec.Struct, frozen=True, eq=False):
    """One client request, checked as far as routing needs."""

    path: str
    model: str
    streaming: bool
    seed: int | None
    """The client's own; then both legs sample with it."""
    fields: Mapping[str, msgspec.Raw]
    """The client's top level without `kv_transfer_params`, with which a client could name any address."""
    body: bytes
    """`fields` as one JSON object."""
    said: Said | None = None
    """None where a field is of another type or has been changed, and of long bodies: then `fields` are read."""

    @property
    def prompt(self) -> bytes:
        """What it begins with, in JSON: text, token ids, messages, or a list of prompts. Of embeddings a name, as
        long as a text of so many tokens: equal beginnings of their base64 say nothing."""
        if self.has_embeds:
            return _stand_in([self.fields[name] for name in (EMBEDS, "prompt") if name in self.fields])
        if (plain := _PLAIN.get(self.path)) is not None:
            return bytes(self.fields[plain])
        found = b""
        for name in _INPUT_FIELDS[self.path]:
            if (raw := self.fields.get(name)) is not None:
                found = bytes(raw)
                break
        if self.path not in _FIRST_FIELDS or (first := self.fields.get(_FIRST_FIELDS[self.path])) is None:
            return found
        return bytes(first) + found

    @property
    def has_embeds(self) -> bool:
        """Whether a prompt, all or some of it, is given as embeddings in a field of their own."""
        return self.path == COMPLETIONS and not _is_null(self.fields.get(EMBEDS))

    def extended(self, more: Mapping[str, object], *, seed: int | None = None) -> Call:
        """The same request with these fields; seed: if they hold one."""
        fields = {**self.fields, **{name: msgspec.Raw(msgspec.json.encode(value)) for name, value in more.items()}}
        if any(name in self.fields for name in more):
            body = msgspec.json.encode(fields)
        else:
            body = b"".join((self.body[:-1], b",", msgspec.json.encode(more)[1:]))
        seed = self.seed if seed is None else seed
        return msgspec.structs.replace(self, fields=fields, body=body, seed=seed, said=None)

    def with_params(self, params: object) -> bytes:
        """The body with `kv_transfer_params`."""
        return self.with_json(msgspec.json.encode(params))

    def with_json(self, params: bytes) -> bytes:
        """The same; params: in JSON."""
        # The body always has a field (model), so replace its closing brace by a comma. Encoding the client's fields
        # once, not for each leg, matters for long prompts.
        body = self.body
        begin = body[:-1] if len(body) < _SMALL_NBYTES else memoryview(body)[:-1]
        return b"".join((begin, b',"kv_transfer_params":', params, b"}"))


def has_several(prompt: bytes) -> bool:
    """Whether this JSON is a list of texts or of lists of token ids."""
    return prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[")


def parse(path: str, data: bytes, model: str | None = None) -> Call:
    """Raises BadField unless it is a JSON object with the fields that every request needs. model: of a request to
    `GENERATE` that names none."""
    try:
        fields = _FIELDS.decode(data)
    except msgspec.ValidationError:
        raise BadField("the body must be a JSON object") from None
    except (ValueError, RecursionError) as error:
        raise BadField(f"the body is not valid JSON: {error}") from None
    said: Said | None = None
    if len(data) < _SMALL_NBYTES:  # a second look at a long prompt takes longer than a look for each field
        try:
            said = _SAID.decode(data)
        except (ValueError, RecursionError):
            said = None
    try:
        if said is None or "n" in fields:
            check_numbers(fields)
        if path == GENERATE:
            check_sampling(fields.get("sampling_params"))
    except OutOfRange as error:
        raise BadField(str(error), error.param) from None
    named = _field(fields, "model", str, "a string") if said is None else said.model
    model = named or (model if path == GENERATE else None)
    if model is None:
        raise BadField("field 'model' is required", "model")
    known = _INPUT_FIELDS[path]
    number, plain = 0, _PLAIN.get(path)
    if plain is not None and (raw := fields.get(plain)) is not None and memoryview(raw)[0] in known[plain][0]:
        number = 1  # no copy of a long prompt
    for name in known if not number else ():
        raw = fields.get(name)
        if raw is None or (path in (COMPLETIONS, GENERATE) and _is_null(raw)):
            continue
        number += 1
        if number == 1 and memoryview(raw)[0] not in known[name][0]:  # no copy of a long prompt
            raise BadField(f"field {name!r} must be {known[name][1]}", name)
    if not number and path == COMPLETIONS and not _is_null(fields.get(EMBEDS)):
        number = 1
    if number != 1:
        names = " or ".join(map(repr, known))
        raise BadField(f"field {names} is required", next(iter(known)))
    fields.pop(KV_PARAMS, None)
    if said is not None:
        return Call(path, model, said.stream or False, said.seed, fields, msgspec.json.encode(fields), said)
    streaming = ("stream" in fields and _field(fields, "stream", bool, "a boolean")) or False
    seed = _field(fields, "seed", int, "an integer") if "seed" in fields else None
    return Call(path, model, streaming, seed, fields, msgspec.json.encode(fields))


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


class Sampling(msgspec.Struct):
    """Of a request to `GENERATE`."""

    max_new_tokens: int | None = None
    n: int | None = None


def sampling_of(call: Call) -> Sampling:
    """Empty for what the worker will refuse, and for a list of them."""
    try:
        return msgspec.json.decode(call.fields.get("sampling_params", b"{}"), type=Sampling)
    except (ValueError, RecursionError):
        return Sampling()


def told(call: Call, name: str, kind: type[_T]) -> _T | None:
    """The value of a field, whose other types are the worker's to judge."""
    if name not in call.fields:
        return None
    try:
        return _field(call.fields, name, kind, "")
    except BadField:
        return None


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> bytes:
    """An OpenAI error object; cuts the message, which may quote a long request."""
    message = message[:_MAX_MESSAGE_CHARS]
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


class Error(msgspec.Struct):
    """What a worker said; empty where it said it otherwise."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _ErrorDocument(msgspec.Struct):
    error: Error


_CODES = frozenset(
    found.code for found in vars(errors).values() if isinstance(found, type) and issubclass(found, PdlinkError)
)
_MAX_EXCERPT_NBYTES = 300


def error_code(body: bytes) -> str:
    """The known code in a worker's error document, or `internal_error` for anything else."""
    code = error_of(body).code
    return code if isinstance(code, str) and code in _CODES else PdlinkError.code


def error_of(body: bytes) -> Error:
    """The error in a document."""
    try:
        return msgspec.json.decode(body, type=_ErrorDocument).error
    except (ValueError, RecursionError):
        return Error()


def message_of(body: bytes) -> str:
    """The message of an error document."""
    return error_of(body).message


def rejection(status: int, body: bytes) -> bytes:
    """The client's error after a worker rejected its request: the worker's message, if it sent an error document."""
    sent = error_of(body)
    message = sent.message[:_MAX_MESSAGE_CHARS] or f"the request was rejected with status {status}"
    kind = sent.type or "invalid_request_error"
    code = sent.code if sent.code is not None else InvalidRequest.code
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": sent.param, "code": code}})


def is_rejection(document: bytes) -> bool:
    """Whether an error in a stream has a 4xx code, as vLLM's do: the request is at fault."""
    code = error_of(document).code
    return isinstance(code, int) and 400 <= code < 500


class _Answer(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    output: list[msgspec.Raw] | None = None
    """Of `RESPONSES`."""
    content: list[msgspec.Raw] | None = None
    """Of `MESSAGES`."""
    meta_info: dict[str, msgspec.Raw] | None = None
    """Of `GENERATE`; a batch is answered with a list of such objects."""
    usage: msgspec.Raw = msgspec.Raw()


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens that an answer says it took; 0 where it does not."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0


_NOTHING = (None,) * 3
_ANSWER = msgspec.json.Decoder(_Answer | list[_Answer])
_USAGE, _NO_USAGE = msgspec.json.Decoder(Usage), Usage()


def problem_of_answer(content_type: str, body: bytes) -> str:
    """Why an answer with status 200 is invalid; empty if it is valid."""
    found = read_answer(content_type, body)
    return found if isinstance(found, str) else ""


def read_answer(content_type: str, body: bytes) -> Usage | str:
    """What an answer with status 200 took, or why it is invalid."""
    if content_type != "application/json":
        return "the answer's type is not application/json"
    try:
        found = _ANSWER.decode(body)
    except (ValueError, RecursionError):
        found = []
    if not isinstance(found, _Answer):
        well = bool(found) and all(each.meta_info is not None for each in found)
    elif found.choices is None:
        well = (found.output, found.content, found.meta_info) != _NOTHING
    elif b'"error"' in body and fails(body):
        return "the answer ended with finish_reason error"
    else:
        try:
            return _USAGE.decode(found.usage) if found.usage else _NO_USAGE
        except (ValueError, RecursionError):
            return _NO_USAGE
    return _NO_USAGE if well else "the answer is not a JSON object with choices"


def excerpt(body: bytes) -> str:
    """The beginning of a worker's bytes for the log: printable, in one line."""
    return ascii(body[:_MAX_EXCERPT_NBYTES].decode(errors="replace"))


def stream_error(message: str, *, code: str, named: bool = False) -> bytes:
    """The event that ends a broken stream; without it a client takes half an answer for complete. named: of a route
    whose events have names (`LAST_EVENTS`)."""
    if named:
        error = {"type": "api_error", "message": message[:_MAX_MESSAGE_CHARS], "code": code}
        return b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": error}) + b"\n\n"
    return b"data: " + error_body(message, kind="stream_error", code=code) + b"\n\n" + DONE


_T = TypeVar("_T")


def _field(fields: Mapping[str, msgspec.Raw], name: str, kind: type[_T], wanted: str) -> _T | None:
    """The value of one small field; None if it is absent or null."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return _VALUES[kind].decode(raw)  # type: ignore[no-any-return]
    except (ValueError, RecursionError):
        raise BadField(f"field {name!r} must be {wanted}", name) from None
