"""Spans as a trace for ui.perfetto.dev, in the JSON of trace events that it reads beside its own format.

A process of the trace is a process of ours; its threads are rows. Spans of one track that overlap get a row each, and
a span below another one of its track lies in its row. https://perfetto.dev/docs/getting-started/other-formats
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdlink.observe.spans import Span


class TracedProcess(NamedTuple):
    """What one process did. Tracks are shown in the order in which they come first."""

    name: str
    spans: Sequence[Span]
    offset_s: float = 0.0
    """Added to its times, which are of its own clock."""
    rates: Mapping[float, float] = {}
    """GB/s from each of these times on."""


class Encoded(NamedTuple):
    data: bytes
    num_events: int
    """Slices, instants and samples."""


def encode(processes: Iterable[TracedProcess], arrows: Iterable[tuple[str, str]]) -> Encoded:
    """The trace; its time 0 is the first begin. arrows: ids of two spans; those of a span that is not there are left
    out."""
    processes = list(processes)
    begins = [span.begin_s + each.offset_s for each in processes for span in each.spans]
    zero_s = min(begins, default=0.0)
    events: list[dict[str, Any]] = []
    found: dict[str, tuple[dict[str, Any], float]] = {}
    num_events = 0
    for pid, process in enumerate(processes, 1):
        events.append(_named("process_name", pid, process.name))
        events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        shift_s = process.offset_s - zero_s
        for tid, (track, spans) in enumerate(_rows(process.spans), 1):
            events.append(_named("thread_name", pid, track, tid))
            place = {"pid": pid, "tid": tid}
            events.append({"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": tid}})
            for span in spans:
                begin_us, end_us = _us(span.begin_s + shift_s), _us(span.end_s + shift_s)
                args = {**span.attributes, "error": span.error} if span.error else span.attributes
                shown = {"name": span.label or span.name, "ts": begin_us, **place, "args": args}
                if span.end_s > span.begin_s or span.span_id:
                    events.append({"ph": "X", "dur": round(end_us - begin_us, 3), **shown})
                else:
                    events.append({"ph": "i", "s": "t", **shown})
                num_events += 1
                if span.span_id:
                    found[span.span_id] = place, begin_us
                    found[f"end of {span.span_id}"] = place, max(begin_us, round(end_us - 0.001, 3))
        for at_s, rate in process.rates.items():
            sample = {"name": "KV in flight", "pid": pid, "ts": _us(at_s + shift_s), "args": {"GB/s": rate}}
            events.append({"ph": "C", **sample})
            num_events += 1
    numbers = itertools.count(1)
    for source, target in arrows:
        if source in found and target in found:
            what = {"cat": "KV", "name": "KV", "id": next(numbers)}
            for phase, (place, at_us) in (({"ph": "s"}, found[source]), ({"ph": "f", "bp": "e"}, found[target])):
                events.append({**phase, **what, **place, "ts": at_us})
    return Encoded(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}), num_events)


def _rows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Track and spans of each row; rows of a track follow each other."""
    ids = {(span.track, span.span_id) for span in spans if span.span_id}
    below: dict[str, list[Span]] = {}
    tracks: dict[str, list[Span]] = {}
    for span in spans:
        if (span.track, span.parent_id) in ids:
            below.setdefault(span.parent_id, []).append(span)
        else:
            tracks.setdefault(span.track, []).append(span)
    rows = []
    for track, owners in tracks.items():
        ends: list[float] = []
        lanes: list[list[Span]] = []
        for span in sorted(owners, key=lambda each: each.begin_s):
            lane = next((index for index, end_s in enumerate(ends) if end_s <= span.begin_s), len(ends))
            if lane == len(ends):
                ends.append(0.0)
                lanes.append([])
            ends[lane] = span.end_s
            lanes[lane] += [span, *below.get(span.span_id, ())]
        rows += [(track, lane_spans) for lane_spans in lanes]
    return rows


def _named(what: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _us(at_s: float) -> float:
    """Microseconds, to the nanosecond."""
    return max(0.0, round(at_s * 1e6, 3))
