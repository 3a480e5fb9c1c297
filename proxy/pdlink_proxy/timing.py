"""Server-Timing: where the time of a request went, in ms.

`queue`, how long it waited for workers in all its attempts; `placement`, how long the last choice of them took. Of
the last attempt, `prefill` until its token; `transfer`, how long decode's first token came after it: the KV on its
way, as far as it was waited for; `decode` is that token since the legs began. And all until now: `ttft` or `total`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink._http import server_timing as written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .tries import Try

HEADER = "Server-Timing"
STAGES = ("queue", "placement", "prefill", "transfer")


def stages(tries: Sequence[Try], now_s: float, placement_s: float) -> dict[str, float]:
    """Seconds of each part of the way to the first token, as far as they are known."""
    queue_s = 0.0
    for each in tries:
        queue_s += (now_s if each.placed_s is None else each.placed_s) - each.wanted_s
    found = {"queue": queue_s, "placement": placement_s}
    last = tries[-1]
    if last.placed_s is not None and last.prefill_s is not None:
        found["prefill"] = last.prefill_s - last.placed_s
        if last.decode_s is not None and last.decode_s >= last.prefill_s:
            found["transfer"] = last.decode_s - last.prefill_s
    return found


def server_timing(found: Mapping[str, float], decode_s: float | None, last: str, until_now_s: float) -> str:
    """The header's value. found: the stages. decode_s: of decode's token, since the legs began. last: `ttft` or
    `total`."""
    get = found.get
    return written(found["queue"], found["placement"], get("prefill"), get("transfer"), decode_s, last, until_now_s)


def comment(value: str) -> bytes:
    """The first line of a comment of server-sent events; another one ends it."""
    return f": {HEADER}: {value}\n".encode()
