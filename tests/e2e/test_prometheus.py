"""A real Prometheus scrapes a live deployment: every query of the dashboard answers, every rule is evaluated."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.waiting import until

from .deployment import prompt_of
from .prometheus_server import ANSWER_S, dashboards, panels_of, scraped, traffic, with_prometheus
from .test_store import CHUNK, launched

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, with_prometheus]


def test_every_panel_has_data_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    panels = panels_of()
    ours = [expr for queries in panels.values() for expr in queries if not re.search(r'[("](vllm|sglang):', expr)]
    with launched(tmp_path) as (deployment, _):
        workers = [deployment.url(name) for name in ("prefill-0", "prefill-1", "decode")]
        ids: list[str] = []

        def ask(number: int) -> None:
            """An answer in one piece, and a stream."""
            prompt = prompt_of(3 * CHUNK, number)
            whole = deployment.complete(prompt)
            body = {"model": "pdlink-tiny", "prompt": prompt, "max_tokens": 16, "stream": True}
            told = urllib.request.Request(
                deployment.url("proxy") + "/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(told, timeout=60) as stream:
                stream.read()
                ids.extend((whole.headers["X-Request-Id"], stream.headers["X-Request-Id"]))

        with scraped(tmp_path, deployment.url("proxy"), workers, [deployment.url("store")]) as prometheus:
            with traffic(ask):
                prometheus.wait_for_panels(panels)
                prometheus.wait_for_queries(ours)
                prometheus.wait_for_rules()
                assert len(prometheus.ask("rules")["groups"][0]["rules"]) == len(dashboards.ALERTS)
            total = 'sum(pdlink_proxy_requests_total{outcome="ok"})'
            until(lambda: prometheus.values(total) == [float(len(ids))], "the last request is scraped", ANSWER_S)
            until(lambda: prometheus.values("sum(up)") == [5.0], "each answered the last scrape", ANSWER_S)
            assert prometheus.values('count(ALERTS{alertstate="firing"})') == []
            now_s = time.time()
            exemplars = prometheus.ask(
                "query_exemplars", query="pdlink_proxy_time_to_first_token_seconds_bucket",
                start=str(now_s - 600), end=str(now_s + 60),
            )  # fmt: skip
            named = {each["labels"]["request_id"] for series in exemplars for each in series["exemplars"]}
            assert named, "Prometheus asked for OpenMetrics"
            assert named <= set(ids)
