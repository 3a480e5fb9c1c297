"""GET /pdlink/timeline: what all workers and this proxy did lately, or with one request, as one trace."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdlink.api.errors import refused
from pdlink.observe.spans import new_span_id
from pdlink.observe.timeline import Dump, clock
from pdlink.observe.trace import TRACE_HEADER, TRACE_TYPE, TracedRequest, laid, make

from .http_connection import HttpError
from .records import MAX_RECORDS
from .spans import request_spans
from .upstream import Asking, ask
from .worker import State

if TYPE_CHECKING:
    from pdlink.observe.trace import Laid

    from .records import RequestRecord
    from .services import Services
    from .worker import Worker

PATH = "/pdlink/timeline"
_TIMEOUT_S = 10.0
_MAX_NBYTES = 64 * 2**20
"""Of one worker's events: 64 transfers of a model with 100 layers in 30 chunks each are 30 MiB."""


def add_timeline(app: web.Application, services: Services) -> None:
    """With `?request=ID`, an X-Request-Id or X-Pdlink-Transfer, of that one alone."""

    async def timeline(request: web.Request) -> web.Response:
        entry = services.entry
        if not entry.may_look(request):
            return entry.no_entry(request)
        asked, key = request.query.get("request"), entry.sees_only(request)
        if key is not None and (asked is None or not await services.owns(key, asked)):
            return entry.operators_only()
        kept = services.recorded(await services.beside(MAX_RECORDS))
        records = [each for each in kept if asked is None or asked in (each.request_id, *_transfers(each))]
        only = None if asked is None else {asked, *(name for each in records for name in _transfers(each))}
        both_sides = {worker.url: worker for worker in services.pools.all if worker.state is not State.UNREACHABLE}
        answers = await asyncio.gather(*(_ask(services, worker) for worker in both_sides.values()))
        workers = [answer for answer in answers if not isinstance(answer, str)]
        requests = [TracedRequest(_transfers(each), request_spans(each, new_span_id())) for each in records]
        made = await asyncio.to_thread(make, workers, requests, only=only)
        if only is not None and not made.num_transfers + made.num_requests:
            got = (asked or "")[:80]
            text = f"request: {got!r} is not among the last {MAX_RECORDS} that have ended; give another id"
            return refused(404, text, "not_found")
        missing = [answer for answer in answers if isinstance(answer, str)]
        words = f"{made}; without {', '.join(missing)}" if missing else str(made)
        return web.Response(body=made.data, content_type=TRACE_TYPE, headers={TRACE_HEADER: words})

    app.router.add_get(PATH, timeline)


async def _ask(services: Services, worker: Worker) -> Laid | str:
    """Its label if it does not answer."""
    began_s = time.monotonic()
    try:
        reply = await ask(Asking(services.shared.control, worker.url, _TIMEOUT_S), "/pdlink/events", _MAX_NBYTES)
        answered_s = time.monotonic()
        if reply.status != 200:
            return worker.label
        dump = await asyncio.to_thread(msgspec.json.decode, reply.body, type=Dump)
    except (HttpError, OSError, ValueError, RecursionError):
        return worker.label
    return laid(msgspec.structs.replace(dump, name=f"{worker.label}: {worker.name}"), clock(), began_s, answered_s)


def _transfers(record: RequestRecord) -> list[str]:
    """Of all its attempts, each once."""
    return list(dict.fromkeys((*(leg.transfer_id for leg in record.legs), record.transfer_id)))
