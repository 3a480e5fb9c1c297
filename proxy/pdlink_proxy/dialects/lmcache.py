"""vLLM servers that move their KV with LMCache's own P/D backend: prefill pushes into decode's buffer.

Shapes: LMCache 0.5.6 (integration/vllm/vllm_v1_adapter.py, v1/storage_backend/pd_backend.py). Prefill is told
decode's ports, and each of its ranks tells the proxy when its part has arrived. Decode then gets the client's own
request and finds the KV of its prompt in its cache; it computes the last tokens itself. LMCache's own proxy has
prefill sample the first token and makes up its event; that needs the prompt's tokens and loses fields of chats.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..steps import Leg
from .addresses import pairs_of
from .arrivals import Arrivals
from .vllm import NOT_FOR_PREFILL, VLLM, for_one_reader, prefill_body

if TYPE_CHECKING:
    from pdlink.config import ProxyConfig

    from ..openai import Call
    from .base import Attempt

_FORM = "tcp://HOST:INIT_PORT,tcp://HOST:ALLOC_PORT for each rank of a decode worker"


def _legs(call: Call, attempt: Attempt) -> tuple[bytes, bytes]:
    ranks = pairs_of(attempt.decode_control, _FORM)
    spec = {
        "req_id": attempt.transfer_id,
        "receiver_host": ranks[0][0].host,
        "receiver_init_port": [init.port for init, _ in ranks],
        "receiver_alloc_port": [alloc.port for _, alloc in ranks],
    }
    return prefill_body(call, {"disagg_spec": spec}, NOT_FOR_PREFILL), call.body


def _arrivals(config: ProxyConfig) -> Arrivals:
    return Arrivals(config.notify)


LMCACHE = replace(
    VLLM,
    name="lmcache",
    legs=_legs,
    # null: decode finds the KV by its tokens
    rules=replace(VLLM.rules, handover=lambda _answer: b"null"),
    whole=for_one_reader,
    kv_path=lambda _headers, _body: None,
    needs_control=Leg.DECODE,
    check_control=partial(pairs_of, form=_FORM),
    arrivals=_arrivals,
)
