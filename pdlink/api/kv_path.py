"""The header `X-Pdlink-KV`: how the KV of a prompt came to the decode worker.

The answer is right either way. But a deployment that recomputes every prompt pays for prefill twice, and looks
healthy without this header. Workers, the vLLM connector and the proxy write the same values:

    transferred                 the KV came from prefill
    cached                      decode had the whole prompt in its own prefix cache
    recomputed;reason=CODE      decode computed the prompt; CODE a `Reason.label`
    transferring                the stream began before decode knew; a comment at its end has the final value
    unknown                     decode does not report it
"""

from __future__ import annotations

import re

HEADER = "X-Pdlink-KV"

TRANSFERRED, CACHED, RECOMPUTED = "transferred", "cached", "recomputed"
TRANSFERRING, UNKNOWN = "transferring", "unknown"
PATHS = (TRANSFERRED, CACHED, RECOMPUTED, TRANSFERRING, UNKNOWN)
"""First words of the values: the label `path` of the metric. Reasons come from workers, so they are not in labels."""

_VALUE = re.compile(r"transferred|cached|unknown|recomputed(;reason=[a-z0-9_:.-]{1,64})?")

USUAL = frozenset({TRANSFERRED, CACHED, UNKNOWN})
"""Values that are paths, without more."""


def recomputed(code: str) -> str:
    """Decode computed the prompt. code: a `Reason.label`."""
    return f"{RECOMPUTED};reason={code}"


def checked(value: str | None) -> str | None:
    """A worker's value if it is valid, else None."""
    return value if value in USUAL or (value is not None and _VALUE.fullmatch(value)) else None


def path_of(value: str) -> str:
    if value in USUAL:
        return value
    return value.partition(";")[0]
