"""Reads a trace as the format of trace events has it, and refuses what it does not allow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

NEEDED = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "ts", "dur", "name", "args"},
    "i": {"pid", "tid", "ts", "s", "name", "args"},
    "C": {"pid", "ts", "name", "args"},
    "s": {"pid", "tid", "ts", "id", "cat", "name"},
    "f": {"pid", "tid", "ts", "id", "cat", "name", "bp"},
}
"""Fields of each phase, beside `ph`."""


@dataclass(frozen=True)
class Traced:
    process: str
    track: str
    kind: str
    begin_s: float
    end_s: float
    name: str
    args: dict[str, Any]
    sends: tuple[int, ...]
    """Numbers of the arrows that leave it."""
    takes: tuple[int, ...]


def _events(data: bytes) -> list[dict[str, Any]]:
    trace = json.loads(data)
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        assert set(event) - {"ph", "tid"} == NEEDED[event["ph"]] - {"tid"}, event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    return list(trace["traceEvents"])


def _names(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    named = [event for event in events if event["ph"] == "M" and event["name"] == what]
    found = {(event["pid"], event["tid"] if what == "thread_name" else 0): event["args"]["name"] for event in named}
    assert len(found) == len(named), "each has one name"
    return found


def tracks_of(data: bytes) -> list[str]:
    """Names of the processes."""
    return list(_names(_events(data), "process_name").values())


def events_of(data: bytes) -> list[Traced]:
    """Slices and instants, by row and time. Slices of a row must nest, and an arrow must begin and end in slices."""
    events = _events(data)
    processes, rows = _names(events, "process_name"), _names(events, "thread_name")
    shown = sorted(
        (event for event in events if event["ph"] in "Xi"),
        key=lambda event: (event["pid"], event["tid"], event["ts"], -event.get("dur", 0)),
    )
    arrows = [event for event in events if event["ph"] in "sf"]
    innermost: dict[int, list[tuple[str, int]]] = {}
    row, open_ends = (0, 0), list[float]()
    for event in shown:
        if (event["pid"], event["tid"]) != row:
            row, open_ends = (event["pid"], event["tid"]), []
        while open_ends and open_ends[-1] <= event["ts"] + 1e-4:
            open_ends.pop()
        end = event["ts"] + event.get("dur", 0)
        assert not open_ends or end <= open_ends[-1] + 1e-4, f"{event['name']} ends after what it is in"
        if event["ph"] == "X":
            open_ends.append(end)
    for arrow in arrows:
        inside = [
            event
            for event in shown
            if event["ph"] == "X"
            and (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
            and event["ts"] <= arrow["ts"] < event["ts"] + max(event["dur"], 1e-3)
        ]
        assert inside, "an arrow is bound to a slice"
        whole = max(inside, key=lambda event: event["dur"])
        innermost.setdefault(id(whole), []).append((arrow["ph"], arrow["id"]))
    ends = {number: sorted(a["ph"] for a in arrows if a["id"] == number) for number in {a["id"] for a in arrows}}
    assert all(each == ["f", "s"] for each in ends.values())
    return [
        Traced(
            processes[event["pid"], 0],
            rows[event["pid"], event["tid"]],
            {"X": "slice", "i": "instant"}[event["ph"]],
            event["ts"] / 1e6,
            (event["ts"] + event.get("dur", 0)) / 1e6,
            event["name"],
            event["args"],
            tuple(number for phase, number in innermost.get(id(event), ()) if phase == "s"),
            tuple(number for phase, number in innermost.get(id(event), ()) if phase == "f"),
        )
        for event in shown
    ]


def samples_of(data: bytes, name: str) -> list[tuple[float, float]]:
    """Time and value of a counter."""
    found = [event for event in _events(data) if event["ph"] == "C" and event["name"] == name]
    return [(event["ts"] / 1e6, next(iter(event["args"].values()))) for event in found]
