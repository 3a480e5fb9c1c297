"""Debian's Prometheus for the tests, and the dashboard's queries, which it is asked."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import until

from .deployment import request

ROOT = Path(__file__).parents[2]
ANSWER_S = 120.0
"""Until a query answers. A few scrapes are enough, but the machine may have other things to do."""
MAY_BE_ZERO = frozenset(
    {
        *("Queued requests, open streams", "Lost legs, by reason", "Retries and fallbacks", "Legs by worker"),
        *("Bytes waiting and in flight", "Transfers failed, by reason", "Recomputed, by reason", "Live transfers"),
        *("Requests in engines", "Blocks held"),
    }
)
"""Panels of what is 0 where all is well, or between two requests."""
with_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus: make test unpacks one"
)


def _dashboards() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return importlib.import_module("dashboards")


dashboards = _dashboards()


class Prometheus:
    """Debian's, on a port of its own."""

    def __init__(self, folder: Path, jobs: dict[str, list[str]]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        targets = {job: [url.removeprefix("http://") for url in urls] for job, urls in jobs.items()}
        config = {
            "global": {"scrape_interval": "4s", "scrape_timeout": "4s", "evaluation_interval": "1s"},
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
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

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

    def troubles(self) -> list[str]:
        """Why targets are not scraped."""
        targets = self.ask("targets")["activeTargets"]
        return [f"{each['scrapeUrl']}: {each['lastError']}" for each in targets if each["lastError"]]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    def wait_for_panels(self, panels: Mapping[str, Sequence[str]]) -> None:
        """Until each has shown something: a number of one of its queries, and not 0 but where that is well.

        panels: queries by title."""
        self._wait(panels, lambda title: 0.0 if title in MAY_BE_ZERO else sys.float_info.min)

    def wait_for_queries(self, queries: Sequence[str]) -> None:
        """Until each has answered with a number."""
        self._wait({expr: [expr] for expr in queries}, lambda _: -math.inf)

    def _wait(self, asked: Mapping[str, Sequence[str]], least: Callable[[str], float]) -> None:
        deadline_s, silent = time.monotonic() + ANSWER_S, dict(asked)
        while silent:
            for title, queries in list(silent.items()):
                found = (value for expr in queries for value in self.values(expr))
                if any(math.isfinite(value) and value >= least(title) for value in found):
                    del silent[title]
            assert time.monotonic() < deadline_s, f"no data: {list(silent)}; {self.troubles()}"
            time.sleep(0.5)

    def wait_for_rules(self) -> None:
        """Until all are evaluated."""
        until(
            lambda: {rule["health"] for rule in self.ask("rules")["groups"][0]["rules"]} == {"ok"},
            "all rules are evaluated",
            ANSWER_S,
        )


def panels_of(*without: str) -> dict[str, list[str]]:
    """Queries by title, without these panels."""
    return {
        panel.title: [dashboards.everywhere(query.expr) for query in panel.queries]
        for panels in dashboards.ROWS.values()
        for panel in panels
        if panel.title not in without
    }


@contextmanager
def scraped(folder: Path, proxy: str, workers: Sequence[str], stores: Sequence[str] = ()) -> Iterator[Prometheus]:
    """URLs of a deployment."""
    jobs = {"pdlink-proxy": [proxy], "pdlink-workers": list(workers), "pdlink-stores": list(stores)}
    prometheus = Prometheus(folder, jobs)
    try:
        until(prometheus.ready, "Prometheus answers", ANSWER_S)
        yield prometheus
    finally:
        prometheus.close()


@contextmanager
def traffic(ask: Callable[[int], None]) -> Iterator[None]:
    """Calls it with 0, 1, 2 and so on, one after the other in a thread, until the end."""
    over = threading.Event()

    def run() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            ask(number)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(120)
