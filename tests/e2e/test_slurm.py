"""The batch script of deploy/slurm with a real Slurm of three nodes: workers found by files, and one node killed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdlink.config import ProxyConfig
from pdlink.fleet.child import start
from pdlink.serve.keys import keygen
from tests.private import write_private

from .deployment import READY_S, TIMEOUTS, Answer, Deployment, prompt_of, request, until
from .slurm_nodes import Slurm, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/pdlink.sbatch"
WORKERS = ("prefill-0", "decode-0", "decode-1")
START_S = 180.0


@dataclass
class Site:
    slurm: Slurm
    shared: Path
    proxy: str

    def listed(self) -> dict[str, str]:
        """File to URL."""
        return {path.stem: json.loads(path.read_text())["url"] for path in (self.shared / "workers").glob("*.json")}

    def used(self, side: str) -> set[str]:
        """URLs of the workers that the proxy sends requests to."""
        return {each["url"] for each in request(self.proxy + "/health").body[side] if each["state"] == "ok"}

    def complete(self, prompt: list[int]) -> Answer:
        body = {"model": "pdlink-tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        return request(self.proxy + "/v1/completions", body)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if "slurm" not in request.config.getoption("-m"):
        pytest.skip("Slurm's daemons are started by `make test-slurm` alone")
    if why := why_not():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="pdlink-slurm-", dir="/tmp"))  # short enough for sockets
    folder.chmod(0o755)
    shared = folder / "shared"
    keys = shared / "keys"
    keys.mkdir(parents=True)
    lines = [keygen(name, str(keys))[1] for name in WORKERS]
    (keys / "allow").write_text("\n".join(lines))
    write_private(keys / "http", "a secret of all")
    slurm = Slurm(folder, 3)
    try:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        sets = ["model.num_layers=8", *(f"timeouts.{name}={value}" for name, value in TIMEOUTS.items())]
        options = [word for each in sets for word in ("--set", each)]
        for role, indices in (("prefill", "0-0"), ("decode", "0-1")):
            slurm.submit(f"--array={indices}", str(SCRIPT), role, str(shared), *options, PATH=path)
        until(lambda: len(list((shared / "workers").glob("*.json"))) == len(WORKERS), "all are ready", START_S)
        config = ProxyConfig(
            listen="127.0.0.1:0",
            discover=(f"file:{shared}/workers",),
            worker_key_file=str(keys / "http"),
            health_interval_s=0.2,
            drain_s=2.0,
            policy="round_robin",
        )
        with Deployment() as deployment:
            deployment.children["proxy"] = start("proxy", "proxy", config.model_dump(mode="json"))
            deployment.children["proxy"].wait_ready(READY_S)
            site = Site(slurm, shared, deployment.url("proxy"))
            until(lambda: (len(site.used("prefill")), len(site.used("decode"))) == (1, 2), "all are used")
            yield site
    finally:
        slurm.close()
        shutil.rmtree(folder)


def test_jobs_are_found_by_their_files_and_kv_crosses_between_them(site: Site) -> None:
    assert set(site.listed()) == set(WORKERS)
    assert site.used("prefill") | site.used("decode") == set(site.listed().values())
    assert len({node for _, node in site.slurm.states().values()}) == 3
    answer = site.complete(prompt_of(40))
    assert (answer.status, answer.headers["X-Pdlink-KV"]) == (200, "transferred")


def test_a_killed_node_loses_no_request_and_its_job_alone_is_queued_again(site: Site) -> None:
    prompts = [prompt_of(60 + 7 * seed, seed) for seed in range(6)]
    expected = [site.complete(prompt).text for prompt in prompts]
    url = site.listed()["decode-1"]
    job, node = next((job, node) for job, (_, node) in site.slurm.states().items() if job.endswith("_1"))
    stop, right = threading.Event(), [0] * len(prompts)

    def ask(number: int) -> list[tuple[int, str]]:
        found = []
        while not stop.is_set():
            answer = site.complete(prompts[number])
            found.append((answer.status, answer.text if answer.status == 200 else str(answer.body)))
            right[number] += 1
        return found

    with ThreadPoolExecutor(len(prompts)) as threads:
        asking = [threads.submit(ask, number) for number in range(len(prompts))]
        try:
            until(lambda: min(right) >= 2, "all clients are served")
            site.slurm.kill(node)
            until(lambda: url not in site.used("decode"), "the proxy knows")
            before = min(right)
            until(lambda: min(right) >= before + 3, "all clients are served")
            until(lambda: site.slurm.states()[job][0] == "PENDING", "Slurm queues its job again", 90.0)
        finally:
            stop.set()
    for number, future in enumerate(asking):
        assert set(future.result()) == {(200, expected[number])}
    assert sorted(state for state, _ in site.slurm.states().values()) == ["PENDING", "RUNNING", "RUNNING"]


def test_a_cancelled_job_takes_its_file_away_and_drains(site: Site) -> None:
    url = site.listed()["decode-0"]
    job = next(
        job for job, (state, _) in site.slurm.states().items() if job.endswith("_0") and _role(site, job) == url
    )
    site.slurm.ask("scancel", job)
    until(lambda: "decode-0" not in site.listed(), "the file is gone")
    until(lambda: job not in site.slurm.states(), "the job has ended", 60.0)
    said = next(path.read_text() for path in site.slurm.folder.glob(f"pdlink-{job}.out"))
    assert "draining 0 requests" in said


def _role(site: Site, job: str) -> str:
    """The URL that this job's worker serves at."""
    for path in site.slurm.folder.glob(f"pdlink-{job}.out"):
        return path.read_text().partition(" ready on ")[2].partition(",")[0]
    return ""
