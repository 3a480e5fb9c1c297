"""`pdlink ray up` on a real Ray cluster of several nodes: what dies there, and what clients see of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .deployment import prompt_of, until
from .ray_cluster import START_S, Load, Nodes, RayUp

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Site:
    nodes: Nodes
    up: RayUp
    expected: dict[tuple[int, ...], str]

    def load(self) -> Load:
        return Load(self.up, self.expected, 4)

    def replaced(self, side: str, old: str, load: Load) -> str:
        """Wait until the proxy uses another worker in place of this one, and requests are served; its URL."""
        began_s = time.monotonic()
        until(lambda: [url for url in self.up.urls(side) if url != old] != [], f"another {side}", START_S)
        load.goes_on()
        load_1 = os.getloadavg()[0]
        print(f"{side} is back after {time.monotonic() - began_s:.1f} s, {len(load.refused)} refused, load {load_1}")
        return next(url for url in self.up.urls(side) if url != old)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(3)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def site(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    began_s = time.monotonic()
    up = RayUp(nodes.address, tmp_path_factory.mktemp("ray"))
    try:
        up.wait_ready()
        print(f"started in {time.monotonic() - began_s:.1f} s, load {os.getloadavg()[0]}")
        prompts = [prompt_of(60 + 7 * seed, seed) for seed in range(6)]
        expected = {}
        for prompt in prompts:
            answer = up.complete(prompt)
            assert answer.status == 200, answer.body
            assert answer.headers["X-Pdlink-KV"] in ("transferred", "transferring")
            expected[tuple(prompt)] = answer.text
        yield Site(nodes, up, expected)
    finally:
        status = up.stop()
    assert status == 0, up.log.read_text()[-3000:]


def test_workers_on_two_nodes_are_found_by_registration_and_serve_with_keys(site: Site) -> None:
    assert site.up.first.keys() == {"prefill-0", "decode-0"}
    (p_url, p_node), (d_url, d_node) = site.up.first["prefill-0"], site.up.first["decode-0"]
    assert p_node != d_node
    assert (site.up.urls("prefill"), site.up.urls("decode")) == ([p_url], [d_url])
    assert "insecure" not in site.up.log.read_text()


def test_an_infeasible_worker_is_told_at_once_with_what_there_is(nodes: Nodes, tmp_path: Path) -> None:
    up = RayUp(nodes.address, tmp_path, "--set", "ray.decode_resources={CPU: 64, GPU: 2}")
    assert up.process.wait(START_S) == 1
    said = up.log.read_text()
    assert "pdlink: ray.decode_resources: decode-0 needs 64 CPU, 2 GPU; the largest of 4 nodes has" in said
    assert "1 CPU, 0 GPU; ask for less, or start such a node" in said
    assert "Traceback" not in said


def test_a_killed_actor_takes_its_worker_along_and_another_is_found_at_a_new_url(site: Site) -> None:
    [old] = site.up.urls("decode")
    worker = site.up.worker(old)
    with site.load() as load:
        load.goes_on()
        worker.parent().kill()
        site.replaced("decode", old, load)
        until(lambda: not worker.is_running(), "the old worker has ended")
    assert load.wrong == []


def test_a_killed_raylet_costs_no_wrong_answer_and_its_worker_goes_to_another_node(site: Site) -> None:
    [old] = site.up.urls("decode")
    node = site.up.node_of(old, site.nodes)
    with site.load() as load:
        load.goes_on()
        site.nodes.kill(node)
        new = site.replaced("decode", old, load)
    assert load.wrong == []
    assert site.up.node_of(new, site.nodes) != node
    site.nodes.add()


def test_a_stopped_raylet_costs_nothing_while_its_worker_runs(site: Site) -> None:
    [url] = site.up.urls("prefill")
    raylet = site.nodes.raylet(site.up.node_of(url, site.nodes))
    with site.load() as load:
        raylet.send_signal(signal.SIGSTOP)
        try:
            load.goes_on(50)
            assert site.up.urls("prefill") == [url]
        finally:
            raylet.send_signal(signal.SIGCONT)
    assert (load.wrong, load.refused) == ([], [])


def test_a_host_that_hangs_is_replaced_and_stays_out_when_it_wakes_beside_its_successor(site: Site) -> None:
    [old] = site.up.urls("decode")
    node = site.up.node_of(old, site.nodes)
    worker, stopped = site.up.worker(old), site.nodes.processes(node)
    with site.load() as load:
        load.goes_on()
        for process in stopped:
            process.suspend()
        try:
            new = site.replaced("decode", old, load)
        finally:
            for process in stopped:
                process.resume()
        until(lambda: not worker.is_running(), "the old worker has ended", START_S)
        load.goes_on(20)
        assert site.up.urls("decode") == [new]
    assert load.wrong == []
