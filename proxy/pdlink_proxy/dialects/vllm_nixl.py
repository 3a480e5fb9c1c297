"""vLLM servers that move their KV with vLLM's own NixlConnector or NixlPushConnector.

Shapes: vLLM 0.32, kv_connector/v1/nixl. Pull: decode's leg follows prefill's answer and gets its parameters. Push:
decode registers with prefill, which writes when it has computed; all that decode must be told is who prefill is. The
first answer of a prefill worker says so, and from then on both legs start at once.

Push pairs registration and prompt by X-Request-Id (`get_base_request_id`): two requests of one id would get each
other's KV. So both legs are sent the transfer id in its place, whichever connector there is: pull pairs by an id that
vLLM makes unique itself, and the proxy is not told which of them the servers run. The client keeps its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from .vllm import NOT_FOR_PREFILL, VLLM, for_one_reader, params_of, prefill_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..openai import Call
    from .base import Attempt

_TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_IDENTITY = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "dcp_size")


def _legs(call: Call, _attempt: Attempt) -> tuple[bytes, bytes]:
    # Let prefill reject what vLLM rejects: KV that decode does not fetch is held for minutes (480 s in 0.32).
    return prefill_body(call, _TO_PREFILL, NOT_FOR_PREFILL), call.body


def _push_legs(call: Call, attempt: Attempt) -> tuple[bytes, bytes]:
    transfer = {"transfer_id": attempt.transfer_id}
    to_decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        **attempt.link,
        # of prefill's engine, but for the suffix that vLLM adds
        "remote_request_id": attempt.transfer_id,
        **transfer,
    }
    return prefill_body(call, {**_TO_PREFILL, **transfer}, NOT_FOR_PREFILL), call.with_params(to_decode)


def _headers(attempt: Attempt) -> tuple[Mapping[str, str], Mapping[str, str]]:
    headers = {"X-Request-Id": attempt.transfer_id}
    return headers, headers


def _learn(answer: bytes) -> dict[str, Any] | None:
    try:
        params = msgspec.json.decode(params_of(answer) or b"null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(params, dict) or params.get("transfer_mode") != "push":
        return None
    return {name: params[name] for name in _IDENTITY if name in params}


VLLM_NIXL = replace(
    VLLM,
    name="vllm-nixl",
    legs=_legs,
    headers=_headers,
    rules=replace(VLLM.rules, handover=params_of),
    whole=for_one_reader,
    kv_path=lambda _headers, _body: None,
    needs_control=None,
)
"""Pairs with NixlConnector; NixlPushConnector works, too, one leg after the other."""

VLLM_NIXL_PUSH = replace(VLLM_NIXL, name="vllm-nixl-push", legs=_push_legs, learn=_learn)
"""Pairs with NixlPushConnector: both legs at once, but for a prefill worker's first request."""
