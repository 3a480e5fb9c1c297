"""What the client of a request gets: the head of its answer, the events of a stream, its end; and its record.

A stream's head says how the KV came, and cannot be changed later. So the first events may wait a moment for decode to
say it (`kv_header_grace_s`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdlink.api import kv_path
from pdlink.api.errors import error_for
from pdlink.api.sse import before_done

from . import timing
from .decision_log import said_usage
from .metrics import exemplar_of
from .records import RequestRecord
from .steps import Leg, Outcome
from .tries import until_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdlink.api.openai import Call

    from .admission import Admission
    from .attempt import Attempt
    from .client_answer import ClientAnswer
    from .decision_log import Tally
    from .flow import Flow
    from .shared import Shared

_WORKER_HEADERS = {Leg.PREFILL: "X-Pdlink-Prefill", Leg.DECODE: "X-Pdlink-Decode"}
_STREAM = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
"""The latter, or nginx in front would collect tokens."""
_NO_STAGES: Mapping[str, float] = {}


class Answer:
    """The answer to one request."""

    attempt: Attempt | None = None
    """The newest one: the client hears of no other."""
    tally: Tally | None = None
    """Counts for the decision log, if it has this request."""
    opened = False
    """A stream has begun."""
    stages: Mapping[str, float] = _NO_STAGES
    """Of the time to its first token, as the client was told last."""
    _opened_s = 0.0
    _events = 0
    """Of its stream, so far: about its tokens."""
    _tail = b""
    """The last part of the answer."""
    _early: bytes | None = None
    """Events of prefill's that wait for decode's KV path."""

    def __init__(
        self,
        shared: Shared,
        client: ClientAnswer,
        call: Call,
        headers: Mapping[str, str],
        flow: Flow,
        admission: Admission,
        started_s: float,
    ) -> None:
        """headers: of the legs. started_s: when the request came."""
        self._shared, self.client, self._call, self._flow = shared, client, call, flow
        self._admission, self._started_s = admission, started_s
        self._request_id = headers["X-Request-Id"]
        self.exemplar = exemplar_of(headers)

    @property
    def kv_value(self) -> str:
        """How the KV came, as far as it is known now."""
        attempt = self.attempt
        if attempt is not None and attempt.kv is not None:
            return attempt.kv
        if self._call.streaming and not self._decode_spoke:
            return kv_path.TRANSFERRING
        # Some engines say it in the last event, where there is one.
        later = self._call.streaming and self._shared.dialect.rules.says_kv and self._flow.outcome is None
        return kv_path.TRANSFERRING if later else kv_path.UNKNOWN

    # ---- a stream

    def count(self, data: bytes) -> None:
        """Bytes of it that pass; this is done for every token, so it looks for as little as it can."""
        self._events += data.count(b"\n\n")
        self._tail = data
        if self.tally is not None:
            self.tally.add(data)

    def forward(self, data: bytes) -> None:
        """Events for the client, the first of which begin the stream."""
        client, grace_s = self.client, self._shared.config.kv_header_grace_s
        self.count(data)
        if client.begun:
            client.write(data)
        elif self._early is not None:
            self._early += data
        elif self._flow.first_leg is Leg.PREFILL and not self._decode_spoke and grace_s > 0:
            self._early = data
            self._shared.alarms.set(self.open, time.monotonic() + grace_s)
        else:
            self.open(data)

    def decode_spoke(self) -> None:
        """Decode of the client's attempt has sent its headers: events wait no longer."""
        if self._early is not None:
            self.open()

    def open(self, data: bytes = b"") -> None:
        """Begin the stream, with the events that waited for it and these."""
        if self.opened:
            return
        self.opened, self._opened_s = True, time.monotonic()
        lines = f"{self._lines('ttft', self._opened_s)}{kv_path.HEADER}: {self.kv_value}\r\n{_STREAM}"
        early = b""
        if self._early is not None:
            early, self._early = self._early, None
            self._shared.alarms.clear(self.open)
        self.client.begin(lines, early + data)
        metrics = self._shared.metrics
        metrics.active_streams.add(1)
        if (first := self._flow.first_leg) is not None:
            metrics.ttft.observe(self._opened_s - self._started_s, first.value, exemplar=self.exemplar)

    def end_stream(self, data: bytes) -> None:
        """Its last events."""
        if self.tally is not None:
            self.tally.add(data)
        self._tail += data
        self.open()
        times = timing.comment(self._times("total", time.monotonic()))
        self.client.end(before_done(data, times + kv_path.comment(self.kv_value)))

    # ---- an answer in one piece

    def respond(self, status: int, content_type: str, body: bytes) -> None:
        lines = self._lines("total", time.monotonic())
        if 200 <= status < 300:
            if self.tally is not None:
                self.tally.whole(body)
            self._tail = body
            lines += f"{kv_path.HEADER}: {self.kv_value}\r\n"
            if (prefill_s := self._flow.tries[-1].prefill_s) is not None:
                ttft_s = prefill_s - self._started_s
                self._shared.metrics.ttft.observe(ttft_s, Leg.PREFILL.value, exemplar=self.exemplar)
        elif status == 503:
            lines += f"Retry-After: {self._shared.queue.retry_after_s()}\r\n"
        if status >= 400:
            body = error_for(self._call.path, status, body)
        self.client.respond(status, content_type, lines, body)

    def fail(self, body: bytes) -> None:
        """Our own code failed. body: an error, for a client that has heard nothing yet."""
        if self.client.begun:
            self.client.abort()
        else:
            lines, said = f"X-Request-Id: {self._request_id}\r\n", error_for(self._call.path, 500, body)
            self.client.respond(500, "application/json", lines, said)

    # ---- its end

    def close(self) -> None:
        """Nothing more is written."""
        if self._early is not None:
            self._shared.alarms.clear(self.open)
        if self.opened:
            self._shared.metrics.active_streams.add(-1)

    def record(self, outcome: Outcome, attempts: Iterable[Attempt]) -> RequestRecord:
        """attempts: all that were made."""
        flow, attempt, started_s = self._flow, self.attempt, self._started_s
        chosen = attempt.chosen if attempt is not None else {}
        legs = []
        for each in attempts:
            for leg in each.legs.values():
                legs.append(leg.record(started_s))  # noqa: PERF401 -- two comprehensions are two calls
        now_s, whole_s = time.monotonic(), None if self._call.streaming else flow.tries[-1].prefill_s
        first_s = self._opened_s if self.opened else whole_s
        queued_s, lost_s, of = until_first(flow.tries, now_s if first_s is None else first_s)
        times = of.since(started_s)
        tries = [times] if len(flow.tries) == 1 else [each.since(started_s) for each in flow.tries]
        ttft_s = None if first_s is None else first_s - started_s
        total_s, usage = now_s - started_s, flow.usage
        if usage is not None:
            prompt_tokens, answer_tokens = usage.prompt_tokens, usage.completion_tokens
        else:
            prompt_tokens, answer_tokens = said_usage(self._tail)
        further = (answer_tokens or self._events) - 1
        per_token_s: float | None = None
        if outcome is Outcome.OK and ttft_s is not None and further > 0:
            per_token_s = (total_s - ttft_s) / further
        return RequestRecord(
            self._request_id,
            time.time(),
            outcome.value,
            kv=self.kv_value,
            prompt_tokens=prompt_tokens or self._admission.num_prompt_tokens,
            attempts=flow.attempts,
            total_s=total_s,
            queued_s=queued_s,
            lost_s=lost_s,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
            ttft_s=ttft_s,
            transfer_id=attempt.transfer_id if attempt is not None else "",
            prefill=chosen[Leg.PREFILL].label if Leg.PREFILL in chosen else None,
            decode=chosen[Leg.DECODE].label if Leg.DECODE in chosen else None,
            legs=legs,
            per_token_s=per_token_s,
            tries=tries,
        )

    # ---- small things

    @property
    def _decode_spoke(self) -> bool:
        """Decode has sent its headers; a stream's KV path is known then, or not at all."""
        return self.attempt is not None and self.attempt.decode_spoke

    def _lines(self, last: str, now_s: float) -> str:
        """Headers: which request, where its time went, which transfer, and which workers, by their labels: names may
        contain host names."""
        lines = f"X-Request-Id: {self._request_id}\r\n{timing.HEADER}: {self._times(last, now_s)}\r\n"
        if (attempt := self.attempt) is not None:
            lines += f"X-Pdlink-Transfer: {attempt.transfer_id}\r\n"
            for leg, worker in attempt.chosen.items():
                lines += f"{_WORKER_HEADERS[leg]}: {worker.label}\r\n"
        return lines

    def _times(self, last: str, now_s: float) -> str:
        tries = self._flow.tries
        self.stages = timing.stages(tries, now_s, self._admission.placement_s)
        decode_s, placed_s = tries[-1].decode_s, tries[-1].placed_s
        since_s = None if decode_s is None or placed_s is None else decode_s - placed_s
        return timing.server_timing(self.stages, since_s, last, now_s - self._started_s)
