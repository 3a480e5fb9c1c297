"""A request that is answered in one piece, while there is nothing to decide: its workers are chosen, both legs leave
at once, prefill answers, and the client gets decode's answer as it is.

Most requests that do not stream are never anything else, so this is written for speed: in two steps, each in one
place, what takes `Exchange`, `Admission` and `RunningAttempt` many. When something else happens, those are made, as
they would be had they heard of everything, and go on.
"""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

from pdlink._http import CACHED, marks_of
from pdlink.api import kv_path
from pdlink.logs import about

from . import timing
from .admission import shown
from .decisions import Decision, Told
from .dialects import Attempt
from .ending import keep
from .exchange import Begun, Exchange
from .fleet import wanted
from .http_client import header_lines
from .ids import new_id
from .metrics import exemplar_of
from .plain_leg import PlainLeg
from .pools import Choice
from .records import RequestRecord
from .running_leg import NOBODY, RunningLeg
from .steps import Leg
from .tries import Try
from .usage import merged

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from pdlink.api.openai import Call, Usage

    from .client_answer import ClientAnswer
    from .fleet import PlacementRequest
    from .http_connection import Headers
    from .running_leg import Hears
    from .shared import Shared

log = logging.getLogger("pdlink.proxy")


def opened(
    shared: Shared,
    client: ClientAnswer,
    call: Call,
    headers: dict[str, str],
    said: Mapping[str, str],
    over: Callable[[], None],
) -> Plain | Exchange:
    """A request that is ready to begin. As of `Exchange`."""
    dialect, whole = shared.dialect, shared.whole(call)
    if (
        whole
        or call.streaming
        or dialect.headers is not None
        or shared.decision_log is not None
        or shared.tracer is not None
        or not dialect.rules.plain
        or (dialect.rules_of is not None and dialect.rules_of(call) is not None)
    ):
        return Exchange(shared, client, call, headers, said, over, whole=whole)
    return Plain(shared, client, call, headers, said, over)


class Plain:
    """As `Exchange`, for what it serves."""

    __slots__ = (
        "_answered",
        "_answered_s",
        "_asked",
        "_call",
        "_choice",
        "_closed",
        "_decision",
        "_exchange",
        "_headers",
        "_last",
        "_prefill",
        "_decode",
        "_over",
        "_placed_s",
        "_placement_s",
        "_request_id",
        "_said_by_client",
        "_seed",
        "shared",
        "_started_s",
        "_tail",
        "transfer_id",
        "client",
    )

    def __init__(
        self,
        shared: Shared,
        client: ClientAnswer,
        call: Call,
        headers: dict[str, str],
        said: Mapping[str, str],
        over: Callable[[], None],
    ) -> None:
        """As of `Exchange`."""
        self.shared, self.client, self._call = shared, client, call
        self._headers, self._said_by_client, self._over = headers, said, over
        self._request_id = headers["X-Request-Id"]
        self._started_s = shared.loop.time()
        self._asked = wanted(call, said.get("x-session-id"))
        self._seed = random.getrandbits(32)
        self._exchange: Exchange | None = None
        """What goes on with it."""
        self._prefill: PlainLeg | None = None
        self._decode: PlainLeg | None = None
        self._answered: bytes | None = None
        """Prefill's answer."""
        self._tail: bytes | None = None
        """Decode's answer, which the client has been sent."""
        self._answered_s = self._placed_s = self._placement_s = 0.0
        self._choice: Choice
        self._decision: Decision
        self.transfer_id = ""
        self._closed = False
        self._last: asyncio.Task[None] | None = None
        """Waits until the client has read the end."""

    # ---- its beginning

    def begin(self) -> None:
        shared = self.shared
        asked = self._asked
        try:
            queue, tokenizing = shared.queue, shared.tokenizing
            if queue.num or (tokenizing is not None and tokenizing.wanted(asked)):
                self._unusual().begin()
                return
            shared.retries.earn()
            if shared.sampled():
                asked.considered = {}
            began_s = time.monotonic()
            choice = shared.pools.choose(asked, needs_prefill=not shared.may_decode_alone, full=False)
            self._placement_s = time.monotonic() - began_s
            if (
                isinstance(choice, Choice)
                and choice.prefill is not None
                and not (choice.prefill.on_trial or choice.decode.on_trial)
            ):
                self._start(asked, choice)
            else:
                self._unusual().go_on(choice)
        except Exception as error:  # noqa: BLE001 -- of any policy or dialect
            self._unusual().fail(error)

    def _start(self, asked: PlacementRequest, choice: Choice) -> None:
        """Both legs leave."""
        shared, call, seed = self.shared, self._call, self._seed
        prefill, decode, cached_tokens = choice.prefill, choice.decode, choice.cached_tokens
        assert prefill is not None
        shared.metrics.attempts.inc("first")
        self._placed_s = placed_s = shared.loop.time()
        self.transfer_id = transfer_id = f"xfer-{new_id()}"
        now_s = time.time()
        self._choice = choice
        self._decision = decision = Decision(
            request_id=self._request_id,
            at_s=now_s,
            why="first",
            verdict="placed",
            reason="",
            tokens=asked.num_tokens,
            waited_s=placed_s - self._started_s,
            prefill=prefill.label,
            decode=decode.label,
            prefill_load=prefill.work.load,
            decode_load=decode.work.load,
            cached_tokens=cached_tokens,
            considered=shown(asked) if asked.considered else {},
        )
        shared.decisions.append(decision)
        attempt = Attempt(
            transfer_id=transfer_id,
            created=int(now_s),
            seed=seed,
            prefill=prefill.address,
            decode_ranks=shared.config.decode_ranks,
            prefill_url=prefill.url,
            link=prefill.link,
        )
        bodies = shared.dialect.legs(call, attempt)
        lines, tokens = header_lines(self._headers), asked.num_tokens
        most, path, clients = shared.max_body_nbytes, call.path, shared.clients
        account = shared.account(asked, prefill, max(1, tokens - cached_tokens))
        self._prefill = PlainLeg(self, Leg.PREFILL, prefill, account, most)
        self._prefill.start(clients[Leg.PREFILL], path, bodies[0], lines)
        account = shared.account(asked, decode, tokens + asked.answer_tokens)
        self._decode = PlainLeg(self, Leg.DECODE, decode, account, most)
        self._decode.start(clients[Leg.DECODE], path, bodies[1], lines)
        limits = shared.limits
        shared.alarms.set(self._tick, min(self._started_s + limits.request_s, placed_s + limits.first_byte_s))

    # ---- its end

    def said(self, leg: PlainLeg, headers: Headers, body: bytes, usage: Usage) -> None:
        """The whole answer of a leg, which is well."""
        shared = self.shared
        dialect, now_s = shared.dialect, shared.loop.time()
        if dialect.told is not None and (said := dialect.told(body)) is not None:
            shared.decisions.told.append(Told(self._request_id, leg.worker.label, said))
        if leg.leg is Leg.PREFILL:
            self._answered, self._answered_s = body, now_s
            return
        if (refusals := shared.pools.refusals).pairs and (prefill := self._choice.prefill) is not None:
            refusals.fits(prefill, leg.worker)
        kv = kv_path.checked(dialect.kv_path(headers, body)) or kv_path.UNKNOWN
        if marks_of(body) & CACHED:
            body = merged(self._answered or b"", body)
        self._answer(body, kv, usage, now_s)

    def _answer(self, body: bytes, kv: str, usage: Usage, now_s: float) -> None:
        """The client gets decode's answer."""
        shared, choice, started_s, placed_s = self.shared, self._choice, self._started_s, self._placed_s
        metrics, prefill, request_id = shared.metrics, choice.prefill, self._request_id
        prefill_leg, decode_leg = self._prefill, self._decode
        assert prefill is not None
        assert prefill_leg is not None
        assert decode_leg is not None
        self._tail = body
        stages = {"queue": placed_s - started_s, "placement": self._placement_s}
        prefill_s = None
        exemplar = exemplar_of(self._headers)
        if self._answered is None:
            self._grown(prefill_leg).let_go()
        else:
            prefill_s = self._answered_s - started_s
            stages["prefill"] = self._answered_s - placed_s
            stages["transfer"] = now_s - self._answered_s
            metrics.ttft.observe(prefill_s, "prefill", exemplar=exemplar)
        told = timing.server_timing(stages, now_s - placed_s, "total", now_s - started_s)
        self.client.respond_json(
            f"X-Request-Id: {request_id}\r\nServer-Timing: {told}\r\nX-Pdlink-Transfer: {self.transfer_id}\r\n"
            f"X-Pdlink-Prefill: {prefill.label}\r\nX-Pdlink-Decode: {choice.decode.label}\r\n"
            f"{kv_path.HEADER}: {kv}\r\n",
            body,
        )
        total_s, at_s = shared.loop.time() - started_s, time.time()  # of one moment: traces take one from the other
        per_token_s = None
        if usage.completion_tokens > 1 and prefill_s is not None:
            per_token_s = (total_s - prefill_s) / (usage.completion_tokens - 1)
        record = RequestRecord(
            request_id,
            at_s,
            "ok",
            kv=kv,
            prompt_tokens=usage.prompt_tokens or self._asked.num_tokens,
            attempts=1,
            total_s=total_s,
            queued_s=stages["queue"],
            prefill_s=prefill_s,
            decode_s=now_s - started_s,
            ttft_s=prefill_s,
            transfer_id=self.transfer_id,
            prefill=prefill.label,
            decode=choice.decode.label,
            legs=[prefill_leg.record(started_s), decode_leg.record(started_s)],
            per_token_s=per_token_s,
            tries=[Try(0.0, stages["queue"], prefill_s, now_s - started_s)],
        )
        keep(shared, record, "first", self._asked.num_tokens, stages, exemplar)
        shared.alarms.clear(self._tick)
        if self.client.behind and not self.client.gone:
            self._last = shared.spawn(self._let_catch_up())
        else:
            self._close()

    async def _let_catch_up(self) -> None:
        """The whole answer is on its way, to a client that reads slowly."""
        await self.client.caught_up(self.shared.config.idle_timeout_s)
        self._last = None
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._prefill = self._decode = None  # each has this
            if self._last is not None:
                self._last.cancel()
            over, self._over = self._over, _nothing  # it has this, too, and the collector would have to find both
            over()

    # ---- what is unusual

    def leave(self) -> None:
        """The client has left. Nothing if its answer is written."""
        if self._tail is not None:
            self._close()
        elif not self._closed:
            self._unusual().leave()

    def shut_down(self) -> None:
        """End it now, with an error for the client."""
        if self._tail is None:
            self._unusual().shut_down()

    def _tick(self) -> None:
        self._unusual().tick()

    def unusual(self, leg: PlainLeg) -> RunningLeg:
        """Something else than a good answer has happened to this leg: what goes on with it. Nobody hears of it if the
        client has its answer."""
        if self._tail is not None:
            return self._grown(leg)
        return self._unusual().running(leg.leg)

    def broke(self, leg: PlainLeg, error: Exception) -> None:
        """Our own code failed at its answer."""
        words = "transfer %s: its request failed unexpectedly"
        log.error(words, self.transfer_id, exc_info=error, extra=about(transfer_id=self.transfer_id))
        if self._tail is None:
            exchange = self._unusual()
            exchange.broke(exchange.running(leg.leg), error)
        else:
            self._close()

    def _grown(self, leg: PlainLeg, hears: Hears = NOBODY) -> RunningLeg:
        """The same leg, as one to which anything can happen."""
        return leg.grown(hears, self.transfer_id, self.shared.alarms)

    def _unusual(self) -> Exchange:
        """What goes on with it, from where it is."""
        if self._exchange is not None:
            return self._exchange
        shared = self.shared
        self._exchange = exchange = Exchange(
            shared,
            self.client,
            self._call,
            self._headers,
            self._said_by_client,
            self._over,
            whole=False,
            asked=self._asked,
            since_s=self._started_s,
            seed=self._seed,
        )
        self._over = _nothing
        if self._prefill is not None:
            shared.alarms.clear(self._tick)
            legs = [leg for leg in (self._prefill, self._decode) if leg is not None]
            exchange.take_over(
                Begun(
                    self._choice,
                    self._placement_s,
                    self._decision,
                    self._placed_s,
                    self.transfer_id,
                    {leg.leg: self._grown(leg, exchange) for leg in legs},
                    self._answered,
                    self._answered_s,
                )
            )
            self._prefill = self._decode = None
        return exchange


def _nothing() -> None:
    pass
