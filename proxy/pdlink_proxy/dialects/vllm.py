"""vLLM servers with pdlink's connector, and what all dialects of vLLM have in common.

The shapes are those of vLLM 0.32 (entrypoints/openai, kv_connector/v1/nixl). Its workers differ from pdlink's own in
four ways.

Everything a client gets comes from decode. vLLM's decode always computes the last token of the prompt again and
samples token 0 itself, and the two engines need not agree on it: rounding differs with the batch, and without a seed
every sample differs. So a first token of prefill could be followed by the continuation of another one. Prefill's leg
is therefore asked for one token that nobody reads, in one piece and without the client's sampling; what that costs is
decode's one-token step.

A request that asks for n answers or holds several prompts is one transfer for pdlink's connector, which tells its
parts apart. vLLM's own connectors give the blocks of one prompt to one reader, so there decode serves such a request
alone (`for_one_reader`).

Nobody can tell vLLM that a transfer will not come, so a decode leg whose prefill failed is closed and tried again.

/health says only that the engine lives. The models are asked for when a worker comes up, and as its load only what
this proxy sent it counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from pdlink._http import PARAMS
from pdlink.api.health import Health
from pdlink.api.kv_path import USUAL, checked
from pdlink.api.legs import DecodeParams, PrefillParams
from pdlink.api.openai import CHAT, COMPLETIONS, EMBEDS, KV_PARAMS, MESSAGES, RESPONSES, has_several
from pdlink.api.sse import rewritten
from pdlink.errors import WorkerKeyRefused
from pdlink.observe.sources import Sourced  # noqa: TC001  (msgspec reads the annotation at run time)

from ..recovery import Resumes
from ..rules import Rules
from ..upstream import ask
from .base import Dialect, KnownHealth, Said, TransferTerms
from .unserved import OF_VLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdlink.api.openai import Call

    from ..recovery import Links
    from ..upstream import Asking

_KEY_SETTING = "worker_key_file must hold the key that vLLM was given as --api-key"
_LOST_STATUSES = frozenset({500, 502, 503, 504})
_NO_KV_STATUS = 500  # of a failed load, as of every error inside vLLM (kv_load_failure_policy: fail)

NOT_FOR_PREFILL = frozenset(
    (
        *("max_tokens", "max_completion_tokens", "min_tokens"),  # vLLM answers 400 to more min_tokens than max_tokens
        *("n", "best_of", "stream", "stream_options"),
        *("logprobs", "top_logprobs", "echo", "return_token_ids"),  # not needed: nobody reads this answer
        *("background", "include", "max_output_tokens", "store"),  # of RESPONSES
        "seed",  # with a prompt computed in chunks it kills the engine on CPUs (docs/gotchas.md)
    )
)
_SAMPLING = NOT_FOR_PREFILL | frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("length_penalty", "logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget"),
        *(
            "repetition_detection",
            "watermarking",
            "stop",
            "stop_token_ids",
            "include_stop_str_in_output",
            "ignore_eos",
        ),
        *("logprob_token_ids", "return_tokens_as_token_ids", "return_token_offsets", "stream_interval"),
        "routed_experts_prompt_start",
    )
)
"""Fields for sampling and output; they do not change the KV of a prompt. Fields for the chat template stay (`tools`,
`tool_choice`, `response_format`, `reasoning_effort`, ...): both servers must make the same prompt."""
_SAMPLING_OF_TEXT = _SAMPLING | {"response_format", "structured_outputs"}
"""The same of COMPLETIONS: grammars change no prompt there, and compiling them delays the request."""


_LIMITS = {COMPLETIONS: "max_tokens", CHAT: "max_completion_tokens"} | {
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}


def prefill_body(call: Call, params: object, without: frozenset[str], **more: object) -> bytes:
    """The same prompt, one token, in one piece."""
    fields: dict[str, Any] = {**call.fields, KV_PARAMS: params}
    for name in without.intersection(fields):
        del fields[name]
    if call.path == RESPONSES:
        fields["store"] = False
    fields[_LIMITS[call.path]] = 1
    fields.update(more)
    return msgspec.json.encode(fields)


def _legs(call: Call, transfer: TransferTerms) -> tuple[bytes, bytes]:
    without = _SAMPLING_OF_TEXT if call.path == COMPLETIONS else _SAMPLING
    to_prefill = PrefillParams(
        transfer_id=transfer.transfer_id,
        num_prompts=_num_prompts(call) if call.path == COMPLETIONS and call.prompt[:1] != b'"' else 1,
        data_parallel_rank=transfer.prefill.data_parallel_rank or 0,
        do_remote_decode=call.path == MESSAGES,
        source=transfer.source,
    )
    to_decode = DecodeParams(transfer_id=transfer.transfer_id, prefill=transfer.prefill)
    if (turn := transfer.turn) is not None:
        session = {"session_id": turn.id, "session_ttl_s": turn.ttl_s, "session_owner": turn.owner}
        to_prefill = msgspec.structs.replace(to_prefill, **session)
        to_decode = msgspec.structs.replace(to_decode, **session)
    return (
        prefill_body(call, to_prefill, without, temperature=0),
        call.with_params(to_decode),
    )


def _num_prompts(call: Call) -> int:
    """Number of prompts in this request of COMPLETIONS, so that prefill knows when all have arrived."""
    if EMBEDS not in call.fields:
        return _count(call.given)
    given = (bytes(call.fields[name]) for name in ("prompt", EMBEDS) if name in call.fields)
    return sum(_count(raw) for raw in given if raw != b"null")


def _count(prompts: msgspec.Raw | bytes) -> int:
    """Of a field of COMPLETIONS."""
    return len(msgspec.json.decode(prompts, type=list[msgspec.Raw])) if has_several(prompts) else 1


def small_field(call: Call, name: str) -> Any:
    """The value of a field if it is a number, a boolean or null; vLLM checks anything else."""
    raw = call.fields.get(name)
    if raw is None or bytes(raw)[:1] in b'"[{':
        return None
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:  # a number too large for a double
        return None


_ALL_OF_IT = frozenset(
    (
        *("prompt_logprobs", "echo", "use_beam_search", "truncate_prompt_tokens"),
        *("background", "truncation", "previous_response_id", "tools"),
    )
)
"""Fields that `needs_all_of_it` looks at, beside `max_tokens`: a request without them needs no more questions."""


def needs_all_of_it(call: Call) -> bool:
    """Whether the KV of this request's prompt is not enough for its answer, or cannot be moved.

    Log-probabilities of the prompt need every position to be computed where the answer is made, and `max_tokens: 0`
    is asked for nothing else; beams make requests of their own; a truncated prompt may be cut differently for a leg
    with another `max_tokens`.
    """
    if call.said.max_tokens == 0:
        return True
    if _ALL_OF_IT.isdisjoint(call.fields):
        return False
    if call.path == RESPONSES and answers_in_turns(call):
        return True
    if small_field(call, "prompt_logprobs") is not None:
        return True
    if small_field(call, "echo") and small_field(call, "logprobs") is not None:
        return True
    return bool(small_field(call, "use_beam_search") or small_field(call, "truncate_prompt_tokens") is not None)


class _Tool(msgspec.Struct):
    type: str = ""


def answers_in_turns(call: Call) -> bool:
    """Of RESPONSES: whether it depends on what its server keeps or does between turns, or is cut to its length."""
    if small_field(call, "background") or bytes(call.fields.get("truncation", b"null")) == b'"auto"':
        return True
    if bytes(call.fields.get("previous_response_id", b"null")) != b"null":
        return True
    try:
        tools = msgspec.json.decode(call.fields.get("tools", b"null"), type=list[_Tool] | None)
    except (ValueError, RecursionError):
        return False  # the worker refuses it
    return any(tool.type != "function" for tool in tools or ())


def for_one_reader(call: Call) -> bool:
    """`needs_all_of_it`, for connectors that give the KV of one prompt to one reader. Some of them name it by token
    ids, which embeddings do not have."""
    answers = small_field(call, "n")
    if needs_all_of_it(call) or call.has_embeds or (answers is not None and answers != 1):
        return True
    # A list, even of a single prompt.
    return has_several(call.fields.get("prompt", b"null"))


def may_misread(call: Call) -> bool:
    """Whether `tool_choice` says that a tool must be called: one token of that is no JSON, and vLLM answers 400 or
    500 after computing it. The field stays in prefill's leg: without it vLLM may leave the tools out of the prompt or
    refuse the request."""
    return bytes(call.fields["tool_choice"]) not in (b"null", b'"auto"', b'"none"')


def params_of(answer: bytes) -> bytes | None:
    """`kv_transfer_params` of prefill's answer: null if prefill kept no KV; None for an invalid answer."""
    try:
        fields = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return None
    return bytes(fields.get(KV_PARAMS, b"null"))


# ---- answers


_NOTHING = Said()
_PARAMS_MARK = b'"kv_transfer_params":{'
"""Found as a field only: quotes in generated text are escaped, and vLLM writes no spaces here."""


def _without_params(document: bytes) -> bytes:
    """An answer of decode, or one event of it, without transfer parameters."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return document
    if KV_PARAMS in fields:
        fields[KV_PARAMS] = None  # as vLLM writes an absent value
    if (inner := bytes(fields.get("response", b"")))[:1] == b"{":  # of an event of RESPONSES
        fields["response"] = msgspec.Raw(_without_params(inner))
    return msgspec.json.encode(fields)


class _Params(msgspec.Struct):
    pdlink_kv: str | None = None
    pdlink_source: Sourced | None = None


class _WithParams(msgspec.Struct):
    kv_transfer_params: _Params | None = None


_USUAL = {msgspec.json.encode({"pdlink_kv": path}): Said(path) for path in USUAL}
"""By params that are the last field, where vLLM 0.32 writes them."""
_WITH_PARAMS, _ONLY_PARAMS = msgspec.json.Decoder(_WithParams), msgspec.json.Decoder(_Params)


def _said(_headers: Mapping[str, str], body: bytes) -> Said:
    """What the connector writes into the answer; in a stream into the last event (vLLM 0.33), or nowhere (0.32)."""
    if (at := body.rfind(_PARAMS_MARK)) < 0:
        return _NOTHING
    if (usual := _USUAL.get(body[at + len(_PARAMS_MARK) - 1 : -1])) is not None:
        return usual
    try:
        params = _WITH_PARAMS.decode(body).kv_transfer_params
    except (ValueError, RecursionError):
        return _NOTHING
    return Said(checked(params.pdlink_kv), params.pdlink_source) if params is not None else _NOTHING


def _merge_answer(_prefill_answer: bytes, answer: bytes) -> bytes:
    if (at := answer.rfind(_PARAMS_MARK)) >= 0:
        begin = at + len(_PARAMS_MARK) - 1
        try:
            _ONLY_PARAMS.decode(memoryview(answer)[begin:-1])
        except (ValueError, RecursionError):  # they are not the last field, where vLLM 0.32 writes them
            pass
        else:
            return answer[:begin] + b"null}"  # as vLLM writes an absent value
    return _without_params(answer)


def _merge_events(_prefill_answer: bytes, events: bytes) -> bytes:
    return rewritten(events, _PARAMS_MARK, _without_params)


# ---- health


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


async def look(asking: Asking, known: KnownHealth) -> Health | str:
    if known.last is not None and known.well and known.spoke:
        return known.last
    reply = await ask(asking, "/health")
    if reply.status == 503 and known.last is not None:
        return msgspec.structs.replace(known.last, status="failed")
    if reply.status != 200:
        return f"GET /health answered {reply.status}"
    if known.last is not None and known.well:
        return known.last
    reply = await ask(asking, "/v1/models")
    if reply.status == 401:
        raise WorkerKeyRefused(f"GET /v1/models answered 401: {_KEY_SETTING}")
    try:
        names = [model.id for model in msgspec.json.decode(reply.body, type=_Models).data]
    except (ValueError, RecursionError) as error:
        return f"GET /v1/models answered {reply.status} with something else: {error}"
    if not names:
        return "GET /v1/models names no model"
    try:
        version = f"vLLM {msgspec.json.decode((await ask(asking, '/version')).body, type=_Version).version}"
    except (ValueError, RecursionError):
        version = ""
    # vLLM reports no epoch. A server that was away counts as restarted.
    epoch = str(int(known.last.epoch) + 1) if known.last else "1"
    name = urlsplit(asking.url).netloc
    return Health(
        "ok",
        name,
        epoch=epoch,
        role=None,
        model=names[0],
        control=None,
        aliases=tuple(names[1:]),
        version=version,
    )


def unless_repeatable(call: Call, _links: Links) -> str:
    """Why another server of vLLM's would answer something else. A request with a seed has random numbers of its own
    (`gpu_model_runner.py`, 0.32; -1 stands for none), others share those of the process."""
    seed = small_field(call, "seed")
    if small_field(call, "temperature") == 0 or (type(seed) is int and seed != -1):
        return ""
    return "its tokens are drawn at random; send temperature 0 or a seed for streams that go on elsewhere"


_PATHS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)

_RULES = Rules(
    untold=True,
    lost_statuses=_LOST_STATUSES,
    no_kv_status=_NO_KV_STATUS,
    merge_answer=_merge_answer,
    merge_events=_merge_events,
    marks=PARAMS,
    says_kv=True,
)


def rules_for(rules: Rules) -> Callable[[Call], Rules | None]:
    """`Dialect.rules_of`, for connectors with these rules."""
    misread = replace(rules, prefill_may_misread=True)
    return lambda call: misread if "tool_choice" in call.fields and may_misread(call) else None


VLLM = Dialect(
    "vllm",
    _legs,
    look=look,
    rules=_RULES,
    rules_of=rules_for(_RULES),
    paths=_PATHS,
    whole=needs_all_of_it,
    alone=lambda call, source: call.with_params({"source": source}),
    resumes=Resumes(unless_repeatable),
    said=_said,
    unserved=OF_VLLM,
    prefill_says=True,
    key_as_bearer=True,
    key_setting=_KEY_SETTING,
    engine_paths=(COMPLETIONS, CHAT, MESSAGES),
    needs_control=True,
    metrics="vllm",
)
"""Pairs with PDLinkConnector: both legs at once, under one transfer id."""
