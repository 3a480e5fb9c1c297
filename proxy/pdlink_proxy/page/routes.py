"""The page's files and its state over HTTP, and what fills its memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdlink.events import Event, PeerChanged, listen

from ..steps import Leg
from ..worker import State
from .memory import STEP_S, StepFacts
from .view import SHOWN_REQUESTS, WINDOW_S, view

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..services import Services

    Handler = Callable[[web.Request], Awaitable[web.Response]]

PREFIX = "/pdlink/"
FILES = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_MAX_ASKED = 64
"""Of more workers, nobody asks every step: while nobody looks, their KV is not in the charts."""
_MAX_MISFITS = 8
_MAX_SESSIONS = 20
_ENGINES = {"pdlink": "built-in", "vllm": "vLLM", "vllm-nixl": "vLLM with NIXL", "sglang": "SGLang"}
"""By dialect."""
_HEADERS = {
    # Everything comes from this proxy, and nothing is written into the page as code.
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page(app: web.Application, services: Services) -> None:
    """GET /pdlink/ with its files, which hold no data, and GET /pdlink/state, which wants a key like other routes."""

    async def moved(_: web.Request) -> web.Response:
        return web.Response(status=308, headers={"Location": "pdlink/"})  # relative: a prefix may stand before it

    async def state(request: web.Request) -> web.Response:
        if not services.entry.may_look(request):
            return services.entry.no_entry(request)
        if services.entry.sees_only(request) is not None:
            return services.entry.operators_only()
        return web.Response(
            body=msgspec.json.encode(await state_of(services)),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    app.router.add_get(PREFIX.rstrip("/"), moved)
    app.router.add_get(PREFIX + "state", state)
    for path in sorted(path for path in FILES.rglob("*") if path.suffix in _TYPES):
        name = path.relative_to(FILES).as_posix()
        app.router.add_get(PREFIX + ("" if name == "index.html" else name), _file(path))


def _file(path: Path) -> Handler:
    body, kind = path.read_bytes(), _TYPES[path.suffix]

    async def send(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    return send


async def state_of(services: Services) -> dict[str, object]:
    """See `view`."""
    status, reason = services.standing()
    reports = await services.reports.now()
    pools, beside = services.pools, await services.beside(services.record_share)
    now_s, (running, queued) = time.time(), services.num_doing(beside)
    remembered = services.memory.said(now_s)
    shown = view(
        now_s=now_s,
        status=status,
        reason=reason,
        workers=[{**worker, "side": side.value} for side in Leg for worker in services.described(side, beside)],
        refused_pairs=[pair.describe() for pair in pools.refusals],
        mismatched=[each.describe() for each in pools.mismatches],
        records=services.recorded(beside, now_s - WINDOW_S, SHOWN_REQUESTS),
        reports=reports,
        reported_s=services.reports.at_s,
        rates=services.reports.rates,
        engine=_ENGINES.get(services.dialect.name, services.dialect.name),
        running=running,
        queued=queued,
        happened=remembered["happened"],
    )
    shown |= remembered
    shown["sessions"] = services.sessions.shown(time.monotonic())[:_MAX_SESSIONS]
    if services.siblings is not None:
        shown["processes"] = services.siblings.said(beside)
    return shown


async def remember(services: Services) -> None:
    """Fill `PageMemory`, until cancelled."""
    pools, memory = services.pools, services.memory

    def heard(event: Event) -> None:
        if isinstance(event, PeerChanged):
            for worker in pools.all:
                # One of both sides has a label on each; who is restarted on purpose is not missed.
                quiet = worker.state is not State.OK and time.monotonic() < worker.quiet_until_s
                if worker.id == event.peer and worker.state.value == event.state and not quiet:
                    memory.worker_changed(time.time(), worker.label, event.state, event.reason)
                    break

    with contextlib.ExitStack() as stack:
        stack.callback(listen(heard))
        while True:
            await asyncio.sleep(STEP_S)
            beside = await services.beside(services.record_share)
            reports = await services.reports.now() if len(pools.all) <= _MAX_ASKED else {}
            healths = [(worker.label, worker.health) for worker in pools.all if worker.health is not None]
            refused = [pair.describe() for pair in itertools.islice(pools.refusals, _MAX_MISFITS)]
            running, queued = services.num_doing(beside)
            facts = StepFacts(
                records=[*services.records.heads(), *(each for other in beside.values() for each in other.records)],
                num_ended=services.records.num_ended + sum(each.num_ended for each in beside.values()),
                running=running,
                queued=queued,
                reports=reports,
                problems={
                    f"{place} of {label}": why for label, health in healths for place, why in health.problems.items()
                },
                misfits=[
                    (f"{pair['prefill']} and {pair['decode']}", f"{pair['factor']} differs") for pair in refused
                ],
                labels={worker.label for worker in pools.all},
            )
            memory.step(time.time(), facts)
