"""A fleet that runs: what its proxy says of its rate, its workers and its times, beside what is predicted of them."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import ConfigError
from pdlink.observe.fetch import CannotFetch, ask, base_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .sweep import Demand

_TTFT = "pdlink_proxy_time_to_first_token_seconds"
_PER_TOKEN = "pdlink_proxy_time_per_output_token_seconds"
_REQUESTS = "pdlink_proxy_requests_total"
_SAMPLE = re.compile(r"^(\w+)(\{[^}]*\})? ([0-9.eE+-]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What a proxy had in some seconds."""

    num_prefill: int
    """Workers that may get requests now."""
    num_decode: int
    per_s: float
    """Requests that were answered well."""
    ttft_s: float | None
    """Mean at the proxy; None if there was no request."""
    per_token_s: float | None

    @property
    def workers(self) -> int:
        return self.num_prefill + self.num_decode

    def compared(self, asked: Demand) -> list[str]:
        """Sentences: the fleet as it is, at the rate that it has, and what is predicted of that."""
        played = asked.played(self.num_prefill, self.num_decode, self.per_s)
        kept = asked.promise.kept(played)[0]
        predicted = float(played.ttft_s.mean()), float(np.nanmean(played.per_token_s))
        said = [
            f"Now: {self.num_prefill}P{self.num_decode}D at {self.per_s:.1f} requests/s, of which {kept:.0%} are"
            " predicted to have what is promised."
        ]
        for what, measured, expected in (
            ("time to first token", self.ttft_s, predicted[0]),
            ("time per token", self.per_token_s, predicted[1]),
        ):
            if measured:
                said.append(
                    f"Mean {what}: {measured * 1e3:.1f} ms at the proxy, {expected * 1e3:.1f} ms predicted"
                    f" ({expected / measured - 1:+.0%})."
                )
        return said


def watch(url: str, key: str | None, span_s: float) -> LiveFigures:
    """Ask a proxy twice, `span_s` apart.

    key: one of its `api_keys`. Raises CannotFetch if it does not answer, and ConfigError if it had no request
    meanwhile, or has no worker of a leg.
    """
    url = base_url(url)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    before = _sums(_text(url, "/metrics", headers))
    time.sleep(span_s)
    after = _sums(_text(url, "/metrics", headers))
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    sides = json.loads(_text(url, "/health", headers))
    if "prefill" not in sides:
        raise CannotFetch(f"{url} shows no workers in /health; is it a pdlink proxy, and --key-file one of its keys?")
    num_prefill, num_decode = (
        sum(worker["state"] == "ok" for worker in sides[side]) for side in ("prefill", "decode")
    )
    if not num_prefill or not num_decode:
        raise ConfigError(
            f"live: got {num_prefill} prefill and {num_decode} decode workers at {url}; expected 1 of each; "
            f"start them"
        )
    answered = grown.get(f"{_REQUESTS} ok", 0.0)
    if answered <= 0:
        raise ConfigError(f"live: got no request at {url} in {span_s:g} s; expected 1; set --live-s, or leave it out")
    return LiveFigures(num_prefill, num_decode, answered / span_s, _mean(grown, _TTFT), _mean(grown, _PER_TOKEN))


def _text(url: str, path: str, headers: Mapping[str, str]) -> str:
    status, body = ask(url, path, headers)
    if status not in (200, 503):
        raise CannotFetch(f"{url}{path} answered {status}; is it a pdlink proxy, and --key-file one of its keys?")
    return body.decode("utf-8", "replace")


def _sums(text: str) -> dict[str, float]:
    """Of an exposition by name, over all labels; requests by outcome besides."""
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        names = [name, f"{name} ok"] if name == _REQUESTS and 'outcome="ok"' in labels else [name]
        for each in names:
            found[each] = found.get(each, 0.0) + float(value)
    return found


def _mean(grown: Mapping[str, float], name: str) -> float | None:
    count = grown.get(f"{name}_count", 0.0)
    return grown[f"{name}_sum"] / count if count > 0 else None
