"""What is wrong with a deployment, and what to do: from its proxy's health and from one probe of each pair. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec

from pdlink.api import kv_path
from pdlink.config import is_loopback
from pdlink.errors import HandshakeRefused
from pdlink.observe.remedies import RECOMPUTED
from pdlink.reasons import Code, Reason
from pdlink.store.interface import MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SLOW_SHARE = 0.25
"""A pair that moves KV at less than this share of the deployment's median is told of."""
_MIN_NBYTES = 1 << 20
"""Speeds of smaller transfers say more about the moment than about the link."""

_FACTORS = HandshakeRefused.REMEDIES | {
    "key": "each must be in the other's security.allow_file; add the line that `pdlink keygen` printed, and send the "
    "worker SIGHUP",
    "layout": "give both a KV cache that can be copied into the other's: dtype, heads, layers",
    "name": "set a valid `name`",
    "transport": "they have no lane in common; see `pdlink check` on both hosts, and `transport.kind`",
    "transport.require": "transport.require demands a lane that was not had; see `pdlink check` on both hosts",
    "version": "install the same pdlink on both",
}
"""Remedies by the property that differs; other properties are the model's."""
_SAME_MODEL = "start both with the same model, revision and dtype"

_STATES = {
    "unknown": "it has never answered; start it, or correct its URL in the proxy's settings",
    "draining": "it takes no new requests; start another one, or wait until it is back",
    "failed": "read its log, and start it again",
    "unreachable": "start it again, or correct its URL in the proxy's settings; `pdlink up` does so by itself",
    "wrong role": "list it on its own side in the proxy's settings, or start it with the other role",
    "invalid": "another program answers at this URL; correct it in the proxy's settings",
    "refuses our key": "give the proxy's worker_key_file the secret of the worker's security.http_key_file",
}

_ROOM = "free memory on its host, or lower tiers.max_local_cpu_size"
_TIER_ROOM = "free room there, or lower tiers.max_local_disk_size; where it failed, read the worker's log"


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    level: Literal["bad", "warn"]
    """bad: requests fail, or gain nothing from prefill. warn: they may soon, or could be faster."""
    about: str
    """A worker, a pair, a setting or a part of the machine."""
    text: str
    remedy: str


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: each.level != "bad")


def of_proxy(health: Mapping[str, Any]) -> list[Finding]:
    """health: the body of the proxy's GET /health, with a key if it has some."""
    found: list[Finding] = []
    sides = {side: list(health.get(side, ())) for side in ("prefill", "decode")}
    for side, workers in sides.items():
        if not workers:
            found.append(
                Finding(
                    "bad", "proxy", f"it lists no {side} worker", f"start it with --{side} URL, or {side} in its file"
                )
            )
        for worker in workers:
            found += _of_worker(worker)
    found += _names_twice(sides)
    found += _misfits(sides, health.get("mismatched", ()))
    for side in sides:
        models = {worker["health"]["model"] for worker in sides[side] if worker.get("health")}
        if len(models) > 1:
            found.append(
                Finding(
                    "warn",
                    f"{side} workers",
                    f"they serve different models: {', '.join(sorted(models))}",
                    "intended where one proxy routes several models; else start them with the same --model",
                )
            )
    return found


def _of_worker(worker: Mapping[str, Any]) -> list[Finding]:
    label, state, url = worker["label"], worker["state"], worker["url"]
    found = []
    if state != "ok":
        reason = f"{state}: {worker['reason']}" if worker.get("reason") and worker["reason"] != state else state
        remedy = _STATES.get(state, "read its log")
        found.append(Finding("warn" if state == "draining" else "bad", label, f"{url} is {reason}", remedy))
    elif worker.get("fails"):
        text = f"{url} answers GET /health, but its requests failed lately; the proxy leaves it alone for a while"
        found.append(Finding("warn", label, text, "read its log"))
    if worker.get("no_kv_events"):
        text = f"{url}: {worker['no_kv_events']}; placement guesses what KV it has"
        remedy = "compare the proxy's kv_events with the worker's (--kv-events-config of vLLM and SGLang)"
        found.append(Finding("warn", label, text, remedy))
    found += of_places(label, worker.get("health") or {})
    control = (worker.get("health") or {}).get("control") or ()
    for address in (control,) if isinstance(control, str) else control:
        host = urlsplit(address).hostname or ""
        if is_loopback(host) and not is_loopback(urlsplit(url).hostname or ""):
            text = f"{url} says that other workers reach it at {address.partition('?')[0]}, which is loopback"
            found.append(
                Finding("bad", label, text, "set listen or listen.advertise to an address that other hosts reach")
            )
    return found


def of_places(label: str, health: Mapping[str, Any]) -> list[Finding]:
    """Memory and tiers that trouble a worker or a store process, by its GET /health."""
    return [
        Finding(
            "warn",
            label,
            f"its {place} keeps less KV than the settings say: {why}",
            _ROOM if place == MEMORY else _TIER_ROOM,
        )
        for place, why in (health.get("problems") or {}).items()
    ]


def _misfits(
    sides: Mapping[str, Sequence[Mapping[str, Any]]], mismatched: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """Healthy workers of both sides that never serve a request together. mismatched: those of GET /health."""
    models = {
        side: {worker["health"]["model"] for worker in workers if worker["state"] == "ok" and worker.get("health")}
        for side, workers in sides.items()
    }
    found = [
        Finding(
            "bad",
            "models",
            f"decode serves {model}, and no prefill worker does: those serve {', '.join(sorted(models['prefill']))}",
            "start both sides with the same --model, and the same model.name if they set it",
        )
        for model in sorted(models["decode"] - models["prefill"])
        if models["prefill"]
    ]
    for each in mismatched:
        text = f"they do not fit together, {each['factor']} differs"
        if each["stranded"]:
            text += f"; such {each['stranded']} workers fit nobody, and decode computes every prompt again"
        level: Literal["bad", "warn"] = "bad" if each["stranded"] else "warn"
        about = f"{each['prefill']} → {each['decode']}"
        found.append(Finding(level, about, text, _FACTORS.get(each["factor"], _SAME_MODEL)))
    return found


def _names_twice(sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    urls: dict[str, set[str]] = {}
    for workers in sides.values():
        for worker in workers:
            if (health := worker.get("health")) and health.get("name") and health.get("control"):
                urls.setdefault(health["name"], set()).add(worker["url"])
    return [
        Finding(
            "bad", name, f"{' and '.join(sorted(of))} have one name; each replaces the other's sessions", "set `name`"
        )
        for name, of in urls.items()
        if len(of) > 1
    ]


def of_pairs(probes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """probes: answers of POST /pdlink/probe."""
    found = []
    for probe in probes:
        about = f"{probe['prefill']} → {probe['decode']}"
        path, _, label = probe["kv"].partition(";reason=")
        reason = Reason.of(label)
        if probe["error"]:
            remedy = f"read the logs of both; its transfer id is {probe['transfer_id']}"
            found.append(Finding("bad", about, f"a test transfer failed: {probe['error']}", remedy))
        elif path == kv_path.RECOMPUTED and reason.code is Code.REFUSED:
            factor = probe["factor"] or reason.factor
            values = f": {probe['local']} and {probe['remote']}" if probe["factor"] else ""
            text = f"they do not fit together, {factor} differs{values}; decode computes every prompt again"
            found.append(Finding("bad", about, text, _FACTORS.get(factor, _SAME_MODEL)))
        elif path == kv_path.RECOMPUTED:
            text = f"the KV did not cross: {reason.sentence}"
            found.append(Finding("bad", about, text, RECOMPUTED.get(label, "read the logs of both")))
        elif path == kv_path.UNKNOWN:
            text = "the answer is right, but decode does not say whether the KV crossed"
            found.append(Finding("warn", about, text, "decode needs pdlink's connector: docs/vllm.md"))
    return found + _slow(probes)


def speed_of(probe: Mapping[str, Any]) -> float | None:
    """GB/s while bytes were in flight."""
    return probe["nbytes"] / probe["moving_s"] / 1e9 if probe["moving_s"] else None


def slow_pairs(probes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of pairs that moved KV much slower than the median of all. One transfer may be slow because the host
    was busy: measure these again before they are told of."""
    speeds = _speeds(probes)
    if len(speeds) < 2:
        return []
    middle = statistics.median(speeds.values())
    return [index for index, speed in speeds.items() if speed < SLOW_SHARE * middle]


def faster(one: Mapping[str, Any], again: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of two probes of one pair that which says more of the link; `one` if the second one failed."""
    return max((one, again), key=lambda probe: (not probe["error"], speed_of(probe) or 0.0))


def _speeds(probes: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """By index, GB/s of transfers that are large enough to tell."""
    return {
        index: speed
        for index, probe in enumerate(probes)
        if probe["nbytes"] >= _MIN_NBYTES and (speed := speed_of(probe)) is not None
    }


def _slow(probes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    speeds = _speeds(probes)
    middle = statistics.median(speeds.values()) if speeds else 0.0
    return [
        Finding(
            "warn",
            f"{probes[index]['prefill']} → {probes[index]['decode']}",
            f"{speeds[index]:.2f} GB/s over {probes[index]['lane']} in the best of several transfers, the median of "
            f"all pairs is {middle:.2f}",
            "compare `pdlink check` on both hosts with that of a fast pair; `pdlink bench transfer` measures a host",
        )
        for index in slow_pairs(probes)
    ]


def of_requests(errors: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """errors: those of the proxy's GET /pdlink/state: causes of the last five minutes."""
    found = []
    for each in errors:
        kind, cause, newest = each["kind"], each["cause"], each["newest"]
        if kind == "recomputed":
            reason = Reason.of(cause)
            is_refused = reason.code is Code.REFUSED
            unknown = _FACTORS.get(reason.factor, _SAME_MODEL) if is_refused else f"`pdlink explain {newest}`"
            remedy = RECOMPUTED.get(cause, unknown)
            text = f"{_requests(each['count'])} computed their prompt on decode: {reason.sentence}"
            if cause not in _BY_CHOICE:
                found.append(Finding("warn", "requests", text, remedy))
        elif cause in ("failed", "broken"):
            text = f"{_requests(each['count'])} ended as {cause} in the last five minutes"
            found.append(Finding("bad", "requests", text, f"`pdlink explain {newest}`"))
    return found


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


_BY_CHOICE = frozenset({"prompt_only_decode", "short_prompt", "cached_prompt", "decode_idle"})
"""The proxy decided so: a transfer would not have paid, or the request cannot be split."""
