"""Two workers that share what is in their memory: what one has computed the other pulls, with the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdlink.fleet.ports import free_ports
from tests.waiting import until

from .deployment import Deployment, prompt_of, request, worker_settings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

CHUNK = 64


def test_prompts_of_one_worker_are_pulled_by_the_other_and_computed_when_it_is_dead() -> None:
    port = free_ports(1)
    tiers = {"chunk_size": CHUNK, "max_local_cpu_size": 0.25, "load_if_faster": False}
    # Without shared prefixes of the pool, so that only the store knows a prompt.
    common = {"model": {"num_layers": 4}, "cache": {"share_prefixes": False}}
    workers = {
        "first": worker_settings("both", tiers={**tiers, "peer_port": port}, **common),
        "second": worker_settings("both", tiers={**tiers, "peers": [f"tcp://127.0.0.1:{port}"]}, **common),
    }
    prompts = [prompt_of(5 * CHUNK + 10, seed) for seed in range(4)]
    with Deployment.launch(workers, routed=False) as deployment:
        expected = [deployment.complete(prompt, at="first").text for prompt in prompts]
        assert len(set(expected)) == len(prompts)

        def pulled() -> float:
            name = f'pdlink_tier_bytes_total{{call="get",tier="peer 127.0.0.1:{port}"}}'
            return deployment.metric("second", name)

        assert [deployment.complete(prompt, at="second").text for prompt in prompts[:2]] == expected[:2]
        record_nbytes = 4096 + CHUNK * 4 * 2 * 4 * 32 * 4
        assert pulled() == 2 * 5 * record_nbytes
        deployment.kill("first")
        assert [deployment.complete(prompt, at="second").text for prompt in prompts] == expected
        assert pulled() == 2 * 5 * record_nbytes
        until(lambda: deployment.idle("second"), "the second worker is idle")
        assert deployment.health("second")["status"] == "ok"


def test_prompts_that_lie_in_memory_on_disk_and_at_a_peer_are_answered_as_computed(tmp_path: Path) -> None:
    """Two chunks each in memory, on disk and at the peer; then without the peer, then without the memory."""
    port = free_ports(1)
    tiers = {"chunk_size": CHUNK, "max_local_cpu_size": 0.25, "load_if_faster": False}
    disk = {"local_disk": str(tmp_path / "kv"), "max_local_disk_size": 0.25}
    common = {"model": {"num_layers": 4}, "cache": {"share_prefixes": False}}
    workers = {
        "alone": worker_settings("both", tiers={"max_local_cpu_size": 0}, **common),
        "owner": worker_settings("both", tiers={**tiers, "peer_port": port}, **common),
        "asker": worker_settings("both", tiers={**tiers, **disk, "peers": [f"tcp://127.0.0.1:{port}"]}, **common),
    }
    prompts = [prompt_of(6 * CHUNK + 3 + seed, seed) for seed in range(16)]
    peer = f"peer 127.0.0.1:{port}"
    with Deployment.launch(workers, routed=False) as deployment:

        def ask(verb: str, **body: object) -> dict[str, Any]:
            answer = request(f"{deployment.url('asker')}/pdlink/cache/{verb}", body)
            assert answer.status == 200, answer.body
            return answer.body

        def taken(place: str) -> float:
            return deployment.metric("asker", f'pdlink_store_chunks_total{{place="{place}"}}')

        def spread(prompt: list[int]) -> None:
            """Put its chunks where they are to lie at the asker."""
            ask("clear", prompt=prompt, places=["memory"])
            assert ask("warm", prompt=prompt[: 2 * CHUNK]) == {"tokens": 2 * CHUNK}
            found = ask("lookup", prompt=prompt)["runs"]
            assert found == [{"place": place, "tokens": 2 * CHUNK} for place in ("memory", "disk", peer)]

        def right_at_once() -> bool:
            return [answer.text for answer in deployment.complete_all(prompts, at="asker")] == expected

        expected = [deployment.complete(prompt, at="alone").text for prompt in prompts]
        assert len(set(expected)) == len(prompts)
        for prompt in prompts:
            deployment.complete(prompt[: 4 * CHUNK], at="asker", max_tokens=1)
        assert [deployment.complete(prompt, at="owner").text for prompt in prompts] == expected
        written = 'pdlink_tier_records_total{call="put",tier="disk"}'
        until(lambda: deployment.metric("asker", written) == 4 * len(prompts), "their first four chunks are on disk")
        spread(prompts[0])
        before = [taken(place) for place in ("memory", "disk", peer)]
        assert deployment.complete(prompts[0], at="asker").text == expected[0]
        assert [taken(place) for place in ("memory", "disk", peer)] == [count + 2 for count in before]
        for prompt in prompts[1:]:
            spread(prompt)
        assert right_at_once()
        deployment.kill("owner")
        ask("clear", everything=True, places=["memory"])
        assert right_at_once()
        deployment.kill("asker")
        deployment.restart("asker")
        assert right_at_once()
        assert taken("disk") >= 4 * len(prompts), "the disk is found again after a restart"
        until(lambda: deployment.idle("asker"), "the asker is idle")
