"""A `Report` of a server of vLLM or SGLang, from the text of its GET /metrics. Pure.

Their servers do not have GET /pdlink/state. What they count, and what pdlink's connector counts in them, is enough
for workers, lanes, rates and tiers; transfers one by one are not in it.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from .report import PeerSession, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAMPLE = re.compile(r"(\w+):(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OF_ENGINE = frozenset({"engine", "model_name"})
_REQUESTS = {
    "vllm": {"num_requests_running": "running", "num_requests_waiting": "waiting"},
    "sglang": {
        "num_running_reqs": "running",
        "num_queue_reqs": "waiting",
        "num_decode_transfer_queue_reqs": "awaiting_kv",
    },
}
_HELD = frozenset({"kv_cache_usage_perc", "token_usage"})
_SAMPLED = "generation_tokens_total"
_ORDER = {"tier_bytes": ("tier", "call")}
"""Labels of counters that have several, as the built-in engine's report has them."""


def report_of(text: str, prefix: str, name: str) -> Report:
    """prefix: `vllm` or `sglang`. name: of the worker. Raises ValueError, KeyError or OverflowError for a text that
    such a server does not write."""
    requests: Counter[str] = Counter()
    totals: dict[str, dict[str, float]] = {}
    peers, held, sampled = list[PeerSession](), None, 0.0
    for metric, labels, value in _samples(text, prefix):
        if (state := _REQUESTS[prefix].get(metric)) is not None:
            requests[state] += int(value)
        elif metric in _HELD:
            held = max(held or 0.0, value)
        elif metric == _SAMPLED:
            sampled += value
        elif metric == "pdlink_session_info" and value:
            peers.append(PeerSession(labels["peer"], "ready", labels["transport"], labels["lane"]))
        elif metric.startswith("pdlink_") and metric.endswith("_total"):
            short = metric.removeprefix("pdlink_").removesuffix("_total")
            own = _ORDER.get(short) or [label for label in labels if label not in _OF_ENGINE]
            place, values = "/".join(labels[label] for label in own), totals.setdefault(short, {})
            values[place] = values.get(place, 0.0) + value
    return Report(name, requests=dict(requests), peers=peers, held=held, sampled=sampled, totals=totals)


def _samples(text: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    wanted = {*_REQUESTS[prefix], *_HELD, _SAMPLED, "pdlink_session_info"}
    for line in text.splitlines():
        if not line.startswith(prefix) or "_bucket{" in line or (found := _SAMPLE.fullmatch(line)) is None:
            continue
        _, metric, labels, value = found.groups()
        if metric in wanted or (metric.startswith("pdlink_") and metric.endswith("_total")):
            yield metric, dict(_LABEL.findall(labels or "")), float(value)
