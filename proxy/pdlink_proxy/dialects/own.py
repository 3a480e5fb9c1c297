"""Workers with pdlink's own engine: both legs get the client's body, and /health reports everything."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from pdlink.api.health import Health
from pdlink.api.kv_path import HEADER, checked
from pdlink.api.legs import AloneParams, DecodeParams, PrefillParams
from pdlink.api.session import EndSessionRequest
from pdlink.errors import WorkerKeyRefused
from pdlink.observe.sources import Sourced  # noqa: TC001  (msgspec reads the annotation at run time)

from ..recovery import Resumes
from ..upstream import ask, post
from .base import Dialect, KnownHealth, Said, TransferTerms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdlink.api.openai import Call

    from ..upstream import Asking


def _legs(call: Call, transfer: TransferTerms) -> tuple[bytes, bytes]:
    seed = call.seed if call.seed is not None else transfer.seed
    name, created = transfer.transfer_id, transfer.created
    return (
        call.with_params(PrefillParams(transfer_id=name, seed=seed, created=created, source=transfer.source)),
        call.with_params(DecodeParams(transfer_id=name, seed=seed, created=created, prefill=transfer.prefill)),
    )


def _begun(call: Call, seed: int) -> Call:
    # One seed for all attempts, with which another worker draws the same tokens.
    if call.seed is not None:
        return call.extended({"return_token_ids": True})
    return call.extended({"return_token_ids": True, "seed": seed}, seed=seed)


def _behind(call: Call, token_ids: Sequence[int]) -> Call:
    own = msgspec.json.decode(call.fields.get("output_token_ids", b"[]"), type=list[int])  # the client's
    return call.extended({"output_token_ids": [*own, *token_ids]})


def read_health(status: int, body: bytes) -> Health | str:
    """The answer of a worker to GET /health."""
    try:
        health = msgspec.json.decode(body, type=Health)
    except (ValueError, RecursionError) as error:
        return f"GET /health answered {status} with something else: {error}"
    if health.status == "ok" and status != 200:
        return msgspec.structs.replace(health, status=f"ok, with HTTP {status}")
    return health


async def _look(asking: Asking, known: KnownHealth) -> Health | str:
    health = read_health(*await ask(asking, "/health"))
    if isinstance(health, Health) and not (known.well and known.last and known.last.epoch == health.epoch):
        # Health needs no key, so a good answer proves nothing about ours.
        reply = await ask(asking, "/v1/models")
        if reply.status in (401, 403):
            raise WorkerKeyRefused(f"GET /v1/models answered {reply.status}: {PDLINK.key_setting}")
    return health


def _said(headers: Mapping[str, str], _body: bytes) -> Said:
    return Said(checked(headers.get(HEADER)))


class _Sources(msgspec.Struct):
    sources: tuple[Sourced, ...]


async def _sources(asking: Asking, request_id: str) -> tuple[Sourced, ...]:
    reply = await ask(asking, f"/pdlink/sources?request={quote(request_id, safe='')}")
    if reply.status != 200:
        raise ValueError(f"GET /pdlink/sources answered {reply.status}")
    return msgspec.json.decode(reply.body, type=_Sources).sources


class _Ended(msgspec.Struct):
    ended: bool


async def _end_session(asking: Asking, session_id: str, salt: str, owner: str | None) -> bool:
    body = EndSessionRequest(session_id, salt, owner)
    url = f"{asking.url}/pdlink/cache/end_session"
    reply = await post(asking.client, url, body, timeout_s=asking.timeout_s)
    return reply.status == 200 and msgspec.json.decode(reply.body, type=_Ended).ended  # 404: it has no tiers


PDLINK = Dialect(
    "pdlink",
    _legs,
    _look,
    alone=lambda call, source: call.with_params(AloneParams(source=source)),
    prefill_streams=True,
    said=_said,
    head_says=True,
    resumes=Resumes(lambda _call, _links: "", _begun, _behind),
    sources=_sources,
    end_session=_end_session,
)
