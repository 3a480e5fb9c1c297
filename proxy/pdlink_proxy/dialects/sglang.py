"""SGLang servers in its P/D mode: both legs get the client's body and meet in a *room* at prefill's bootstrap server.

Shapes: SGLang 0.5.23 (managers/io_struct.py, entrypoints/http_server.py). Its workers differ from vLLM's:

A decode server computes no prompt, so there is no decode alone: what no pair can serve needs a plain server.

A leg that was given up is aborted by its ids (`rid`, one for each prompt), at once; else the other one would wait for
minutes (sglang#9726). /v1/messages takes no id: its leg ends with its connection, which SGLang looks at every 4 s.

Its own interface, /generate, is served in two legs, too: the same body to both. Log-probabilities of the prompt are
made by prefill, and those of the answer by decode, so the client's answer waits for both.

The first healthy answer of /health is its own warm-up: it generates a token, in P/D mode with a bootstrap host that
means "no transfer" (FAKE_BOOTSTRAP_HOST). It takes at least a second and up to 20.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
from xxhash import xxh3_64_intdigest

from pdlink._http import ABORT, ANYTHING
from pdlink.api.fields import Count  # noqa: TC001  (msgspec reads the annotation at run time)
from pdlink.api.health import Health
from pdlink.api.kv_path import TRANSFERRED
from pdlink.api.openai import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, has_several, sampling_of
from pdlink.api.session import SGLANG_END, EndSessionRequest, encode_session, with_source
from pdlink.api.sse import ABORT_MARK, abort_of, rewritten
from pdlink.config.listen import HostPort
from pdlink.config.proxy import MAX_ENGINES
from pdlink.errors import WorkerKeyRefused

from ..http_connection import HttpError
from ..recovery import Resumes
from ..rules import Rules
from ..upstream import ask, post
from .base import Dialect, KnownHealth, Said, TransferTerms
from .unserved import OF_SGLANG
from .vllm import answers_in_turns, small_field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.api.openai import Call

    from ..http_client import HttpClient
    from ..recovery import Links
    from ..upstream import Asking

HEALTH_S = 25.0
"""SGLang answers 503 after 20 s without a token."""
ABORT_S = 2.0
_MAX_ROOM = 2**63 - 1
MAX_INFO_NBYTES = 2**20
_LOST_STATUSES = frozenset({500, 502, 503, 504})
_ROLES = {"prefill": "prefill", "decode": "decode", "null": "both"}
_KEY_SETTING = "worker_key_file must hold the key that SGLang was given as --api-key"


def _legs(call: Call, transfer: TransferTerms) -> tuple[bytes, bytes]:
    room, rids = xxh3_64_intdigest(transfer.transfer_id.encode()) & _MAX_ROOM, _rids(call, transfer.transfer_id)
    host, port = _host_of(transfer.prefill_url), transfer.link["bootstrap_port"]
    fields: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    if isinstance(rids, list):
        num = len(rids)
        rooms = [(room + i) & _MAX_ROOM for i in range(num)]
        fields = {"bootstrap_host": [host] * num, "bootstrap_port": [port] * num, "bootstrap_room": rooms}
    if call.path != MESSAGES:
        fields["request_id" if call.path == RESPONSES else "rid"] = rids
    turn, takes_session = transfer.turn, call.path != MESSAGES and "session_params" not in call.fields  # one of both
    session = encode_session(turn.id, turn.ttl_s, turn.owner) if turn is not None else ""
    if session and takes_session:
        fields["session_id"] = session
    both = {**call.fields, **fields}
    to_decode = msgspec.json.encode(both)
    if not (call.streaming or transfer.source or call.path == RESPONSES):
        return to_decode, to_decode
    alone = {name: raw for name, raw in both.items() if name not in ("stream", "stream_options")}
    if transfer.source and takes_session:
        alone["session_id"] = with_source(session, transfer.source)
    if call.path == RESPONSES:
        alone["store"] = False
    return msgspec.json.encode(alone), to_decode


@lru_cache(1024)
def _host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


def _rids(call: Call, transfer_id: str) -> str | list[str]:
    """The ids of its prompts at both servers: one, or a list for a batch, also of one prompt."""
    if call.path == RESPONSES:
        return f"resp_{transfer_id}"  # the client is told this one
    if call.path not in (COMPLETIONS, GENERATE) or not has_several(call.given):
        return transfer_id
    num = len(msgspec.json.decode(call.given, type=list[msgspec.Raw]))
    return [f"{transfer_id}_{index}" for index in range(num)]


def _whole(call: Call) -> bool:
    """Several answers share one prompt, whose KV only one of them would get; log-probabilities of the prompt are made
    where it is computed."""
    if call.path == RESPONSES and answers_in_turns(call):
        return True
    answers = sampling_of(call).n if call.path == GENERATE else small_field(call, "n")
    if answers is not None and answers != 1:
        return True
    return bool(small_field(call, "echo")) and small_field(call, "logprobs") is not None


class _Publisher(msgspec.Struct):
    """Of KV events; each data-parallel rank has its own ports."""

    endpoint_host: str
    endpoint_port_base: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] = 1
    replay_endpoint_port_base: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] | None = None

    def said(self) -> tuple[str, ...]:
        """As `kv_events.source` reads it."""
        host, bases = self.endpoint_host.strip("[]"), (self.endpoint_port_base, self.replay_endpoint_port_base)
        return tuple(
            ",".join(f"tcp://{HostPort(host, base + rank)}" for base in bases if base is not None)
            for rank in range(self.dp_size)
        )


class _Info(msgspec.Struct):
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] = 8998
    page_size: Count | None = None
    max_total_num_tokens: Count | None = None
    kv_events: _Publisher | None = None
    enable_deterministic_inference: bool = False
    version: str = ""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def _look(asking: Asking, known: KnownHealth) -> Health | str:
    if known.last is not None and known.well and known.spoke:
        return known.last
    reply = await ask(replace(asking, timeout_s=max(HEALTH_S, asking.timeout_s)), "/health")
    if reply.status == 503 and known.last is not None:
        return msgspec.structs.replace(known.last, status="failed")
    if reply.status != 200:
        return f"GET /health answered {reply.status}"
    if known.last is not None and known.well:
        return known.last
    models, info = await ask(asking, "/v1/models"), await ask(asking, "/server_info", MAX_INFO_NBYTES)
    if 401 in (models.status, info.status):
        raise WorkerKeyRefused(f"GET /v1/models answered {models.status}: {_KEY_SETTING}")
    try:
        names = [model.id for model in msgspec.json.decode(models.body, type=_Models).data]
        said = msgspec.json.decode(info.body, type=_Info)
    except (ValueError, RecursionError) as error:
        return f"GET /v1/models or /server_info answered {models.status}, {info.status} with something else: {error}"
    if not names:
        return "GET /v1/models names no model"
    blocks = said.max_total_num_tokens // said.page_size if said.max_total_num_tokens and said.page_size else None
    return Health(
        "ok",
        urlsplit(asking.url).netloc,
        epoch=str(int(known.last.epoch) + 1) if known.last else "1",
        role=_ROLES.get(said.disaggregation_mode),
        model=names[0],
        version=f"SGLang {said.version}" if said.version else "",
        control=None,
        num_blocks=blocks,
        block_tokens=said.page_size,
        aliases=tuple(names[1:]),
        kv_events=said.kv_events.said() if said.kv_events is not None else (),
        link={
            "bootstrap_port": said.disaggregation_bootstrap_port,
            "deterministic": said.enable_deterministic_inference,
        },
    )


def _said(_headers: Mapping[str, str], body: bytes) -> Said:
    """Decode computes no prompt, so an answer needed the KV; the head of a stream may come before it."""
    return Said(TRANSFERRED if body else None)


def _unless_repeatable(call: Call, links: Links) -> str:
    """Why another server would answer something else.

    Drawn tokens are repeated where all servers were started with `--enable-deterministic-inference`: then a draw
    depends on the request's seed (42 without one) and the token's place alone (layers/sampler.py,
    sampling/sampling_batch_info.py, 0.5.23), and probabilities do not depend on the batch. But if one request of a
    batch has top_p, top_k or temperature 0, all its draws are among sorted tokens (`simple_sampling_case`): a request
    without these may differ, which the comparison notices. Without the flag seeds count for nothing.
    """
    if small_field(call, "temperature") == 0 or (links and all(link.get("deterministic") for link in links)):
        return ""
    return (
        "its tokens are drawn at random; send temperature 0, or start SGLang with --enable-deterministic-inference, "
        "for streams that go on elsewhere"
    )


async def _abort(client: HttpClient, url: str, transfer_id: str, call: Call) -> None:
    rids = _rids(call, transfer_id) if call.path != MESSAGES else []
    with suppress(HttpError, OSError, TimeoutError):
        for rid in rids if isinstance(rids, list) else [rids]:
            await post(client, f"{url}/abort_request", {"rid": rid}, timeout_s=ABORT_S)


async def _end_session(asking: Asking, session_id: str, salt: str, owner: str | None) -> bool:
    """As a setting that our plugin takes (sglang_parts/sessions.py), and an SGLang without it does not know."""
    said = msgspec.json.encode(EndSessionRequest(session_id, salt, owner)).decode()
    url = f"{asking.url}/set_internal_state"
    reply = await post(asking.client, url, {"server_args": {SGLANG_END + said: 1}}, timeout_s=asking.timeout_s)
    return reply.status == 200 and any(msgspec.json.decode(reply.body, type=list[bool]))  # one of each rank's


# ---- log-probabilities of /generate

_OF_PROMPT = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
"""In `meta_info`: prefill's come before decode's, which computes none of the prompt. Source: SGLang's mini_lb.py."""
_OF_PROMPT_MARK = b'"input_token_logprobs"'


class _Generated(msgspec.Struct):
    meta_info: dict[str, msgspec.Raw]
    index: int = 0
    """In its batch, of an event."""


def _merged(prefill: _Generated, document: bytes) -> bytes:
    """One object of decode, with what prefill computed of the prompt."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        said = msgspec.json.decode(fields["meta_info"], type=dict[str, msgspec.Raw])
        for name in _OF_PROMPT:
            if name in prefill.meta_info and name in said:
                lists = [msgspec.json.decode(each[name], type=list[Any] | None) for each in (prefill.meta_info, said)]
                said[name] = msgspec.Raw(msgspec.json.encode([*(lists[0] or ()), *(lists[1] or ())]))
    except (KeyError, ValueError, RecursionError):
        return document
    return msgspec.json.encode({**fields, "meta_info": said})


def _prefilled(answer: bytes) -> list[_Generated]:
    try:
        found = msgspec.json.decode(answer, type=_Generated | list[_Generated])
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else [found]


def _merge_answer(prefill_answer: bytes, answer: bytes) -> bytes:
    prefilled = _prefilled(prefill_answer)
    if answer[:1] != b"[":
        return _merged(prefilled[0], answer) if prefilled else answer
    each = msgspec.json.decode(answer, type=list[msgspec.Raw])
    if len(each) != len(prefilled):
        return answer
    return b"[" + b",".join(_merged(*pair) for pair in zip(prefilled, map(bytes, each), strict=True)) + b"]"


def _merge_events(prefill_answer: bytes, events: bytes) -> bytes:
    prefilled = _prefilled(prefill_answer)

    def merged(document: bytes) -> bytes:
        try:
            index = msgspec.json.decode(document, type=_Generated).index
        except (ValueError, RecursionError):
            return document
        return _merged(prefilled[index], document) if index < len(prefilled) else document

    return rewritten(events, _OF_PROMPT_MARK, merged) if prefilled else events


# ---- aborts of /generate


def _with_errors(_prefill_answer: bytes, events: bytes) -> bytes:
    """Events with those of aborts as errors: in a stream SGLang tells a failure (its KV did not come, it has no room)
    as the end of an answer (`_handle_abort_finish_reason`, managers/tokenizer_manager.py)."""
    return rewritten(events, ABORT_MARK, lambda document: abort_of(document) or document)


_RULES = Rules(untold=True, lost_statuses=_LOST_STATUSES, no_kv_status=500)
_OF_GENERATE = replace(_RULES, marks=ABORT, merge_events=_with_errors)
_WITH_LOGPROBS = replace(
    _RULES,
    marks=ANYTHING,
    merge_answer=_merge_answer,
    merge_events=lambda prefill_answer, events: _with_errors(b"", _merge_events(prefill_answer, events)),
    awaits_prefill=True,
)


def _rules_of(call: Call) -> Rules | None:
    if call.path != GENERATE:
        return None
    with_logprobs = bytes(call.fields.get("return_logprob", b"null")) not in (b"null", b"false")
    return _WITH_LOGPROBS if with_logprobs else _OF_GENERATE if call.streaming else None


_PATHS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE)

SGLANG = Dialect(
    "sglang",
    _legs,
    look=_look,
    rules=_RULES,
    rules_of=_rules_of,
    paths=_PATHS,
    whole=_whole,
    resumes=Resumes(_unless_repeatable),
    said=_said,
    unserved=OF_SGLANG,
    key_as_bearer=True,
    key_setting=_KEY_SETTING,
    decode_computes=False,
    abort=_abort,
    end_session=_end_session,
    metrics="sglang",
)
