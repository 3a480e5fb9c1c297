"""Reads a trace by Perfetto's own definition of its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

# The environments of vLLM and SGLang do not have it. They collect these tests, too, to find their own.
pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
UnknownFieldSet = pytest.importorskip("google.protobuf.unknown_fields").UnknownFieldSet


@dataclass(frozen=True)
class Traced:
    process: str
    track: str
    """Its name, and those above it: `transfers < KV, decode-0`."""
    kind: str
    at_ns: int
    name: str
    args: dict[str, Any]
    sends: tuple[int, ...]
    takes: tuple[int, ...]
    value: float


def _packets(data: bytes) -> list[Any]:
    trace = pb.Trace()
    trace.ParseFromString(data)
    assert trace.packet
    assert not any(len(UnknownFieldSet(packet)) for packet in trace.packet)
    return list(trace.packet)


def _tracks(packets: list[Any]) -> dict[int, tuple[str, str]]:
    """Process and path of each track."""
    found: dict[int, tuple[str, str]] = {}
    for packet in packets:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in found
            if track.HasField("process"):
                found[track.uuid] = (track.process.process_name, "")
            else:
                process, above = found[track.parent_uuid]
                found[track.uuid] = (process, f"{track.name} < {above}" if above else track.name)
    return found


def tracks_of(data: bytes) -> list[str]:
    """Names of the processes."""
    return list(dict.fromkeys(process for process, _ in _tracks(_packets(data)).values()))


def events_of(data: bytes) -> list[Traced]:
    """In the order in which they were written. Slices of each track must nest."""
    packets = _packets(data)
    tracks, found = _tracks(packets), []
    kinds = {1: "BEGIN", 2: "END", 3: "INSTANT", 4: "COUNTER"}
    open_: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for packet in packets:
        assert packet.trusted_packet_sequence_id
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        assert packet.timestamp >= last.get(event.track_uuid, 0), "times of a track go on"
        last[event.track_uuid] = packet.timestamp
        stack = open_.setdefault(event.track_uuid, [])
        if event.type == 1:
            stack.append(packet.timestamp)
        elif event.type == 2:
            stack.pop()
        args = {each.name: getattr(each, each.WhichOneof("value")) for each in event.debug_annotations}
        sends, takes = tuple(event.flow_ids), tuple(event.terminating_flow_ids)
        process, track = tracks[event.track_uuid]
        value = event.double_counter_value
        found.append(
            Traced(process, track, kinds[event.type], packet.timestamp, event.name, args, sends, takes, value)
        )
    assert not any(open_.values()), "every slice ends"
    return found
