"""Server-Timing: where the time of a request went, in ms.

`queue` until the attempt had workers, of which `placement` chose them; `prefill` until its token; `transfer`, how
long decode's first token came after it: the KV on its way, as far as it was waited for. `decode` is that token since
the legs began. And all until now: `ttft` or `total`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink._http import server_timing as written

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .admission import Admission

HEADER = "Server-Timing"
STAGES = ("queue", "placement", "prefill", "transfer")


def stages(prefill_s: float | None, decode_s: float | None, admission: Admission) -> dict[str, float]:
    """Seconds of each part of the way to the first token, as far as they are known. prefill_s, decode_s: when each
    leg had its token."""
    found = {"queue": admission.placed_s - admission.started_s, "placement": admission.placement_s}
    if prefill_s is not None:
        found["prefill"] = prefill_s - admission.placed_s
        if decode_s is not None and decode_s >= prefill_s:
            found["transfer"] = decode_s - prefill_s
    return found


def server_timing(found: Mapping[str, float], decode_s: float | None, last: str, until_now_s: float) -> str:
    """The header's value. found: the stages. decode_s: of decode's token, since the legs began. last: `ttft` or
    `total`."""
    get = found.get
    return written(found["queue"], found["placement"], get("prefill"), get("transfer"), decode_s, last, until_now_s)


def comment(value: str) -> bytes:
    """The first line of a comment of server-sent events; another one ends it."""
    return f": {HEADER}: {value}\n".encode()
