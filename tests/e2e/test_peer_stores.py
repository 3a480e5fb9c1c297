"""Two store processes that are peers of each other, each with a prefill worker: what one computed the other pulls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdlink.fleet.ports import free_ports
from tests.waiting import until

from ..store.process import process
from .deployment import Deployment, of_store, prompt_of, worker_settings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

CHUNK = 32
NUM_CHUNKS = 6
RECORD_NBYTES = 4096 + CHUNK * 8 * 2 * 4 * 32 * 4
STORED = 'pdlink_store_records_total{change="stored"}'


def test_each_store_pulls_what_the_others_worker_computed_and_computes_when_it_is_dead(tmp_path: Path) -> None:
    port = free_ports(2)
    ports = {"left": port, "right": port + 1}
    paths = {label: tmp_path / label for label in ports}
    for path in paths.values():
        path.mkdir()

    def tiers(own: str, other: str) -> dict[str, object]:
        return {"max_local_cpu_size": 0.1, "peer_port": ports[own], "peers": [f"tcp://127.0.0.1:{ports[other]}"]}

    cache = {"share_prefixes": False}  # so that only the stores know a prompt
    with (
        process(paths["left"], tiers=tiers("left", "right")) as left,
        process(paths["right"], tiers=tiers("right", "left")) as right,
    ):
        workers = {
            name: worker_settings("prefill", tiers=of_store(store.path, CHUNK), cache=cache)
            for name, store in (("prefill-left", left), ("prefill-right", right))
        }
        workers["decode"] = worker_settings("decode", cache=cache, tiers={"max_local_cpu_size": 0})
        with Deployment.launch(workers, {"policy": "round_robin"}) as deployment:
            deployment.children |= {"left": left.child, "right": right.child}
            deployment.wait_store_answers("prefill-left", "prefill-right")
            try:
                check(deployment, ports)
            finally:
                del deployment.children["left"], deployment.children["right"]


def check(deployment: Deployment, ports: dict[str, int]) -> None:
    """Prefill workers take turns, left first."""
    prompts = [prompt_of(NUM_CHUNKS * CHUNK + 5, seed) for seed in range(3)]

    def answered(prompt: int) -> str:
        answer = deployment.complete(prompts[prompt])
        assert (answer.status, answer.headers.get("X-Pdlink-KV")) == (200, "transferred")
        return answer.text

    def pulled(by: str, of: str) -> float:
        name = f'pdlink_tier_bytes_total{{call="get",tier="peer 127.0.0.1:{ports[of]}"}}'
        return deployment.metric(by, name) / RECORD_NBYTES

    def stored(label: str, records: int) -> None:
        until(lambda: deployment.metric(label, STORED) == records, f"{label} has {records} records")

    expected = [answered(0), answered(1)]
    assert expected[0] != expected[1]
    for label in ports:
        stored(label, NUM_CHUNKS)
    assert pulled("left", "right") == pulled("right", "left") == 0
    assert [answered(1), answered(0)] == [expected[1], expected[0]]
    assert pulled("left", "right") == pulled("right", "left") == NUM_CHUNKS

    third = answered(2)
    stored("left", 3 * NUM_CHUNKS)
    deployment.kill("left")
    assert answered(2) == third, "the right one asks a dead store, and its worker computes"
    assert pulled("right", "left") == NUM_CHUNKS
    stored("right", 3 * NUM_CHUNKS)
    assert [answered(0), answered(0)] == [expected[0]] * 2
    for label in ("prefill-left", "prefill-right", "decode"):
        until(lambda label=label: deployment.idle(label), f"{label} is idle")  # type: ignore[misc]
