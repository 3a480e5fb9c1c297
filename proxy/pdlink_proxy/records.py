"""Where the time of a request went, attempt by attempt, and what is kept of it when it has ended: one small record.

What a request waited for adds up to what it took (`phases`). Clients and the metrics get the way to the first token
as stages, in seconds; `Server-Timing` has them in ms: `queue`, how long it waited for workers in all its attempts;
`placement`, how long the last choice of them took. Of the last attempt, `prefill` until its token; `transfer`, how
long decode's first token came after it: the KV on its way, as far as it was waited for; `decode` is that token since
the legs began. And all until now: `ttft` or `total`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, overload

import msgspec

from pdlink._http import server_timing
from pdlink.api import kv_path

from .decisions import Decided, Decision, decision

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_RECORDS = 1000
TIMING_HEADER = "Server-Timing"
STAGES = ("queue", "placement", "prefill", "transfer")


class Try(msgspec.Struct, gc=False):
    """Times of one attempt, on one clock; None for what was not reached."""

    wanted_s: float
    """Workers were wanted for it: of the first one, when the request came."""
    placed_s: float | None = None
    """It had its workers."""
    prefill_s: float | None = None
    """Prefill's token was there."""
    decode_s: float | None = None
    """Decode's first token was there, or its answer."""

    def since(self, zero_s: float) -> Try:
        """The same, counted from then."""
        placed_s, prefill_s, decode_s = self.placed_s, self.prefill_s, self.decode_s
        return Try(
            self.wanted_s - zero_s,
            None if placed_s is None else placed_s - zero_s,
            prefill_s=None if prefill_s is None else prefill_s - zero_s,
            decode_s=None if decode_s is None else decode_s - zero_s,
        )


class Phase(NamedTuple):
    """A part of a request's time, in one of its attempts."""

    attempt: int
    """From 1."""
    name: str
    """queue, prefill, transfer, decode; or lost, of an attempt that gave no whole answer."""
    begin_s: float
    end_s: float


def phases(tries: Sequence[Try], end_s: float, *, well: bool) -> list[Phase]:
    """The parts of a request's time until its end, one after the other without gaps. well: its last attempt gave the
    whole answer. Parts that were not reached are left out; an attempt ends when the next one is wanted."""
    found = []
    ends = [each.wanted_s for each in tries[1:]] + [end_s]
    for number, (each, until_s) in enumerate(zip(tries, ends, strict=True), 1):
        at_s = each.wanted_s
        marks = {"queue": each.placed_s, "prefill": each.prefill_s, "transfer": each.decode_s}
        last = "queue" if each.placed_s is None else "decode" if well and number == len(tries) else "lost"
        for name, reached_s in (*marks.items(), (last, until_s)):
            if reached_s is None:
                continue
            to_s = min(until_s, max(at_s, reached_s))
            found.append(Phase(number, name, begin_s=at_s, end_s=to_s))
            at_s = to_s
    return found


def until_first_by_part(record: RequestRecord) -> dict[str, float]:
    """Where the time to the first token went, or to the end of a request without one: seconds in queue, lost,
    prefill and transfer, which add up to it. transfer: also decode's step for that token."""
    end_s = record.total_s if record.ttft_s is None else record.ttft_s
    found = {"queue": 0.0, "lost": 0.0, "prefill": 0.0, "transfer": 0.0}
    tries = [each for each in record.tries if each.wanted_s <= end_s]
    for phase in phases(tries, end_s, well=record.ttft_s is not None) if tries else ():
        found["transfer" if phase.name == "decode" else phase.name] += phase.end_s - phase.begin_s
    if tries:
        found["queue"] += tries[0].wanted_s  # to read it, before workers were wanted
    return found


class UntilFirst(msgspec.Struct, gc=False):
    """What passed before the attempt that gave the first token had its workers."""

    queued_s: float
    """In the queue, in all attempts until then."""
    lost_s: float
    """In attempts before it."""
    of: Try
    """That attempt."""


def until_first(tries: Sequence[Try], first_s: float) -> UntilFirst:
    """first_s: when the first token was there, or the end of a request without one."""
    before: Try | None = None
    of, queued_s, lost_s = tries[0], 0.0, 0.0
    if len(tries) == 1 and of.placed_s is not None and of.placed_s <= first_s:  # nearly all
        return UntilFirst(of.placed_s - of.wanted_s, 0.0, of)
    for each in tries:
        if each.wanted_s > first_s:
            break
        if before is not None:
            placed_s = before.wanted_s if before.placed_s is None else before.placed_s
            lost_s += each.wanted_s - placed_s
        queued_s += (first_s if each.placed_s is None else min(first_s, each.placed_s)) - each.wanted_s
        before = of = each
    return UntilFirst(queued_s, lost_s, of)


def stages(tries: Sequence[Try], placement_s: float, now_s: float, last: str) -> tuple[dict[str, float], str]:
    """Of the way to the first token: seconds of each stage, as far as they are known, and the value of Server-Timing.
    last: `ttft` or `total`."""
    of = tries[-1]
    placed_s, prefill_s, decode_s, took_s = of.placed_s, of.prefill_s, of.decode_s, None
    queue_s = (now_s if placed_s is None else placed_s) - of.wanted_s
    for each in tries[:-1]:
        queue_s += (now_s if each.placed_s is None else each.placed_s) - each.wanted_s
    found = {"queue": queue_s, "placement": placement_s}
    if placed_s is not None:
        if decode_s is not None:
            took_s = decode_s - placed_s
        if prefill_s is not None:
            found["prefill"] = prefill_s - placed_s
            if decode_s is not None and decode_s >= prefill_s:
                found["transfer"] = decode_s - prefill_s
    get, until_now_s = found.get, now_s - tries[0].wanted_s
    return found, server_timing(queue_s, placement_s, get("prefill"), get("transfer"), took_s, last, until_now_s)


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
    """served, cancelled, "let go", or how it failed."""
    span_id: str = ""
    """Of its span, if the request is traced."""


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """What a request was that has ended, for its readers. Times are durations on the proxy's clock."""

    request_id: str
    at_s: float
    """Unix time of its end."""
    outcome: str
    kv: str
    """The way of its KV, as in X-Pdlink-KV."""
    prompt_tokens: int
    """As the usage of the answer says, or counted in its token ids; else an estimate, see `estimated`."""
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
    estimated: bool = False
    """`prompt_tokens` is a guess by the length of the prompt's text."""
    model: str = ""
    """As the client has named it."""


EndedLeg: TypeAlias = tuple[int, str, str, float, float | None, float | None, str, str]
"""Its attempt, from 1, and what `LegRecord` is made of, its times on the proxy's clock."""
EndedTry: TypeAlias = tuple[float, float | None, float | None, float | None]
"""What `Try` is made of."""


class EndedHead(msgspec.Struct, gc=False, array_like=True):
    """The beginning of `EndedRequest`."""

    request_id: str
    at_s: float
    """Unix time of its end."""
    outcome: str
    kv: str
    started_s: float
    """On the proxy's clock, as what follows and the times of `tries` and `legs`."""
    ended_s: float
    first_s: float | None
    """When the first token was there, as of `RequestRecord.ttft_s`."""
    attempts: int
    """Times that it was placed."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.started_s


class EndedRequest(EndedHead, gc=False, array_like=True):
    """What is kept of a request that has ended: what it has at hand then. Nearly none is read, so what readers get is
    made for them.

    Make it without names: 15 named arguments take 0.7 us longer, and of more CPython 3.11 makes a dictionary.
    """

    prompt_tokens: int
    estimated: bool
    per_token_s: float | None
    model: str
    transfer_ids: list[str]
    """Of its attempts."""
    prefill: str | None
    """Of the last one."""
    decode: str | None
    tries: list[EndedTry]
    legs: list[EndedLeg]
    why: str
    """Of its last attempt; empty if workers were never looked for."""
    num_tokens: int
    """Of its prompt, as it was placed."""
    decided: list[Decided] | msgspec.Raw
    """Packed in one that was kept: most of it, and few readers want that."""

    def record(self) -> RequestRecord:
        zero_s, total_s = self.started_s, self.ended_s - self.started_s
        tries = [Try(*each).since(zero_s) for each in self.tries]
        ttft_s = self.ttft_s
        until = until_first(tries, total_s if ttft_s is None else ttft_s)
        return RequestRecord(
            request_id=self.request_id,
            at_s=self.at_s,
            outcome=self.outcome,
            kv=self.kv,
            prompt_tokens=self.prompt_tokens,
            attempts=self.attempts,
            total_s=total_s,
            queued_s=until.queued_s,
            lost_s=until.lost_s,
            prefill_s=until.of.prefill_s,
            decode_s=until.of.decode_s,
            ttft_s=ttft_s,
            transfer_id=self.transfer_ids[-1] if self.transfer_ids else "",
            prefill=self.prefill,
            decode=self.decode,
            legs=[_leg_record(self.transfer_ids, zero_s, *each) for each in self.legs],
            per_token_s=self.per_token_s,
            tries=tries,
            estimated=self.estimated,
            model=self.model,
        )

    def decisions(self) -> Iterator[Decision]:
        """About it, oldest first; the last one is that it has ended."""
        said = self.decided
        for each in msgspec.msgpack.decode(said) if isinstance(said, msgspec.Raw) else said:
            yield decision(self.request_id, each)
        yield Decision(
            self.request_id,
            self.at_s,
            self.why,
            "ended",
            f"{self.outcome}, KV {self.kv}",
            tokens=self.num_tokens,
            waited_s=self.ended_s - self.started_s,
        )

    @property
    def handover_s(self) -> float | None:
        """Of a stream whose KV was transferred in its only attempt, how long decode's first token came after
        prefill's; None of others. Of an answer in one piece decode's time is that of its end."""
        if len(self.tries) != 1 or self.outcome != "ok" or self.prefill is None:
            return None
        _, _, prefill_s, decode_s = self.tries[0]
        if prefill_s is None or decode_s is None or self.first_s in (None, prefill_s):
            return None
        return None if kv_path.path_of(self.kv) == kv_path.RECOMPUTED else decode_s - prefill_s


class _Kept(EndedRequest, gc=False, array_like=True):
    decided: msgspec.Raw


def _leg_record(
    transfer_ids: Sequence[str],
    zero_s: float,
    attempt: int,
    leg: str,
    worker: str,
    sent_s: float,
    answered_s: float | None,
    ended_s: float | None,
    end: str,
    span_id: str,
) -> LegRecord:
    return LegRecord(
        transfer_id=transfer_ids[attempt - 1],
        leg=leg,
        worker=worker,
        sent_s=sent_s - zero_s,
        answered_s=None if answered_s is None else answered_s - zero_s,
        ended_s=None if ended_s is None else ended_s - zero_s,
        end=end,
        span_id=span_id,
    )


class Records(Sequence[RequestRecord]):
    """Of the last requests, oldest first.

    Each is packed into memory that it takes over from an old one. As objects, freed a thousand requests later, they
    were out of the processor's cache by then and took 8 % of a small request; as bytes of their own, 5 %.
    """

    num_ended = 0
    """Requests, with those of which nothing is kept any more."""

    def __init__(self) -> None:
        self._packed = [bytearray() for _ in range(MAX_RECORDS)]
        self._spare = bytearray()

    def keep(self, ended: EndedRequest) -> None:
        place, packed = self.num_ended % MAX_RECORDS, self._spare
        _pack_into(ended, packed)  # what fails leaves half of it there
        self._spare, self._packed[place] = self._packed[place], packed
        self.num_ended += 1

    def newest(self, most: int = MAX_RECORDS) -> list[EndedRequest]:
        """So many at most, oldest first."""
        return [self._of(number) for number in self._numbers[-most:]] if most else []

    def since(self, at_s: float, least: int = 0) -> list[EndedRequest]:
        """Those that have ended since then, and so many of the newest at least; oldest first."""
        found: list[EndedRequest] = []
        for number in reversed(self._numbers):
            each = self._of(number)
            if each.at_s < at_s and len(found) >= least:
                break
            found.append(each)
        return found[::-1]

    def of(self, request_id: str) -> list[EndedRequest]:
        """Requests of this id, oldest first."""
        return [
            self._of(at)
            for at, each in zip(self._numbers, self.heads(), strict=True)
            if each.request_id == request_id
        ]

    def heads(self, most: int = MAX_RECORDS) -> list[EndedHead]:
        """Of so many of the newest at most, oldest first: a tenth of the time."""
        numbers = self._numbers[-most:] if most else ()
        return [_unpack_head(self._packed[number % MAX_RECORDS]) for number in numbers]

    @property
    def _numbers(self) -> range:
        return range(self.num_ended - len(self), self.num_ended)

    def __len__(self) -> int:
        return min(self.num_ended, MAX_RECORDS)

    @overload
    def __getitem__(self, at: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, at: slice) -> list[RequestRecord]: ...
    def __getitem__(self, at: int | slice) -> RequestRecord | list[RequestRecord]:
        number = self._numbers[at]
        return self._of(number).record() if isinstance(number, int) else [self._of(each).record() for each in number]

    def _of(self, number: int) -> EndedRequest:
        return _unpack(bytes(self._packed[number % MAX_RECORDS]))  # `Raw` would see what comes there next


_pack_into, _unpack = msgspec.msgpack.Encoder().encode_into, msgspec.msgpack.Decoder(_Kept).decode
_unpack_head = msgspec.msgpack.Decoder(EndedHead).decode
