"""How the KV of an answer's prompt came to the decode worker, as a client reads it in `X-Pdlink-KV`.

An answer is right either way; but a deployment that recomputes every prompt pays for prefill twice, and without this
it looks healthy. Values: `transferred`; `cached` where decode had the whole prompt in its own prefix cache;
`recomputed;reason=CODE`; `unknown` where decode does not say; and in the
headers of a stream that began before decode had spoken, `transferring`. The last one is settled at the stream's end,
in a comment before `data: [DONE]`, which clients of server-sent events skip.
"""

from __future__ import annotations

import re

from .sse import before_done

HEADER = "X-Pdlink-KV"

TRANSFERRED, CACHED, RECOMPUTED = "transferred", "cached", "recomputed"
TRANSFERRING, UNKNOWN = "transferring", "unknown"
PATHS = (TRANSFERRED, CACHED, RECOMPUTED, TRANSFERRING, UNKNOWN)
"""What a value begins with: the label `path` of the metric. Reasons are made by workers, so they are no label."""

_VALUE = re.compile(r"transferred|cached|unknown|recomputed(;reason=[a-z0-9_:.-]{1,64})?")
_NOT_IN_CODES = re.compile(r"[^a-z0-9_.-]+")


def recomputed(*code: str) -> str:
    """Decode computed the prompt, and why: a code, or a code and what it is about."""
    parts = [_NOT_IN_CODES.sub("_", part.lower())[:31] for part in code]
    return f"{RECOMPUTED};reason={':'.join(parts)}"


def checked(said: str | None) -> str | None:
    """What a worker says, if it is one of the values; anything else is nothing said."""
    return said if said is not None and _VALUE.fullmatch(said) else None


def path_of(value: str) -> str:
    """The metric's label."""
    return value.partition(";")[0]


def settled(data: bytes, value: str) -> bytes:
    """The last events of a stream, with the value in a comment before the end marker."""
    return before_done(data, f": {HEADER}: {value}\n\n".encode())
