"""POST /pdlink/probe: one small real transfer between two workers that the caller names, and what it took.

For `pdlink doctor`, which measures every pair of a deployment. Placement has no say here, and no request record,
metric or breaker of a worker's hears of it. One probe at a time; the others wait.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web

from pdlink._http import header_lines
from pdlink.api import kv_path
from pdlink.api.errors import error_of, excerpt, refusal_of
from pdlink.api.fields import decoded
from pdlink.api.health import Health
from pdlink.api.openai import COMPLETIONS, parse
from pdlink.errors import InvalidRequest, PdlinkError

from .dialects import KnownHealth, TransferTerms
from .http_connection import HttpError
from .page.report import Report
from .steps import Leg
from .upstream import Asking, Streamed, ask, describe, printable, tell_to_stop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.observe.timeline import EndedTransfer

    from .services import Services
    from .worker import Worker

PATH = "/pdlink/probe"
MAX_TOKENS = 8192
_PROBED = frozenset({"pdlink", "vllm"})
"""Dialects whose legs start at once and say what became of the KV."""
_LEG_S = 30.0
"""Deadline of both legs together."""
_REPORT_S = 1.0
"""The sender's end is told to its listeners a moment after decode has answered."""
_ANSWER_NBYTES = 1 << 20


class _Asked(msgspec.Struct, frozen=True):
    prefill: str
    """Label of the worker, as GET /health lists it."""
    decode: str
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 256
    """Of the prompt, which is random: no cache knows it."""


class Probed(msgspec.Struct, frozen=True):
    """The answer. Durations only."""

    prefill: str
    decode: str
    kv: str
    """How decode got the KV, as in X-Pdlink-KV; `unknown` if there was no answer."""
    error: str = ""
    """Of the leg that failed."""
    factor: str = ""
    """What differs, if they refused each other; the two values follow, decode's first."""
    local: str = ""
    remote: str = ""
    took_s: float = 0.0
    """Until both legs had answered: a prompt computed, moved, and two tokens."""
    transfer_id: str = ""
    lane: str = ""
    """Of the transfer, as its sender says; empty, like the rest, for an engine that does not say."""
    nbytes: int = 0
    moving_s: float = 0.0
    """While something was in flight."""
    exposed_s: float = 0.0


class Prober:
    """The probes of one proxy."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._one = asyncio.Lock()

    async def probe(self, request: web.Request) -> web.Response:
        entry = self._services.entry
        if entry.may_look(request) and entry.sees_only(request) is not None:
            return entry.operators_only()
        data = await entry.admitted(request, operators=True)
        if isinstance(data, web.Response):
            return data
        try:
            asked: _Asked = decoded(data, _Asked)
            prefill, decode = self._worker(Leg.PREFILL, asked.prefill), self._worker(Leg.DECODE, asked.decode)
            if (name := self._services.dialect.name) not in _PROBED:
                raise InvalidRequest(f"dialect: got {name}; expected pdlink or vllm; send a request instead")
        except InvalidRequest as error:
            return refusal_of(error)
        if (refusal := self._services.entry.over_limit(request, asked.num_tokens)) is not None:
            return refusal
        async with self._one:
            probed = await self._probed(prefill, decode, asked.num_tokens)
        return web.Response(body=msgspec.json.encode(probed), content_type="application/json")

    def _worker(self, leg: Leg, label: str) -> Worker:
        """Raises InvalidRequest unless there is such a worker, and it has been heard."""
        workers = self._services.pools.workers[leg]
        found = next((worker for worker in workers if worker.label == label), None)
        if found is None:
            known = ", ".join(worker.label for worker in workers)
            raise InvalidRequest(f"{leg.value}: got {label[:80]!r}; there are {known}; name one of them")
        if found.health is None:
            raise InvalidRequest(f"{leg.value}: {label} has not answered yet; wait until GET /health lists it as ok")
        return found

    async def _probed(self, prefill: Worker, decode: Worker, num_tokens: int) -> Probed:
        dialect = self._services.dialect
        transfer_id, began_s = f"probe-{secrets.token_hex(16)}", time.monotonic()
        ids = [33 + byte % 90 for byte in secrets.token_bytes(num_tokens)]  # printable: no tokenizer lacks them
        asked = {"model": decode.health.model if decode.health else "", "prompt": ids, "max_tokens": 2}
        call = parse(COMPLETIONS, msgspec.json.encode({**asked, "temperature": 0}))
        attempt = TransferTerms(
            transfer_id=transfer_id,
            created=int(time.time()),
            seed=secrets.randbits(31),
            prefill=prefill.address,
            prefill_url=prefill.url,
            link=prefill.link,
        )
        bodies = dialect.legs(call, attempt)
        legs = [
            asyncio.create_task(self._leg(leg, worker, body, transfer_id))
            for leg, worker, body in zip(Leg, (prefill, decode), bodies, strict=True)
        ]
        answers: dict[Leg, tuple[Mapping[str, str], bytes]] = {}
        error = ""
        try:
            async with asyncio.timeout(_LEG_S):
                for done in asyncio.as_completed(legs):
                    leg, headers, body, problem = await done
                    if not problem:
                        answers[leg] = headers, body
                    elif not error:
                        error = problem
                        await self._stop(decode if leg is Leg.PREFILL else prefill, transfer_id, error)
                    if leg is Leg.DECODE:  # prefill's then waits for nobody
                        break
        except TimeoutError:
            error = error or f"no answer within {_LEG_S:g} s"
        finally:
            for task in legs:
                task.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
            if Leg.PREFILL not in answers and not error:
                await self._stop(prefill, transfer_id, "the other leg has ended")
        took_s = time.monotonic() - began_s
        said = kv_path.checked(dialect.said(*answers[Leg.DECODE]).kv) if Leg.DECODE in answers else None
        found = Probed(
            prefill.label,
            decode.label,
            kv=said or kv_path.UNKNOWN,
            error=printable(error),
            took_s=took_s,
            transfer_id=transfer_id,
        )
        if said is not None and said.startswith(kv_path.recomputed("refused")):
            refused = await self._refused(prefill, decode)
            return found if refused is None else msgspec.structs.replace(found, **refused)
        sent = await self._sent(prefill, transfer_id) if said == kv_path.TRANSFERRED else None
        if sent is None:
            return found
        return msgspec.structs.replace(
            found, lane=sent.lane, nbytes=sent.nbytes, moving_s=sent.moving_s, exposed_s=sent.exposed_s
        )

    async def _leg(
        self, leg: Leg, worker: Worker, body: bytes, request_id: str
    ) -> tuple[Leg, Mapping[str, str], bytes, str]:
        """Its headers and body, or why there are none."""
        answer = Streamed()
        lines = header_lines({"X-Request-Id": request_id, **worker.headers})
        request = self._services.shared.control.start("POST", worker.url + COMPLETIONS, answer, body, lines)
        answer.request = request
        try:
            await answer.head
            whole = await answer.read(_ANSWER_NBYTES)
        except (HttpError, OSError) as error:
            return leg, {}, b"", f"{worker.label}: {describe(error)}"
        finally:
            request.leave()
        if answer.status != 200:
            return leg, {}, b"", f"{worker.label}: {answer.status}, {error_of(whole).message or excerpt(whole)}"
        return leg, answer.headers, whole, ""

    async def _stop(self, worker: Worker, transfer_id: str, reason: str) -> None:
        if not self._services.dialect.rules.untold:
            timeout_s = self._services.config.connect_timeout_s
            control = self._services.shared.control
            await tell_to_stop(control, worker.url, transfer_id, reason, timeout_s=timeout_s)

    async def _refused(self, prefill: Worker, decode: Worker) -> dict[str, str] | None:
        """What differs, by decode's health of now: the last poll may be older than the refusal."""
        asking = Asking(self._services.shared.control, decode.url, _REPORT_S)
        try:
            health = await self._services.dialect.look(asking, KnownHealth(decode.health, well=True))
        except (HttpError, OSError, PdlinkError):
            return None
        for each in health.refused if isinstance(health, Health) else ():
            if each.peer == prefill.name or each.address.partition("?")[0] in prefill.addresses:
                return {
                    "factor": printable(each.factor),
                    "local": printable(each.local),
                    "remote": printable(each.remote),
                }
        return None

    async def _sent(self, prefill: Worker, transfer_id: str) -> EndedTransfer | None:
        """What its sender measured; None if it does not say."""
        asking = Asking(self._services.shared.control, prefill.url, _REPORT_S)
        deadline_s = time.monotonic() + _REPORT_S
        while time.monotonic() < deadline_s:
            try:
                reply = await ask(asking, "/pdlink/state")
                report = msgspec.json.decode(reply.body, type=Report) if reply.status == 200 else None
            except (HttpError, OSError, ValueError, RecursionError):
                return None
            if report is None:
                return None
            found = [each for each in report.ended if each.transfer_id == transfer_id and each.side == "sender"]
            if found:
                return found[0]
            await asyncio.sleep(0.02)
        return None


def add_probe(app: web.Application, services: Services) -> None:
    app.router.add_post(PATH, Prober(services).probe)
