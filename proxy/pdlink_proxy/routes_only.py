"""POST /route: the decision alone, for edges that send both legs and stream from decode themselves.

Above some thousand requests a second a proxy should not carry tokens. A decision counts in the load of its workers,
as a request would, until the edge reports its end (DELETE /route/ID) or it expires.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import web

from pdlink.api import route_token
from pdlink.api.errors import refusal_of, refused
from pdlink.api.fields import BadField, SomeTokens, decoded
from pdlink.api.keys import key_of
from pdlink.api.openai import CHAT, COMPLETIONS, Call, parse
from pdlink.config import read_secrets
from pdlink.errors import InvalidRequest, NoWorker, Overloaded

from .admission import Admission
from .decision_log import Logged, hash_ids, logged_attempt
from .dialects import TransferTerms
from .fleet import wanted
from .steps import FIRST, Leg, Placed, Unplaced, Waits

if TYPE_CHECKING:
    from .fleet import PlacementRequest, WorkerState
    from .services import Services
    from .steps import Event
    from .worker import Worker

PATH = "/route"
MAX_RESERVED = 100_000
"""Decisions that have not ended."""
MAX_PREFIX = 65_536


class _Digest(msgspec.Struct):
    """What stands for a prompt that the edge keeps to itself."""

    num_tokens: SomeTokens | None = None
    prefix: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_PREFIX)] = ()
    """Names of its beginnings, each 512 tokens longer than the one before: equal names mean equal beginnings."""


@dataclass(slots=True)
class _Reserved:
    admission: Admission
    states: tuple[tuple[WorkerState, int], ...]
    timer: asyncio.TimerHandle
    key: str
    """That asked for it."""


class Decider:
    """The decisions of one proxy that have not ended."""

    def __init__(self, services: Services) -> None:
        """Raises ConfigError for a key file without keys."""
        self._services = services
        file = services.config.route_key_file
        self._secret = read_secrets(file, "route_key_file")[0].encode() if file is not None else None
        self._reserved: dict[str, _Reserved] = {}

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post(PATH, self.decide)
        app.router.add_delete(PATH + "/{id}", self.report)

    async def decide(self, request: web.Request) -> web.Response:
        """200 with the workers, and what to change in the client's body for each of them."""
        services = self._services
        data = await services.entry.admitted(request)
        if isinstance(data, web.Response):
            return data
        if len(self._reserved) >= MAX_RESERVED:
            retry_after_s = services.shared.queue.retry_after_s()
            message = f"{MAX_RESERVED} decisions are open; report their ends"
            return refused(Overloaded.http_status, message, Overloaded.code, retry_after_s=retry_after_s)
        try:
            call, asked = _read(data)
        except BadField as error:
            return refusal_of(error)
        if (refusal := services.entry.over_limit(request, asked.total_tokens)) is not None:
            return refusal
        request_id = services.entry.leg_headers(request.headers)["X-Request-Id"]
        services.entry.own(request_id, request.headers)
        key = key_of(request.headers)
        placed, admission = await self._place(call, asked, request_id, key)
        if isinstance(placed, Unplaced):
            kind = InvalidRequest if placed.unfit else Overloaded if placed.full else NoWorker
            again_s = None if placed.unfit else services.shared.queue.retry_after_s()
            return refused(kind.http_status, placed.message, kind.code, retry_after_s=again_s)
        return web.Response(body=self._reserve(call, admission, placed, key), content_type="application/json")

    async def report(self, request: web.Request) -> web.Response:
        """DELETE /route/ID: the request of this decision has ended."""
        services = self._services
        if not services.entry.may_enter(request):
            return services.entry.no_entry(request)
        transfer_id, only = request.match_info["id"], services.entry.sees_only(request)
        if self.ended(transfer_id, only):
            return web.Response(status=204)
        if services.siblings is not None and any(
            (await services.siblings.ask_all("route_ended", [transfer_id, only])).values()
        ):
            return web.Response(status=204)
        return refused(404, "no such decision; it has expired or ended", "not_found")

    def ended(self, transfer_id: str, only: str | None) -> bool:
        """The request of this decision has ended; False if it is not one of this process, and of this key alone."""
        reserved = self._reserved.get(transfer_id)
        if reserved is None or only not in (None, reserved.key):
            return False
        self._free(transfer_id, served=True)
        return True

    async def _place(
        self, call: Call, asked: PlacementRequest, request_id: str, tenant: str
    ) -> tuple[Placed | Unplaced, Admission]:
        shared, loop = self._services.shared, asyncio.get_running_loop()
        later: asyncio.Future[Placed | Unplaced] = loop.create_future()

        def happen(event: Event) -> None:
            if isinstance(event, Placed | Unplaced) and not later.done():
                later.set_result(event)

        def failed(error: Exception) -> None:
            if not later.done():
                later.set_exception(error)

        admission = Admission(
            shared,
            asked,
            request_id=request_id,
            tenant=tenant,
            whole=shared.whole(call),
            happen=happen,
            failed=failed,
        )
        if shared.tokenizing is not None and (waits := shared.tokenizing.prepare(asked, call)) is not None:
            await waits
        found = admission.place(FIRST)
        if not isinstance(found, Waits):
            return found, admission
        try:
            async with asyncio.timeout_at(found.until_s):
                return await later, admission
        except TimeoutError:
            return Unplaced(found.message), admission
        finally:
            admission.leave()

    def _reserve(self, call: Call, admission: Admission, placed: Placed, key: str) -> bytes:
        services, shared, asked = self._services, self._services.shared, admission.wanted
        prefill, decode = admission.chosen.get(Leg.PREFILL), admission.chosen[Leg.DECODE]
        transfer_id, now = f"xfer-{secrets.token_hex(16)}", time.monotonic()
        expires = math.ceil(time.time() + services.config.route_s)
        answer: dict[str, Any] = {"transfer_id": transfer_id, "expires": expires, "kv": admission.recomputed}
        load = [(decode, asked.total_tokens)]
        signed = self._signed(transfer_id, expires, prefill)
        to_decode: dict[str, Any] = {"url": decode.url, "label": decode.label, "headers": signed[1]}
        answer["decode"] = {**to_decode, "set": {}, "remove": []}
        if prefill is not None:
            dialect = shared.dialect
            transfer = TransferTerms(
                transfer_id=transfer_id,
                created=int(time.time()),
                seed=secrets.randbits(32),
                prefill=prefill.address,
                prefill_url=prefill.url,
                link=prefill.link,
            )
            bodies = dialect.legs(call, transfer)
            more = dialect.headers(transfer) if dialect.headers is not None else ({}, {})
            to_prefill = {**signed[0], **more[0], **prefill.headers}
            answer["prefill"] = {"url": prefill.url, "label": prefill.label, "headers": to_prefill}
            answer["prefill"] |= _changes(call, bodies[0])
            answer["decode"] = {**to_decode, "headers": {**signed[1], **more[1]}, **_changes(call, bodies[1])}
            # Then decode's `kv_transfer_params` are those of prefill's answer.
            answer["decode"]["after_prefill"] = dialect.rules.handover is not None
            load.append((prefill, max(1, asked.num_tokens - admission.cached_tokens)))
        states = tuple((shared.pools.sent(asked, worker, tokens, now), tokens) for worker, tokens in load)
        timer = asyncio.get_running_loop().call_later(services.config.route_s, self._free, transfer_id)
        self._reserved[transfer_id] = _Reserved(admission, states, timer, key)
        return msgspec.json.encode(answer)

    def _signed(
        self, transfer_id: str, expires: int, prefill: Worker | None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Headers of the prefill and the decode leg."""
        if self._secret is None:
            return {}, {}
        peer = route_token.peer_of(prefill.address) if prefill is not None else ""
        tokens = (
            route_token.RouteToken("prefill", transfer_id, "", expires),
            route_token.RouteToken("decode", transfer_id, peer, expires),
        )
        prefills, decodes = ({route_token.HEADER: token.signed(self._secret)} for token in tokens)
        return prefills, decodes

    def _free(self, transfer_id: str, *, served: bool = False) -> None:
        reserved = self._reserved.pop(transfer_id)
        reserved.timer.cancel()
        for state, tokens in reserved.states:
            state.finished(tokens, time.monotonic(), served=served)
        self._log_end(transfer_id, reserved, "reported" if served else "expired")
        self._services.shared.serve_queue()

    def _log_end(self, transfer_id: str, reserved: _Reserved, outcome: str) -> None:
        """For `pdlink explain` and the decision log: its edge does not say what became of the legs."""
        admission, shared = reserved.admission, self._services.shared
        placed = admission.decision
        admission.note("ended", f"route {outcome}")
        if shared.decision_log is None or not admission.sampled or placed is None:
            return
        total_s = asyncio.get_running_loop().time() - admission.started_s
        attempt = logged_attempt(placed, transfer_id, dict.fromkeys(("prefill", "decode"), outcome))
        shared.decision_log.add(
            Logged(
                timestamp=int((time.time() - total_s) * 1000),
                input_length=admission.wanted.num_tokens,
                output_length=0,
                hash_ids=hash_ids(admission.wanted.keys),
                request_id=placed.request_id,
                model=admission.wanted.model,
                outcome=outcome,
                kv=admission.recomputed or "unknown",
                reason="",
                queued_s=placed.waited_s,
                prefill_s=None,
                ttft_s=None,
                total_s=total_s,
                attempts=[attempt],
            )
        )

    async def close(self, _app: web.Application) -> None:
        """The proxy ends."""
        for reserved in self._reserved.values():
            reserved.timer.cancel()
        self._reserved.clear()


def _read(data: bytes) -> tuple[Call, PlacementRequest]:
    """A client's request as it would be sent to the proxy; or one with a digest in place of its prompt."""
    fields: dict[str, msgspec.Raw] = decoded(data, dict[str, msgspec.Raw])
    digest: _Digest = decoded(data, _Digest)
    if digest.num_tokens is None:
        call = parse(CHAT if "messages" in fields else COMPLETIONS, data)
        return call, wanted(call, None)
    kept = {name: raw for name, raw in fields.items() if name not in ("num_tokens", "prefix")}
    call = parse(COMPLETIONS, msgspec.json.encode({**kept, "prompt": ""}))
    asked = wanted(call, None)
    asked.num_tokens, asked.chain = digest.num_tokens, digest.prefix
    return call, asked


def _changes(call: Call, body: bytes) -> dict[str, Any]:
    """What a leg's body has other than the client's: fields to set, and names to remove."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    changed = {name: raw for name, raw in fields.items() if bytes(raw) != bytes(call.fields.get(name, b""))}
    return {"set": changed, "remove": sorted(call.fields.keys() - fields.keys())}
