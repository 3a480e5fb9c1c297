"""What became of each of the last requests, one small record a request."""

from __future__ import annotations

from collections import deque

import msgspec

from pdlink.api import kv_path

from .tries import Try  # noqa: TC001  (msgspec reads the annotation at run time)

MAX_RECORDS = 1000


class LegRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One leg of one attempt. Times count from the arrival of the request."""

    transfer_id: str
    """Of its attempt: the other leg of it has the same."""
    leg: str
    """prefill or decode."""
    worker: str
    """Its label."""
    sent_s: float
    answered_s: float | None
    """When its answer began; None if it never did."""
    ended_s: float | None
    """None if it went on after the request."""
    end: str
    """served, cancelled, "let go", or how it failed; empty if it went on."""
    span_id: str = ""
    """Of its span, if the request is traced."""


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """Made when a request has ended. Times are durations on the proxy's clock.

    Give the first three without names where it is made for each request: CPython 3.11 makes a dictionary of more than
    15 named arguments, which costs 0.5 us.
    """

    request_id: str
    at_s: float
    """Unix time of its end."""
    outcome: str
    kv: str
    """The way of its KV, as in X-Pdlink-KV."""
    prompt_tokens: int
    """As the usage of the answer says, else estimated."""
    attempts: int
    total_s: float
    queued_s: float
    """In the queue, until the attempt that gave the first token had workers."""
    prefill_s: float | None
    """Until prefill had answered in that attempt."""
    decode_s: float | None
    """Until decode had."""
    ttft_s: float | None
    """Until the first bytes left for the client; of an answer in one piece, until prefill's."""
    transfer_id: str
    """Of the attempt that the client hears of."""
    prefill: str | None
    """The worker's label."""
    decode: str | None
    lost_s: float = 0.0
    """In attempts before the one that gave the first token, which were lost."""
    legs: list[LegRecord] = []
    """Of all attempts, in the order in which they were sent."""
    tries: list[Try] = []
    """Times of all attempts, from the request's arrival."""
    per_token_s: float | None = None
    """Mean time of each token after the first one; None of an answer without such tokens."""

    @property
    def handover_s(self) -> float | None:
        """Of a stream whose KV was transferred in its only attempt, how long decode's first token came after
        prefill's; None of others. Of an answer in one piece decode's time is that of its end."""
        if self.prefill is None or self.attempts != 1 or self.prefill_s is None or self.decode_s is None:
            return None
        if self.ttft_s is None or self.ttft_s == self.prefill_s or self.outcome != "ok":
            return None
        if kv_path.path_of(self.kv) == kv_path.RECOMPUTED:
            return None
        return self.decode_s - self.prefill_s


class Records(deque[RequestRecord]):
    """The newest of them; older ones are dropped."""

    num_ended = 0
    """Also of dropped records."""

    def __init__(self) -> None:
        super().__init__(maxlen=MAX_RECORDS)

    def append(self, record: RequestRecord) -> None:
        self.num_ended += 1
        super().append(record)
