"""What is wrong with a deployment, in words and with what to do: the proxy finds it, and everybody tells the same.

GET /health of a proxy has the list; the page and `pdlink top` tell the first of it, and `pdlink doctor` prints it
with what it measures itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from pdlink.errors import HandshakeRefused
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RECOMPUTED = {
    "no_prefill": "no prefill worker is healthy; start one",
    "peer_lost": "decode lost its prefill worker on the way; read that worker's log, and `pdlink explain ID`",
    "not_connected": "decode cannot reach the prefill worker's control address; set listen or listen.advertise",
    "deadline": "the KV came too late; raise timeouts.request_s, or add prefill workers",
    "no_offer": "decode has no free blocks; raise cache.num_blocks, or add decode workers",
}
"""What to do where decode computed a prompt itself, by the reason in X-Pdlink-KV."""

CHOSEN = frozenset({"short_prompt", "cached_prompt", "decode_idle", "prompt_only_decode", "no_pair", "plain_sooner"})
"""Reasons for which the proxy lets decode compute a prompt because that is better."""

FACTORS = HandshakeRefused.REMEDIES | {
    "key": "each must be in the other's security.allow_file; add the line that `pdlink keygen` printed, and send the "
    "worker SIGHUP",
    "layout": "give both a KV cache that can be copied into the other's: dtype, heads, layers",
    "name": "set a valid `name`",
    "transport": "they have no lane in common; see `pdlink check` on both hosts, and `transport.kind`",
    "transport.require": "transport.require demands a lane that was not had; see `pdlink check` on both hosts",
    "version": "install the same pdlink on both",
}
"""What to do where two workers do not fit, by the property that differs; other properties are the model's."""
SAME_MODEL = "start both with the same model, revision and dtype"

_ROOM = "free memory on its host, or lower tiers.max_local_cpu_size"
_TIER_ROOM = "free room there, or lower tiers.max_local_disk_size; where it failed, read the worker's log"
_SERVER = "see that it runs, has room and takes pdlink's user, and that tiers.remote_url is right"
_REMEDIES = {"memory": _ROOM, "valkey": _SERVER, "objects": _SERVER}


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    level: Literal["bad", "warn"]
    """bad: requests fail, or gain nothing from prefill. warn: they may soon, or could be faster."""
    about: str
    """A worker, a pair, a setting or a part of the machine."""
    text: str
    remedy: str
    kind: str = ""
    """What it has in common with others of the same list."""
    others: int = 0
    """How many more there are of its kind, said by the first; very many are left out."""
    command: str = ""
    """What shows more of it; PROXY in it is the proxy's URL."""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: each.level != "bad")


def of_places(label: str, problems: Mapping[str, str], url: str = "") -> list[Finding]:
    """Memory and tiers that trouble a worker or a store process. problems: by place, of its GET /health."""
    return [
        Finding(
            level="warn",
            about=label,
            text=f"its {place} keeps less KV than the settings say: {why}",
            remedy=_REMEDIES.get(place.partition("-")[0], _TIER_ROOM),
            kind="place",
            command=f"pdlink cache stats {url}" if url else "",
        )
        for place, why in problems.items()
    ]


def remedy_of(factor: str) -> str:
    """Where two workers differ in this."""
    return FACTORS.get(factor, SAME_MODEL)


def of_recomputed(label: str) -> tuple[str, str]:
    """Why decode computed prompts itself, and what to do; empty if nobody knows. label: as in X-Pdlink-KV."""
    reason = Reason.of(label)
    remedy = remedy_of(reason.factor) if reason.code is Code.REFUSED else RECOMPUTED.get(label, "")
    return reason.sentence, remedy
