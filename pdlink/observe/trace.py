"""Timelines of workers, and a proxy's requests, as one trace for ui.perfetto.dev.

Each worker is a process in it, with these tracks for each peer: *transfers* (from begin to end; in it the part that
prefill did not hide), *waits* (written and asked for, but the link has no room), *in flight*, *written* (the engine
has written a layer). An arrow leads from the proxy's request to prefill's transfer, and then to decode's.

Clocks of two hosts are never compared. A worker on the host of who asks has the same clock; for another the clock's
offset is estimated from the round trip of the question, and the name of its process says how far that may be wrong.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdlink.observe.perfetto import TracedProcess, encode
from pdlink.observe.spans import Span, transfer_span_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from pdlink.events import TransferEnded
    from pdlink.observe.spans import Value
    from pdlink.observe.timeline import Dump, KeptTransfer

TRACE_TYPE = "application/json"
TRACE_HEADER = "X-Pdlink-Timeline"
"""Of an answer with a trace: what is in it, in words."""


class Laid(NamedTuple):
    """A worker's timeline, and where it lies on the clock of who asked for it."""

    dump: Dump
    offset_s: float = 0.0
    """Added to its times."""
    within_s: float | None = None
    """How far that may be wrong; None where the clock is the same."""


class TracedRequest(NamedTuple):
    """One of the proxy's."""

    transfer_ids: Sequence[str]
    """Of each attempt."""
    spans: Sequence[Span]
    """The request itself first."""


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


def make(workers: Sequence[Laid], requests: Sequence[TracedRequest] = (), *, only: Set[str] | None = None) -> Made:
    """only: ids of the transfers to show, and their requests; None shows all."""
    requests = [each for each in requests if only is None or not only.isdisjoint(each.transfer_ids)]
    processes, shown = [], set()
    if requests:
        processes.append(TracedProcess("proxy", [span for each in requests for span in each.spans]))
    for worker in workers:
        kept = [each for each in worker.dump.transfers if only is None or each.transfer_id in only]
        shown |= {each.transfer_id for each in kept}
        spans = [*_prompts(worker.dump, only), *_transfers(kept)]
        processes.append(TracedProcess(_name(worker), spans, worker.offset_s, _rates(kept)))
    arrows = [
        (request.spans[0].span_id, transfer_span_id("sender", transfer_id))
        for request in requests
        for transfer_id in request.transfer_ids
    ]
    arrows += [(link, f"end of {span.span_id}") for each in processes for span in each.spans for link in span.links]
    encoded = encode(processes, arrows)
    return Made(encoded.data, len(workers), len(shown), len(requests), encoded.num_events)


def _name(worker: Laid) -> str:
    if worker.within_s is None:
        return worker.dump.name
    return f"{worker.dump.name} (another host's clock, right within {worker.within_s * 1e3:.2f} ms)"


def _prompts(dump: Dump, only: Set[str] | None) -> list[Span]:
    """Where the KV of each prompt came from."""
    found = []
    for each in dump.prompts:
        if only is not None and each.request_id.partition("-")[2] not in only:
            continue
        fields = msgspec.structs.asdict(each).items()
        args: dict[str, Value] = {name: value for name, value in fields if name not in ("at_s", "began_s", "places")}
        args |= {f"from {place}": tokens for place, tokens in each.places.items()}
        found.append(
            Span(
                name="prompt",
                label=f"{each.loaded} loaded ({each.reason})",
                track="prompts: where their KV comes from",
                begin_s=each.began_s,
                end_s=max(each.began_s, each.at_s),
                attributes=args,
            )
        )
    return found


def _transfers(kept: Sequence[KeptTransfer]) -> list[Span]:
    """By peer, and by track of it."""
    found = []
    for peer in sorted({each.peer for each in kept}):
        of_peer = [each for each in kept if each.peer == peer]
        track = f"KV, {peer}: " if peer else "KV, live: "
        found += [span for each in of_peer for span in _whole(each, f"{track}transfers")]
        waits, moves, written = [], [], []
        for each in of_peer:
            for landed in each.landed:
                args: dict[str, Value] = {"transfer": each.transfer_id, "tokens": f"{landed.start}–{landed.end}"}
                args["bytes"] = landed.nbytes
                name, lane = f"layer {landed.layer}", {**args, "lane": landed.transport}
                waits.append(_span(name, f"{track}waits", landed.asked_s, landed.submitted_s, args))
                moves.append(_span(name, f"{track}in flight", landed.submitted_s, landed.at_s, lane))
            for one in each.written:
                what: dict[str, Value] = {"transfer": each.transfer_id, "tokens": f"{one.start}–{one.end}"}
                written.append(_span(f"layer {one.layer}", f"{track}written", one.at_s, one.at_s, what))
        found += [span for span in (*waits, *moves) if span.end_s > span.begin_s] + written
    return found


def _span(name: str, track: str, begin_s: float, end_s: float, args: Mapping[str, Value]) -> Span:
    return Span(name=name, track=track, begin_s=begin_s, end_s=end_s, attributes=args)


def _whole(kept: KeptTransfer, track: str) -> list[Span]:
    """A transfer, and below it the part that prefill did not hide."""
    ended, (begin_s, end_s) = kept.ended, kept.span_s
    if ended is None:
        live = _span("send KV", track, begin_s, end_s, {})
        span_id, label = transfer_span_id("sender", kept.transfer_id), f"{kept.transfer_id} goes on"
        return [msgspec.structs.replace(live, span_id=span_id, label=label)]
    whole = _transfer_span(ended)
    label = f"{kept.transfer_id} {ended.state} {ended.reason}".strip()
    found = [msgspec.structs.replace(whole, track=track, label=label, begin_s=begin_s, end_s=end_s)]
    if ended.side == "sender" and kept.landed and kept.written:
        landed_s, written_s = max(each.at_s for each in kept.landed), max(each.at_s for each in kept.written)
        if begin_s <= written_s < landed_s <= end_s:
            words: dict[str, Value] = {"ms": (landed_s - written_s) * 1e3}
            late = _span("not hidden by prefill", track, written_s, landed_s, words)
            found.append(msgspec.structs.replace(late, parent_id=whole.span_id))
    return found


def _rates(kept: Sequence[KeptTransfer]) -> dict[float, float]:
    """GB/s of all that is in flight, each push at its mean speed, from each time on."""
    steps: dict[float, float] = {}
    for landed in (each for transfer in kept for each in transfer.landed):
        if (took_s := landed.at_s - landed.submitted_s) > 0:
            steps[landed.submitted_s] = steps.get(landed.submitted_s, 0.0) + landed.nbytes / took_s
            steps[landed.at_s] = steps.get(landed.at_s, 0.0) - landed.nbytes / took_s
    times = sorted(steps)
    rates = itertools.accumulate(steps[at_s] for at_s in times)
    return {at_s: max(0.0, rate / 1e9) for at_s, rate in zip(times, rates, strict=True)}


def _transfer_span(ended: TransferEnded) -> Span:
    """One side's part of a transfer. The receiver's follows the sender's."""
    sends = ended.side == "sender"
    attributes: dict[str, Value] = {
        "pdlink.transfer_id": ended.transfer_id,
        "pdlink.peer": ended.peer,
        "pdlink.lane": ended.transport,
        "pdlink.bytes": ended.nbytes,
        "pdlink.state": ended.state,
    }
    if ended.exposed_s is not None:
        attributes["pdlink.exposed_ms"] = ended.exposed_s * 1e3
    return Span(
        name="send KV" if sends else "receive KV",
        span_id=transfer_span_id(ended.side, ended.transfer_id),
        kind="producer" if sends else "consumer",
        begin_s=ended.started_s,
        end_s=ended.at_s,
        attributes=attributes,
        error=ended.reason,
        links=() if sends else (transfer_span_id("sender", ended.transfer_id),),
    )
