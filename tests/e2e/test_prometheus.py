"""A real Prometheus scrapes a live deployment: every query of the dashboard answers, every rule is evaluated."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from .deployment import prompt_of, request, until
from .test_store import CHUNK, launched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .deployment import Deployment

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus: make test unpacks one"),
]

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("dashboards", ROOT / "tools/dashboards.py")
assert _SPEC is not None
assert _SPEC.loader is not None
dashboards = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(dashboards)
ANSWER_S = 120.0
"""Until a query answers. A few scrapes are enough, but the machine may have other things to do."""


class Prometheus:
    """Debian's, on a port of its own."""

    def __init__(self, folder: Path, jobs: dict[str, list[str]]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        targets = {job: [url.removeprefix("http://") for url in urls] for job, urls in jobs.items()}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "deploy/prometheus/pdlink.rules.yml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": urls}]} for job, urls in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = folder / "prometheus.log"
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
            "--enable-feature=exemplar-storage",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, path: str, **params: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(params)}", timeout=30) as said:
            return json.loads(said.read())["data"]

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return request(f"{self.url}/api/v1/targets").status == 200
        except (OSError, ValueError):  # it begins
            return False

    def values(self, expr: str) -> list[float]:
        """One for each series that there is."""
        found = self.ask("query", query=expr.replace("$__rate_interval", "20s"))["result"]
        return [float(series["value"][1]) for series in found]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def scraped(folder: Path, deployment: Deployment) -> Iterator[Prometheus]:
    workers = [deployment.url(name) for name in ("prefill-0", "prefill-1", "decode")]
    jobs = {"pdlink-proxy": [deployment.url("proxy")], "pdlink-workers": workers}
    prometheus = Prometheus(folder, {**jobs, "pdlink-stores": [deployment.url("store")]})
    try:
        until(prometheus.ready, "Prometheus answers", ANSWER_S)
        yield prometheus
    finally:
        prometheus.close()


@contextmanager
def traffic(deployment: Deployment) -> Iterator[list[str]]:
    """Requests one after the other, a stream and an answer in one piece, until the end. Yields their ids."""
    over, ids = threading.Event(), list[str]()

    def ask() -> None:
        seed = 0
        while not over.is_set():
            prompt = prompt_of(3 * CHUNK, seed)
            whole = deployment.complete(prompt)
            body = {"model": "pdlink-tiny", "prompt": prompt, "max_tokens": 16, "stream": True}
            told = urllib.request.Request(
                deployment.url("proxy") + "/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(told, timeout=60) as stream:
                stream.read()
                ids.extend((whole.headers["X-Request-Id"], stream.headers["X-Request-Id"]))
            seed += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield ids
    finally:
        over.set()
        thread.join(60)


def test_every_panel_answers_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    queries = {
        query.expr: f"{row}: {panel.title}"
        for row, panels in dashboards.ROWS.items()
        for panel in panels
        for query in panel.queries
    }
    with launched(tmp_path) as (deployment, _), scraped(tmp_path, deployment) as prometheus:
        with traffic(deployment) as ids:
            deadline_s, silent = time.monotonic() + ANSWER_S, dict(queries)
            while silent:
                silent = {
                    expr: title
                    for expr, title in silent.items()
                    if not any(map(math.isfinite, prometheus.values(expr)))
                }
                assert time.monotonic() < deadline_s, f"no answer: {silent}"
                time.sleep(0.5)
            rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
            until(
                lambda: {rule["health"] for rule in prometheus.ask("rules")["groups"][0]["rules"]} == {"ok"},
                "all rules are evaluated",
                ANSWER_S,
            )
            assert len(rules) == 19
        total = 'sum(pdlink_proxy_requests_total{outcome="ok"})'
        until(lambda: prometheus.values(total) == [float(len(ids))], "the last request is scraped", ANSWER_S)
        assert prometheus.values("sum(up)") == [5.0]
        assert prometheus.values('count(ALERTS{alertstate="firing"})') == []
        now_s = time.time()
        exemplars = prometheus.ask(
            "query_exemplars", query="pdlink_proxy_time_to_first_token_seconds_bucket",
            start=str(now_s - 600), end=str(now_s + 60),
        )  # fmt: skip
        named = {each["labels"]["request_id"] for series in exemplars for each in series["exemplars"]}
        assert named, "Prometheus asked for OpenMetrics"
        assert named <= set(ids)
