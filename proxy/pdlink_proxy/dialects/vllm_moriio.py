"""vLLM servers that move their KV with vLLM's MoRIIOConnector: decode reads it, or prefill writes it.

Shapes: vLLM 0.32, kv_connector/v1/moriio. Read: one leg after the other, decode gets the parameters of prefill's
answer. Write: both at once, and each is told the other's ports. The connector takes them from `kv_transfer_params`
where X-Request-Id holds no addresses (`add_new_req`); an id of a client that does is not passed on (`app.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .addresses import HostPort, host_of, pairs_of
from .vllm import NOT_FOR_PREFILL, VLLM, for_one_reader, params_of, prefill_body

if TYPE_CHECKING:
    from ..openai import Call
    from .base import Attempt

HANDSHAKE_PORT, NOTIFY_PORT = 6301, 61005
_FORM = "tcp://HOST:HANDSHAKE_PORT,tcp://HOST:NOTIFY_PORT"


def _place(url: str, control: tuple[str, ...]) -> dict[str, Any]:
    host = host_of(url)
    default = (HostPort(host, HANDSHAKE_PORT), HostPort(host, NOTIFY_PORT))
    handshake, notify = (pairs_of(control, _FORM) or (default,))[0]
    return {
        "remote_host": handshake.host,
        "remote_handshake_port": handshake.port,
        "remote_notify_port": notify.port,
    }


def _to_prefill(attempt: Attempt) -> dict[str, Any]:
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        # The connector reads these two without a default.
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": attempt.transfer_id,
    }


def _read_legs(call: Call, attempt: Attempt) -> tuple[bytes, bytes]:
    return prefill_body(call, _to_prefill(attempt), NOT_FOR_PREFILL), call.body


def _write_legs(call: Call, attempt: Attempt) -> tuple[bytes, bytes]:
    to_prefill = {**_to_prefill(attempt), **_place(attempt.decode_url, attempt.decode_control)}
    to_decode = {
        **_to_prefill(attempt),
        "do_remote_decode": False,
        "do_remote_prefill": True,
        **_place(attempt.prefill_url, attempt.prefill_control),
    }
    return prefill_body(call, to_prefill, NOT_FOR_PREFILL), call.with_params(to_decode)


VLLM_MORIIO = replace(
    VLLM,
    name="vllm-moriio",
    legs=_read_legs,
    rules=replace(VLLM.rules, handover=params_of),
    whole=for_one_reader,
    kv_path=lambda _headers, _body: None,
    needs_control=None,
)
"""Its read mode."""

VLLM_MORIIO_WRITE = replace(
    VLLM_MORIIO,
    name="vllm-moriio-write",
    legs=_write_legs,
    rules=VLLM.rules,
    check_control=partial(pairs_of, form=_FORM),
)
"""Its write mode, of one data-parallel rank per server."""
