"""What is wrong with the pairs of a deployment, from one small transfer of each. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from pdlink.api import kv_path
from pdlink.observe.findings import RECOMPUTED, Finding, remedy_of
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SLOW_SHARE = 0.25
"""A pair that moves KV at less than this share of the deployment's median is told of."""
_MIN_NBYTES = 1 << 20
"""Speeds of smaller transfers say more about the moment than about the link."""


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
            command = "pdlink check" if factor.startswith("transport") else ""
            found.append(Finding("bad", about, text, remedy_of(factor), command=command))
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
            "compare `pdlink check` on both hosts with that of a fast pair",
            command="pdlink bench transfer",
        )
        for index in slow_pairs(probes)
    ]
