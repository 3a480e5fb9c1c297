"""Workers with pdlink's own engine: both legs get the client's body, and /health reports everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdlink.errors import WorkerKeyRefused
from pdlink.protocol.kv_path import HEADER

from ..upstream import ask
from .base import Attempt, Dialect, Health, Known

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..openai import Call
    from ..upstream import Asking


def _legs(call: Call, attempt: Attempt) -> tuple[bytes, bytes]:
    seed = call.seed if call.seed is not None else attempt.seed
    common = {"transfer_id": attempt.transfer_id, "seed": seed, "created": attempt.created}
    return (
        call.with_params({**common, "leg": "prefill"}),
        call.with_params({**common, "leg": "decode", "prefill": attempt.prefill}),
    )


def read_health(status: int, body: bytes) -> Health | str:
    """The answer of a worker to GET /health."""
    try:
        health = msgspec.json.decode(body, type=Health)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"GET /health answered {status} with something else: {error}"
    if health.status == "ok" and status != 200:
        return msgspec.structs.replace(health, status=f"ok, with HTTP {status}")
    return health


async def _look(asking: Asking, known: Known) -> Health | str:
    health = read_health(*await ask(asking, "/health"))
    if isinstance(health, Health) and not (known.well and known.last and known.last.epoch == health.epoch):
        # Health needs no key, so a good answer proves nothing about ours.
        reply = await ask(asking, "/v1/models")
        if reply.status in (401, 403):
            raise WorkerKeyRefused(f"GET /v1/models answered {reply.status}: {PDLINK.key_setting}")
    return health


def _kv_path(headers: Mapping[str, str], _body: bytes) -> str | None:
    return headers.get(HEADER)


PDLINK = Dialect("pdlink", _legs, _look, prefill_streams=True, kv_path=_kv_path)
