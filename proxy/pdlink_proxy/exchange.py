"""One client request: does what `flow.py` decides, and reports events to it.

Three tasks work on a request: the handler, which waits for the end and writes it, and one for each leg. A leg's task
writes to the client itself, so a token costs one task switch, and back-pressure of a slow client reaches its own
worker. Two rules keep that right: the flow decides and its actions run without an await in between, and bytes for
the client take their place in line (`_order`) in the same step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdlink.events import FallbackUsed, emit
from pdlink.protocol import kv_path, reasons

from .decisions import Decision, Decisions
from .dialects import Attempt
from .flow import Flow, Limits
from .openai import wanted
from .placement import Queued, Refused
from .queue import Queue, Waiting
from .sse import before_done
from .steps import (
    Answered,
    Blame,
    CancelLeg,
    Chunk,
    ClientLeft,
    EndStream,
    Event,
    Forward,
    Leg,
    LetGo,
    Loss,
    Lost,
    Outcome,
    Place,
    Placed,
    Respond,
    ShuttingDown,
    StartDecode,
    Started,
    StartLegs,
    TellToStop,
    Tick,
    Unplaced,
    Waits,
    Why,
)
from .upstream import LegCall, run_leg, tell_to_stop

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from typing import Any

    import aiohttp

    from pdlink.config import ProxyConfig

    from .dialects import Dialect
    from .metrics import Metrics
    from .openai import Call
    from .pools import Pools, Worker

log = logging.getLogger("pdlink.proxy")

LET_GO_S = 1.0
"""A leg that is not needed any more may take this long to end by itself; then its connection is closed."""

_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it


@dataclass(slots=True, eq=False)
class Shared:
    """Shared by all requests of one proxy."""

    config: ProxyConfig
    dialect: Dialect
    pools: Pools
    metrics: Metrics
    sessions: dict[Leg, aiohttp.ClientSession]
    """One for each leg: if connections are bounded, decode legs that wait for KV must not hold the connections of
    their prefill legs."""
    control: aiohttp.ClientSession
    """For health and stop, which must get through when all connections of the legs are in use."""
    decisions: Decisions
    queue: Queue
    """Exchanges that wait for workers."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Legs, and stop calls."""

    _serving: bool = False

    def serve_queue(self) -> None:
        """Something has changed for those who wait: place them soon."""
        if len(self.queue) and not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve_queue)

    def _serve_queue(self) -> None:
        self._serving = False
        loop = asyncio.get_running_loop()
        while self.queue.serve(lambda waiting: waiting.item.place_now(), loop.time()):
            pass

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this in the background; cancelled when the proxy ends."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the proxy failed unexpectedly", exc_info=error)


@dataclass(slots=True, eq=False)
class _LegRun:
    worker: Worker
    transfer_id: str
    task: asyncio.Task[None]
    timer: asyncio.TimerHandle | None = None


class Exchange:
    """One client request from its checked body to its answer."""

    def __init__(self, shared: Shared, request: web.Request, call: Call, headers: dict[str, str]) -> None:
        """headers: for both legs; X-Request-Id also for the client."""
        config = shared.config
        self._shared, self._request, self._call, self._leg_headers = shared, request, call, headers
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        limits = Limits(
            retries=config.retries,
            first_byte_s=config.first_byte_timeout_s,
            idle_s=config.idle_timeout_s,
            request_s=config.request_timeout_s,
            decode_alone=config.on_no_prefill == "decode_only",
        )
        request_id = headers["X-Request-Id"]
        keyed = not (shared.dialect.key_as_bearer and "Authorization" in headers)
        self._flow = Flow(limits, self._started_s, shared.dialect.rules, request_id=request_id, keyed=keyed)
        self._runs: dict[tuple[int, Leg], _LegRun] = {}
        self._wanted = wanted(call, request.headers.get("X-Session-Id"))
        self._tenant = (request.headers.get("Authorization") or "").partition(" ")[2].strip()
        self._waiting: Waiting | None = None
        self._failure: Exception | None = None
        """Of placing it while it waited."""
        self._place_action: Place | None = None
        """Why workers are wanted now."""
        self._chosen: tuple[Worker | None, Worker] | None = None
        self._cached_tokens = 0
        """Of the prompt, expected at the chosen prefill worker."""
        self._transfer_id = ""
        """Of the newest attempt."""
        self._kv: str | None = None
        """How the KV of the newest attempt came, once known."""
        self._decode_spoke = asyncio.Event()
        """Decode of the newest attempt has sent its headers; a stream's KV path is known then, or not at all."""
        self._request_id = request_id
        self._answer_headers = {"X-Request-Id": request_id}
        self._client: web.StreamResponse | None = None
        self._order = asyncio.Lock()
        self._writing_since_s: float | None = None
        self._final: Respond | EndStream | None = None
        self._wake = asyncio.Event()
        self._armed_s = 0.0

    async def run(self) -> web.StreamResponse:
        """The answer, sent in full if it is a stream. Cancelled if the client leaves."""
        try:
            self._happen(Started())
            await self._until_over()
            return await self._end()
        finally:
            if self._waiting is not None:
                self._shared.queue.remove(self._waiting)
            self._happen(ClientLeft())  # no effect if it is over
            if self._client is not None:
                self._shared.metrics.active_streams.dec()
            outcome = self._flow.outcome or Outcome.FAILED
            self._shared.metrics.requests.labels(outcome.value).inc()
            if outcome is Outcome.OK:
                seconds = self._shared.metrics.request_seconds.labels("true" if self._call.streaming else "false")
                seconds.observe(self._loop.time() - self._started_s)
            if outcome in (Outcome.OK, Outcome.BROKEN):
                self._shared.metrics.kv.labels(kv_path.path_of(self._kv_value)).inc()

    def shut_down(self) -> None:
        """End it now, with an error for the client."""
        self._happen(ShuttingDown())

    # ---- the handler's task

    async def _until_over(self) -> None:
        while not self._flow.over:
            self._wake.clear()
            self._armed_s = self._due_s()
            try:
                async with asyncio.timeout_at(self._armed_s):
                    await self._wake.wait()
            except TimeoutError:
                self._tick()
            if self._failure is not None:
                raise self._failure

    def _due_s(self) -> float:
        """Time of the next tick. Silence of a worker does not count while its last bytes wait for the client."""
        due_s = self._flow.deadline_s
        if self._writing_since_s is not None:
            due_s = max(due_s, self._writing_since_s + self._shared.config.idle_timeout_s)
        return due_s

    def _tick(self) -> None:
        now = self._loop.time()
        if now < self._due_s():
            return
        if self._writing_since_s is not None:
            self._abort_client()
        else:
            self._happen(Tick())

    async def _end(self) -> web.StreamResponse:
        match self._final:
            case Respond(status=status, body=body, content_type=content_type):
                headers = self._answer_headers
                self._note_times("total")
                if 200 <= status < 300:
                    headers[kv_path.HEADER] = self._kv_value
                    if self._flow.prefill_spoke_s is not None:
                        self._shared.metrics.ttft.labels("false").observe(
                            self._flow.prefill_spoke_s - self._started_s
                        )
                if status == 503 or (status == 429 and self._flow.outcome is Outcome.UNAVAILABLE):
                    headers["Retry-After"] = str(self._shared.queue.retry_after_s())
                return web.Response(status=status, body=body, content_type=content_type, headers=headers)
            case EndStream(data=data):
                try:
                    async with asyncio.timeout(self._shared.config.idle_timeout_s), self._order:
                        client = self._client or await self._open_client()
                        await client.write_eof(data)
                        return client
                except TimeoutError:
                    self._abort_client()
                except ConnectionError:
                    log.debug("client left before the end of its stream")
        return self._client or web.Response(status=_CLIENT_CLOSED_REQUEST)

    # ---- events and actions

    def _happen(self, event: Event) -> bytes:
        """Report an event to the flow and do its actions; returns bytes that the caller must send to the client."""
        flow = self._flow
        forward = b""
        for action in flow.on(event, self._loop.time()):
            match action:
                case Forward(data=data):
                    forward = data
                case CancelLeg(attempt=attempt, leg=leg):
                    # If this is the leg's own task, it ends at its next await.
                    self._runs[attempt, leg].task.cancel()
                case Blame():
                    self._blame(action)
                case LetGo(attempt=attempt, leg=leg):
                    run = self._runs[attempt, leg]
                    run.timer = self._loop.call_later(LET_GO_S, run.task.cancel)
                case TellToStop(attempt=attempt, leg=leg, reason=reason):
                    self._shared.spawn(self._tell_to_stop(self._runs[attempt, leg], reason))
                case Place():
                    self._happen(self._place(action))
                case StartLegs():
                    self._start_legs(action)
                case StartDecode(attempt=attempt, params=params):
                    self._start_decode(attempt, self._call.with_params(msgspec.Raw(params)))
                case Respond():
                    self._final = action
                case EndStream(data=data):
                    # The handler's task sends them: a leg's task may be cancelled before it has.
                    self._final = EndStream(before_done(forward + data, kv_path.comment(self._kv_value)))
                    forward = b""
        if flow.over or flow.deadline_s < self._armed_s:
            self._wake.set()
        return forward

    def _blame(self, action: Blame) -> None:
        reason = action.reason.value if isinstance(action.reason, Loss) else str(action.reason)
        self._shared.metrics.leg_failures.labels(action.leg.value, reason).inc()
        run = self._runs[action.attempt, action.leg]
        worker = run.worker
        log.log(
            _level_of(action.reason),
            "request %s, transfer %s: %s leg on %s failed (%s: %s); %s",
            *(self._request_id, run.transfer_id, action.leg.value, worker.url),
            *(reason, action.detail, action.then),
        )
        match action.reason:
            case Loss.CONNECT | Loss.RESET:
                worker.fault(f"a request's connection failed ({reason})")
            case Loss.BARRED:
                worker.barred(f"it refuses requests: {self._shared.dialect.key_setting}")
                worker.poke.set()
            case Loss.MISPAIRED if self._chosen and self._chosen[0]:
                self._shared.pools.refusals.note(*self._chosen, "peer_not_allowed")  # type: ignore[arg-type]
            case Loss.STALE:
                worker.poke.set()  # most likely idle, perhaps gone
            case int() if action.reason in self._shared.dialect.rules.lost_statuses:
                worker.poke.set()  # the engine may be dead while the HTTP server still answers

    def _place(self, action: Place) -> Placed | Unplaced | Waits:
        shared, wanted = self._shared, self._wanted
        self._place_action = action
        first = action.why is Why.FIRST
        if first and not shared.queue.passes(wanted.model):
            empty = not shared.pools.usable(Leg.DECODE, wanted.model)
            found: Placed | Unplaced | Queued = Queued("other requests wait", empty)
        else:
            found = self._try_to_place(action)
        if not isinstance(found, Queued):
            return found
        config, now = shared.config, self._loop.time()
        timeout_s = config.no_worker_timeout_s if found.empty else config.queue_timeout_s
        if timeout_s == 0 or config.queue_size == 0:
            self._note("refused", found.reason)
            return Unplaced(found.reason)
        since_s = self._started_s if first else now
        self._waiting = Waiting(self._tenant, wanted.model, wanted.total_tokens, since_s, self, wanted.priority)
        if not shared.queue.put(self._waiting):
            self._note("refused", "the queue is full")
            return Unplaced(f"queue_size: {config.queue_size} requests wait already; try again later", full=True)
        self._note("waits", found.reason)
        shared.serve_queue()
        return Waits(f"{found.reason}; waited {timeout_s:g} s", now + timeout_s)

    def place_now(self) -> bool:
        """It waits, and may have workers if there are some. Whether it waits no more."""
        if self._place_action is None:
            raise RuntimeError("waits for no workers")
        try:
            found = self._try_to_place(self._place_action)
            if isinstance(found, Queued):
                return False
            self._happen(found)
        except Exception as error:  # noqa: BLE001 -- of any policy: its own request fails, the queue goes on
            self._failure = error
            self._wake.set()
        return True

    def _try_to_place(self, action: Place) -> Placed | Unplaced | Queued:
        shared = self._shared
        whole = shared.dialect.whole(self._call)
        self._wanted.avoid = action.avoid
        needs_prefill = shared.config.on_no_prefill == "fail" and not whole
        choice = shared.pools.choose(self._wanted, needs_prefill=needs_prefill, full=action.why is not Why.FIRST)
        if isinstance(choice, Queued):
            return choice
        if isinstance(choice, Refused):
            self._note("refused", choice.reason)
            return Unplaced(choice.reason, barred=True)
        prefill, decode, self._cached_tokens, refused = choice
        self._kv = None
        self._decode_spoke.clear()
        if whole:
            prefill = None
            self._kv = kv_path.recomputed("prompt_only_decode")
        elif refused is not None:
            self._kv = kv_path.recomputed(reasons.refused_code(refused.factor))
            self._count_fallback("decode_only", "no pair of workers fits together")
        elif prefill is None:
            self._kv = kv_path.recomputed("no_prefill")
            self._count_fallback("decode_only", "no healthy prefill worker")
        elif action.alone or (prefill.key in action.avoid and shared.config.on_no_prefill == "decode_only"):
            prefill = None
            self._kv = kv_path.recomputed("prefill_lost")
            self._count_fallback("decode_only", "this request's prefill was lost")
        if action.why is Why.RETRY:
            self._count_fallback("retry", "a leg was lost")
        shared.metrics.attempts.labels(action.why.value).inc()
        self._chosen = (prefill, decode)
        self._note("placed", self._kv or "", prefill, decode)
        return Placed(prefill.key if prefill else None, decode.key)

    def _note(self, verdict: str, reason: str, prefill: Worker | None = None, decode: Worker | None = None) -> None:
        self._shared.decisions.append(
            Decision(
                self._request_id,
                time.time(),
                self._place_action.why.value if self._place_action else "",
                verdict,
                reason,
                self._wanted.num_tokens,
                self._loop.time() - self._started_s,
                prefill.label if prefill else None,
                decode.label if decode else None,
                prefill.work.load if prefill else None,
                decode.work.load if decode else None,
                self._cached_tokens if prefill else 0,
            )
        )

    def _count_fallback(self, kind: str, reason: str) -> None:
        self._shared.metrics.fallbacks.labels(kind).inc()
        emit(FallbackUsed(kind=kind, reason=reason))

    def _start_legs(self, action: StartLegs) -> None:
        if self._chosen is None:
            raise RuntimeError("StartLegs without Placed")
        prefill, decode = self._chosen
        self._transfer_id = f"xfer-{secrets.token_hex(16)}"
        headers = self._answer_headers
        headers["X-Pdlink-Transfer"] = self._transfer_id
        headers["X-Pdlink-Decode"] = decode.label  # not its name, which may contain host names
        headers.pop("X-Pdlink-Prefill", None)
        if prefill is None:
            self._start_decode(action.attempt, self._call.body)
            return
        headers["X-Pdlink-Prefill"] = prefill.label
        dialect = self._shared.dialect
        ranks = self._shared.config.decode_ranks
        attempt = Attempt(self._transfer_id, int(time.time()), secrets.randbits(32), prefill.address, ranks)
        prefill_body, decode_body = dialect.legs(self._call, attempt)
        self._start_leg(action.attempt, Leg.PREFILL, prefill, prefill_body)
        if dialect.rules.handover is None:
            self._start_decode(action.attempt, decode_body)

    def _start_decode(self, attempt: int, body: bytes) -> None:
        if self._chosen is None:
            raise RuntimeError("decode's leg without Placed")
        self._start_leg(attempt, Leg.DECODE, self._chosen[1], body)

    def _start_leg(self, attempt: int, leg: Leg, worker: Worker, body: bytes) -> None:
        shared = self._shared
        streaming = self._call.streaming and (leg is Leg.DECODE or shared.dialect.prefill_streams)
        head: Mapping[str, str] = {}

        def on_head(headers: Mapping[str, str]) -> None:
            nonlocal head
            head = headers
            if leg is Leg.DECODE and self._chosen and self._chosen[0] and len(shared.pools.refusals):
                shared.pools.refusals.fits(self._chosen[0], worker)
            if streaming and leg is Leg.DECODE and attempt == self._flow.attempt:
                self._note_kv(head, b"")
                self._decode_spoke.set()

        call = LegCall(
            attempt=attempt,
            leg=leg,
            url=worker.url + self._call.path,
            body=body,
            headers=self._leg_headers,
            streaming=streaming,
            max_answer_nbytes=shared.config.max_body_nbytes,
            on_head=on_head,
        )

        tokens = self._wanted.total_tokens
        if leg is Leg.PREFILL:
            tokens = max(1, self._wanted.num_tokens - self._cached_tokens)
        work = shared.pools.sent(self._wanted, worker, tokens, self._loop.time())
        done = False

        def finish(*, served: bool) -> None:
            nonlocal done
            if not done:
                done = True
                work.finished(tokens, self._loop.time(), served=served)
                shared.serve_queue()

        async def say(event: Event) -> None:
            if leg is Leg.PREFILL or not isinstance(event, Chunk):  # prefill has nothing to do after its first token
                finish(
                    served=not isinstance(event, Lost) and not (isinstance(event, Answered) and event.status >= 300)
                )
            if isinstance(event, Answered) and leg is Leg.DECODE and head:
                self._note_kv(head, event.body)
            forward = self._happen(event)
            if forward:
                await self._forward(forward)

        run = _LegRun(worker, self._transfer_id, shared.spawn(run_leg(shared.sessions[leg], call, say)))
        self._runs[attempt, leg] = run
        in_flight = shared.metrics.in_flight.labels(worker.url, leg.value)
        worker.in_flight += 1
        in_flight.inc()

        def ended(task: asyncio.Task[None]) -> None:
            worker.in_flight -= 1
            in_flight.dec()
            finish(served=False)
            if run.timer is not None:
                run.timer.cancel()
            if not task.cancelled() and (error := task.exception()) is not None:
                self._happen(Lost(attempt, leg, Loss.LOCAL, f"internal error: {type(error).__name__}"))

        run.task.add_done_callback(ended)

    def _note_kv(self, headers: Mapping[str, str], body: bytes) -> None:
        if self._kv is None:  # or there was no transfer
            self._kv = kv_path.checked(self._shared.dialect.kv_path(headers, body))

    @property
    def _kv_value(self) -> str:
        """The client's header value now."""
        waiting = self._call.streaming and not self._decode_spoke.is_set()
        return self._kv or (kv_path.TRANSFERRING if waiting else kv_path.UNKNOWN)

    async def _tell_to_stop(self, run: _LegRun, reason: str) -> None:
        shared = self._shared
        timeout_s = shared.config.connect_timeout_s
        if not await tell_to_stop(shared.control, run.worker.url, run.transfer_id, reason, timeout_s=timeout_s):
            # No error: its own deadline ends the transfer.
            log.info("request %s: no stop call to %s for %s", self._request_id, run.worker.url, run.transfer_id)

    # ---- the client's side

    async def _forward(self, data: bytes) -> None:
        try:
            async with self._order:
                if self._client is None and self._flow.first_leg is Leg.PREFILL:
                    await self._await_decode()
                self._writing_since_s = self._loop.time()
                try:
                    client = self._client or await self._open_client()
                    await client.write(data)
                finally:
                    self._writing_since_s = None
        except ConnectionError:
            self._happen(ClientLeft())

    async def _await_decode(self) -> None:
        """Wait a moment for decode's KV path: the client's headers cannot be changed later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shared.config.kv_header_grace_s):
                await self._decode_spoke.wait()

    def _note_times(self, last: str) -> None:
        """Server-Timing in milliseconds: prefill's time, and all until now: the time to the first token (`ttft`) of a
        stream, otherwise that of the whole answer (`total`)."""
        times = {last: self._loop.time()}
        if self._flow.prefill_spoke_s is not None:
            times = {"prefill": self._flow.prefill_spoke_s, **times}
        words = [f"{name};dur={(at_s - self._started_s) * 1000:.1f}" for name, at_s in times.items()]
        self._answer_headers["Server-Timing"] = ", ".join(words)

    async def _open_client(self) -> web.StreamResponse:
        headers = self._answer_headers
        self._note_times("ttft")
        headers[kv_path.HEADER] = self._kv_value
        headers["Content-Type"] = "text/event-stream; charset=utf-8"
        headers["Cache-Control"] = "no-cache"
        headers["X-Accel-Buffering"] = "no"  # or nginx in front would collect tokens
        client = web.StreamResponse(headers=headers)
        await client.prepare(self._request)
        self._client = client
        metrics = self._shared.metrics
        metrics.active_streams.inc()
        metrics.ttft.labels("true").observe(self._loop.time() - self._started_s)
        if self._flow.first_leg is not None:
            metrics.first_tokens.labels(self._flow.first_leg.value).inc()
        return client

    def _abort_client(self) -> None:
        """The client has stopped reading for too long."""
        self._happen(ClientLeft())
        if self._request.transport is not None:
            self._request.transport.abort()


def _level_of(reason: Loss | int) -> int:
    """WARNING for lost legs; less for a client's mistake or an idle connection."""
    if reason is Loss.STALE:
        return logging.INFO
    return logging.DEBUG if isinstance(reason, int) and 400 <= reason < 500 else logging.WARNING
