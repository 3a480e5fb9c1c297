"""What a worker tells the proxies that it has dialed: that it is there, and its health. One frame a beat.

Nothing is sent back. The health is the body of the worker's GET /health without the list of its peers, so that each
field has one meaning. What changes with every request is apart, in `WorkerLoad`: the rest is the same bytes from beat
to beat, which a proxy compares and does not read again. Durations only: clocks of two hosts are not compared.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdlink.api.fields import Count, Elapsed  # noqa: TC001  (msgspec reads annotations at run time)
from pdlink.errors import ProtocolError

VERSION = 1
MAX_NBYTES = 64 * 1024
"""Of a frame."""
MISSED_BEATS = 3
"""Without a beat for so many intervals, a worker is silent."""
SHORTEST_BEAT_S, LONGEST_BEAT_S = 0.05, 60.0


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has to do: fields of its GET /health, by the same names. Further fields go to the end."""

    running: Count
    waiting: Count
    load_tokens: Count | None
    free_blocks: Count
    queue_tokens: Count
    """Of prompts, to be computed here."""
    kv_used_tokens: Count
    """That requests hold."""
    prefill_s: Elapsed = 0.0
    """Seconds of forward passes that computed prompts, since the start."""
    decode_s: Elapsed = 0.0
    """The same of passes that made only further tokens of answers."""


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A worker to a proxy. Further fields go to the end."""

    version: int
    url: Annotated[str, msgspec.Meta(max_length=2048)]
    """Base URL of its HTTP interface, as the proxy reaches it."""
    health: bytes
    """The body of its GET /health, in JSON; with `load` without the fields of that."""
    beat_s: Annotated[float, msgspec.Meta(ge=SHORTEST_BEAT_S, le=LONGEST_BEAT_S)]
    """Until the next beat."""
    age_s: Elapsed
    """Since this life of the worker began: of two lives the younger one replaces the other."""
    cell: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """KV moves within a cell only; empty is any."""
    leaves: bool = False
    """It ends now: no beat follows."""
    load: WorkerLoad | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Beat)


def encode(beat: Beat) -> bytes:
    return _encoder.encode(beat)


def decode(frame: bytes) -> Beat:
    """Raises ProtocolError for anything else, another version too."""
    if len(frame) > MAX_NBYTES:
        raise ProtocolError(f"a beat: got {len(frame)} bytes; expected at most {MAX_NBYTES}")
    try:
        beat = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame of {len(frame)} bytes cannot be read: {error}") from None
    if beat.version != VERSION:
        raise ProtocolError(f"version {beat.version} of beats; this proxy reads version {VERSION}")
    return beat
