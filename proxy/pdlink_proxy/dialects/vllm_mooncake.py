"""vLLM servers that move their KV with vLLM's MooncakeConnector: both legs at once, under one transfer id.

Shapes: vLLM 0.32, kv_connector/v1/mooncake. A prefill server has a bootstrap server of its own (port 8998), which
names the engine of each data-parallel rank; with several, prefill's leg is sent to one of them by header, and decode
is told that one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from ..upstream import ask
from .addresses import host_of
from .vllm import NOT_FOR_PREFILL, VLLM, for_one_reader, look, prefill_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..openai import Call
    from ..upstream import Asking
    from .base import Attempt, Health, Known

BOOTSTRAP_PORT = 8998


class _Engine(msgspec.Struct):
    engine_id: str


def _bootstrap(url: str, control: tuple[str, ...]) -> str:
    return control[0].rstrip("/") if control else f"http://{host_of(url)}:{BOOTSTRAP_PORT}"


async def _look(asking: Asking, known: Known) -> Health | str:
    health = await look(asking, known)
    if isinstance(health, str) or not known.is_prefill or health is known.last or health.status != "ok":
        return health
    address = _bootstrap(asking.url, known.control)
    reply = await ask(replace(asking, url=address), "/query")
    try:
        engines = msgspec.json.decode(reply.body, type=dict[int, _Engine])
    except (ValueError, RecursionError) as error:
        return f"GET {address}/query answered {reply.status} with something else: {error}"
    if not engines:
        return f"GET {address}/query names no engine"
    ranks = {str(rank): engine.engine_id for rank, engine in sorted(engines.items())}
    return msgspec.structs.replace(health, link={"engines": ranks})


def _rank(attempt: Attempt) -> tuple[str, str]:
    """The data-parallel rank of this attempt, and its engine."""
    engines: dict[str, str] = attempt.link["engines"]
    return list(engines.items())[crc32(attempt.transfer_id.encode()) % len(engines)]


def _legs(call: Call, attempt: Attempt) -> tuple[bytes, bytes]:
    transfer: dict[str, Any] = {"transfer_id": attempt.transfer_id}
    to_prefill = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
    to_decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": _bootstrap(attempt.prefill_url, attempt.prefill_control),
        "remote_engine_id": _rank(attempt)[1],
        **transfer,
    }
    return prefill_body(call, to_prefill, NOT_FOR_PREFILL), call.with_params(to_decode)


def _headers(attempt: Attempt) -> tuple[Mapping[str, str], Mapping[str, str]]:
    several = len(attempt.link["engines"]) > 1
    return {"X-data-parallel-rank": _rank(attempt)[0]} if several else {}, {}


VLLM_MOONCAKE = replace(
    VLLM,
    name="vllm-mooncake",
    legs=_legs,
    look=_look,
    whole=for_one_reader,
    headers=_headers,
    kv_path=lambda _headers, _body: None,
    needs_control=None,
)
