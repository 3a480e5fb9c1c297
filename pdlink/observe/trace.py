"""Timelines of workers, and a proxy's requests, as one trace for ui.perfetto.dev.

Each worker is a process in it, with these tracks for each peer: *transfers* (one slice from its begin to its end; in
it the part that prefill did not hide), *written* (the engine has written a layer), *waits* (written and asked for,
but the link has no room), *in flight*. An arrow leads from the proxy's request to prefill's transfer, and then to
decode's.

Clocks of two hosts are never compared. A worker on the host of who asks has the same clock; for another the clock's
offset is estimated from the round trip of the question, and the name of its process says how far that may be wrong.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdlink.observe.perfetto import Flow, Lanes, Trace, Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from pdlink.observe.timeline import Dump, Kept

TRACE_TYPE = "application/octet-stream"
TRACE_HEADER = "X-Pdlink-Timeline"
"""Of an answer with a trace: what is in it, in words."""
_RANKS = {"transfers": 1, "waits": 2, "in flight": 3, "written": 4}


class Laid(NamedTuple):
    """A worker's timeline, and where it lies on the clock of who asked for it."""

    dump: Dump
    offset_s: float = 0.0
    """Added to its times."""
    within_s: float | None = None
    """How far that may be wrong; None where the clock is the same."""


class LegSpan(NamedTuple):
    """One leg of one attempt, in seconds after its request came."""

    sent_s: float
    ended_s: float
    name: str
    args: Mapping[str, Value]


class Request(NamedTuple):
    """One of the proxy's, on its clock."""

    request_id: str
    transfer_ids: Sequence[str]
    """Of each attempt."""
    began_s: float
    marks: Mapping[str, float]
    """What was reached, in order, by how many seconds after `began_s`; the last one is its end."""
    args: Mapping[str, Value]
    legs: Sequence[LegSpan] = ()


class Made(NamedTuple):
    data: bytes
    num_workers: int
    num_transfers: int
    num_requests: int
    num_events: int

    def __str__(self) -> str:
        parts = [f"{self.num_transfers} transfers", f"{self.num_workers} workers", f"{self.num_events} events"]
        return ", ".join([f"{self.num_requests} requests", *parts] if self.num_requests else parts)


def laid(dump: Dump, clock: str, asked_s: float, answered_s: float) -> Laid:
    """clock: that of who asked, between these two times on it."""
    if dump.clock == clock:
        return Laid(dump)
    # The answer was made somewhere between the question and its arrival: in the middle, give or take a half.
    return Laid(dump, (asked_s + answered_s) / 2 - dump.now_s, (answered_s - asked_s) / 2)


def make(workers: Sequence[Laid], requests: Sequence[Request] = (), *, only: Set[str] | None = None) -> Made:
    """only: ids of the transfers to show, and their requests; None shows all."""
    requests = [each for each in requests if only is None or not only.isdisjoint(each.transfer_ids)]
    begins = [each.began_s for each in requests]
    kept: list[tuple[Laid, list[Kept]]] = []
    for worker in workers:
        transfers = [each for each in worker.dump.transfers if only is None or each.transfer_id in only]
        kept.append((worker, transfers))
        begins += [each.span_s[0] + worker.offset_s for each in transfers]
        begins += [each.began_s + worker.offset_s for each in _prompts(worker.dump, only)]
    trace = Trace(min(begins, default=0.0))
    ranks = itertools.count(1)
    if requests:
        _add_requests(trace, trace.process("proxy", next(ranks)), requests)
    for worker, transfers in kept:
        process = trace.process(_name(worker), next(ranks))
        _add_prompts(trace, process, worker, only)
        for peer in sorted({each.peer for each in transfers}):
            _add_peer(trace, process, worker, [each for each in transfers if each.peer == peer], peer)
        _add_speed(trace, process, worker.offset_s, transfers)
    shown = {each.transfer_id for _, transfers in kept for each in transfers}
    return Made(trace.data(), len(workers), len(shown), len(requests), trace.num_events)


def _name(worker: Laid) -> str:
    if worker.within_s is None:
        return worker.dump.name
    return f"{worker.dump.name} (another host's clock, right within {worker.within_s * 1e3:.2f} ms)"


def _add_requests(trace: Trace, process: int, requests: Iterable[Request]) -> None:
    def end_s(request: Request) -> float:
        return request.began_s + max(request.marks.values(), default=0.0)

    lanes, legs = Lanes(trace, "requests", process, rank=1), Lanes(trace, "legs", process, rank=2)
    for request in sorted(requests, key=lambda each: each.began_s):
        track = lanes.take((request.began_s, end_s(request)))
        flow = Flow(sends=[_arrow("request", each) for each in request.transfer_ids])
        trace.begin(track, request.began_s, request.request_id, request.args, flow)
        at_s = request.began_s
        for name, after_s in request.marks.items():
            until_s = max(at_s, request.began_s + after_s)
            trace.slice(track, (at_s, until_s), name)
            at_s = until_s
        trace.end(track, max(at_s, end_s(request)))
    spans = [
        ((request.began_s + leg.sent_s, request.began_s + leg.ended_s), leg)
        for request in requests
        for leg in request.legs
    ]
    for span, leg in sorted(spans, key=lambda each: each[0]):
        trace.slice(legs.take(span), span, leg.name, leg.args)


def _prompts(dump: Dump, only: Set[str] | None) -> list[Any]:
    found = [each for each in dump.prompts if only is None or each.request_id.partition("-")[2] in only]
    return sorted(found, key=lambda each: each.began_s)


def _add_prompts(trace: Trace, process: int, worker: Laid, only: Set[str] | None) -> None:
    lanes = Lanes(trace, "prompts: where their KV comes from", process)
    for each in _prompts(worker.dump, only):
        span = each.began_s + worker.offset_s, max(each.began_s, each.at_s) + worker.offset_s
        fields = msgspec.structs.asdict(each).items()
        args = {name: value for name, value in fields if name not in ("at_s", "began_s", "places")}
        args |= {f"from {place}": tokens for place, tokens in each.places.items()}
        trace.slice(lanes.take(span), span, f"{each.loaded} loaded ({each.reason})", args)


def _add_peer(trace: Trace, process: int, worker: Laid, transfers: Sequence[Kept], peer: str) -> None:
    """All transfers with one peer."""
    group = trace.track(f"KV, {peer}" if peer else "KV, live", process)
    lanes = {name: Lanes(trace, name, group, rank=rank) for name, rank in _RANKS.items()}
    moves, waits = [], []
    for each in sorted(transfers, key=lambda each: each.span_s[0]):
        _add_transfer(trace, lanes["transfers"], each, worker.offset_s)
        for landed in each.landed:
            args: dict[str, Value] = {"transfer": each.transfer_id, "tokens": f"{landed.start}–{landed.end}"}
            args["bytes"] = landed.nbytes
            name = f"layer {landed.layer}"
            moves.append((landed.submitted_s, landed.at_s, name, {**args, "lane": landed.transport}))
            waits.append((landed.asked_s, landed.submitted_s, name, args))
        for written in each.written:
            at_s = written.at_s + worker.offset_s
            what = {"transfer": each.transfer_id, "tokens": f"{written.start}–{written.end}"}
            trace.instant(lanes["written"].take((at_s, at_s)), at_s, f"layer {written.layer}", what)
    for name, spans in (("in flight", moves), ("waits", waits)):
        for begin_s, end_s, layer, args in sorted(spans, key=lambda each: each[:2]):
            if end_s > begin_s:
                span = begin_s + worker.offset_s, end_s + worker.offset_s
                trace.slice(lanes[name].take(span), span, layer, args)


def _add_transfer(trace: Trace, lanes: Lanes, kept: Kept, offset_s: float) -> None:
    begin_s, end_s = kept.span_s
    track, ended = lanes.take((begin_s + offset_s, end_s + offset_s)), kept.ended
    name = f"{kept.transfer_id} {ended.state} {ended.reason}".strip() if ended else f"{kept.transfer_id} goes on"
    args: dict[str, Value] = {"transfer": kept.transfer_id}
    if ended is not None:
        args |= {"bytes": ended.nbytes, "lane": ended.transport, "peer": ended.peer, "side": ended.side}
    sends = ended is None or ended.side == "sender"
    arrow = _arrow("transfer", kept.transfer_id)
    flow = Flow([arrow], [_arrow("request", kept.transfer_id)]) if sends else Flow()
    trace.begin(track, begin_s + offset_s, name, args, flow)
    if sends and kept.landed and kept.written:
        landed_s, written_s = max(each.at_s for each in kept.landed), max(each.at_s for each in kept.written)
        if begin_s <= written_s < landed_s <= end_s:
            words = {"ms": (landed_s - written_s) * 1e3}
            trace.slice(track, (written_s + offset_s, landed_s + offset_s), "not hidden by prefill", words)
    elif ended is not None and not sends and not ended.reason:
        span = end_s + offset_s, end_s + offset_s  # only the sender knows when parts of it landed
        trace.slice(track, span, "KV is here", flow=Flow(takes=[arrow]))
    trace.end(track, end_s + offset_s)


def _add_speed(trace: Trace, process: int, offset_s: float, transfers: Sequence[Kept]) -> None:
    """GB/s of all that is in flight, each push at its mean speed."""
    steps: dict[float, float] = {}
    for landed in (each for kept in transfers for each in kept.landed):
        if (took_s := landed.at_s - landed.submitted_s) > 0:
            steps[landed.submitted_s] = steps.get(landed.submitted_s, 0.0) + landed.nbytes / took_s
            steps[landed.at_s] = steps.get(landed.at_s, 0.0) - landed.nbytes / took_s
    if not steps:
        return
    counter = trace.counter("KV in flight", "GB/s", process, rank=9)
    for at_s, rate in zip(sorted(steps), itertools.accumulate(steps[at_s] for at_s in sorted(steps)), strict=True):
        trace.sample(counter, at_s + offset_s, max(0.0, rate / 1e9))


def _arrow(kind: str, transfer_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{kind} {transfer_id}".encode(), digest_size=8).digest(), "little")
