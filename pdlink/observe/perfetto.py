"""Traces as ui.perfetto.dev reads them: track events in protobuf, the few fields that are needed.

Numbers of fields are those of perfetto's `trace_packet.proto`, `track_event.proto` and `track_descriptor.proto`, by
which tests decode what is written here. A list of packets is one message; so traces can be joined by appending.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Value = str | int | float
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_SEQUENCE = 1
_CHRONOLOGICAL, _EXPLICIT = 2, 3


class Flow(NamedTuple):
    """Arrows between slices: from the slices that send a number to the one that takes it."""

    sends: Sequence[int] = ()
    takes: Sequence[int] = ()


class Trace:
    """Written track by track. Slices of one track must nest: see `Lanes` for slices that overlap."""

    def __init__(self, zero_s: float) -> None:
        """zero_s: nothing happens before it."""
        self._zero_s = zero_s
        self._packets: list[bytes] = []
        self._tracks = 0
        self.num_events = 0

    def process(self, name: str, rank: int) -> int:
        """The track of a process, which others are below. rank: its place, from 1 up; also its number."""
        process = _uint(1, rank) + _text(6, name)
        return self._track(_bytes(3, process) + _uint(11, _EXPLICIT))

    def track(self, name: str, parent: int, *, rank: int = 0) -> int:
        """Tracks of one name with one parent are shown as one, as high as it has to be."""
        return self._track(_text(2, name) + _uint(5, parent) + _uint(11, _EXPLICIT) + _uint(12, rank))

    def counter(self, name: str, unit: str, parent: int, *, rank: int = 0) -> int:
        return self._track(_text(2, name) + _uint(5, parent) + _bytes(8, _text(6, unit)) + _uint(12, rank))

    def begin(
        self, track: int, at_s: float, name: str, args: Mapping[str, Value] | None = None, flow: Flow | None = None
    ) -> None:
        """A slice, until the `end` of this track that closes it."""
        sends, takes = flow or Flow()
        arrows = b"".join(_fixed(47, each) for each in sends) + b"".join(_fixed(48, each) for each in takes)
        self._event(_BEGIN, track, at_s, _text(23, name) + _annotations(args or {}) + arrows)

    def end(self, track: int, at_s: float) -> None:
        self._event(_END, track, at_s, b"")

    def slice(
        self,
        track: int,
        span: tuple[float, float],
        name: str,
        args: Mapping[str, Value] | None = None,
        flow: Flow | None = None,
    ) -> None:
        """One that holds no others."""
        self.begin(track, span[0], name, args, flow)
        self.end(track, span[1])

    def instant(self, track: int, at_s: float, name: str, args: Mapping[str, Value] | None = None) -> None:
        self._event(_INSTANT, track, at_s, _text(23, name) + _annotations(args or {}))

    def sample(self, track: int, at_s: float, value: float) -> None:
        """Of a counter, until the next one."""
        self._event(_COUNTER, track, at_s, _double(44, value))

    def data(self) -> bytes:
        return b"".join(self._packets)

    def _track(self, fields: bytes) -> int:
        self._tracks += 1
        self._packet(_bytes(60, _uint(1, self._tracks) + fields))
        return self._tracks

    def _event(self, kind: int, track: int, at_s: float, fields: bytes) -> None:
        self.num_events += 1
        at_ns = max(0, round((at_s - self._zero_s) * 1e9))
        self._packet(_uint(8, at_ns) + _bytes(11, _uint(9, kind) + _uint(11, track) + fields))

    def _packet(self, fields: bytes) -> None:
        flags = b"" if self._packets else _uint(13, 1)  # the sequence begins: nothing was said before
        self._packets.append(_bytes(1, fields + _uint(10, _SEQUENCE) + flags))


class Lanes:
    """Tracks of one name, as many as spans overlap."""

    def __init__(self, trace: Trace, name: str, parent: int, *, rank: int = 0) -> None:
        self._trace, self._name, self._parent, self._rank = trace, name, parent, rank
        self._ends: list[float] = []
        self._tracks: list[int] = []

    def take(self, span: tuple[float, float]) -> int:
        """The track for it. Spans come in the order in which they begin."""
        for index, end_s in enumerate(self._ends):
            if end_s <= span[0]:
                self._ends[index] = span[1]
                return self._tracks[index]
        self._ends.append(span[1])
        self._tracks.append(self._trace.track(self._name, self._parent, rank=self._rank))
        return self._tracks[-1]


def _annotations(args: Mapping[str, Value]) -> bytes:
    return b"".join(_bytes(4, _text(10, name) + _value(value)) for name, value in args.items())


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(6, value)
    return _uint(4, value) if isinstance(value, int) else _double(5, value)


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative ones are two's complement
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _uint(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, 2) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode(errors="replace"))


def _fixed(number: int, value: int) -> bytes:
    return _key(number, 1) + struct.pack("<Q", value)


def _double(number: int, value: float) -> bytes:
    return _key(number, 1) + struct.pack("<d", value)
