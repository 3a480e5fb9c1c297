"""vLLM servers that move their KV with vLLM's own NixlConnector or NixlPushConnector.

Shapes: vLLM 0.32, kv_connector/v1/nixl. Decode's leg follows prefill's answer and gets its parameters.

NixlPushConnector pairs registration and prompt by X-Request-Id (`get_base_request_id`): two requests of one id would
get each other's KV. So both legs are sent the transfer id in its place, whichever connector there is: NixlConnector
pairs by an id that vLLM makes unique itself, and the proxy is not told which of them the servers run. The client
keeps its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .base import Said
from .vllm import NOT_FOR_PREFILL, VLLM, for_one_reader, params_of, prefill_body, rules_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.api.openai import Call

    from .base import TransferTerms

_TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def _legs(call: Call, _transfer: TransferTerms) -> tuple[bytes, bytes]:
    # Let prefill reject what vLLM rejects: KV that decode does not fetch is held for minutes (480 s in 0.32).
    return prefill_body(call, _TO_PREFILL, NOT_FOR_PREFILL), call.body


def _headers(transfer: TransferTerms) -> tuple[Mapping[str, str], Mapping[str, str]]:
    headers = {"X-Request-Id": transfer.transfer_id}
    return headers, headers


_RULES = replace(VLLM.rules, handover=params_of)
VLLM_NIXL = replace(
    VLLM,
    name="vllm-nixl",
    legs=_legs,
    headers=_headers,
    rules=_RULES,
    rules_of=rules_for(_RULES),
    whole=for_one_reader,
    said=lambda _headers, _body: Said(),
    prefill_says=False,
    needs_control=False,
)
