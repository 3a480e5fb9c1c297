"""Real vLLM servers that keep prompts in a store: the same tokens as from one server that computes them, always.

Prefix caching is off, so what is not computed comes from the store. Run with `make test-vllm`.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from pdlink.fleet.ports import free_ports  # noqa: E402
from tests.e2e.conftest import VLLM_CONCURRENT, Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import COMPUTES, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 256
ADMIN = f"127.0.0.1:{free_ports(1)}"
"""Where operators reach the server that most tests share."""
WRITTEN = "vllm:pdlink_tier_records_total", 'call="put"'


def tiers_of(place: Path, **more: Any) -> dict[str, Any]:
    return {
        "chunk_size": CHUNK,
        "load_if_faster": False,
        "max_local_cpu_size": 0.5,
        "local_disk": str(place / "disk-{name}"),
        "max_local_disk_size": 1,
        **more,
    }


def server_of(place: Path, name: str, flags: list[str], on_failure: str = "fail", **tiers: Any) -> Server:
    """One that computes, keeps and decodes; not started. on_failure: "fail" where nothing of a test may fail."""
    connector = {
        "kv_role": "kv_both",
        "kv_load_failure_policy": on_failure,
        "kv_connector_extra_config": {"name": name, "tiers": tiers_of(place, **tiers)},
    }
    return Server(name, place / "model", place / f"{name}.log", [*COMPUTES, *flags], connector)


def loaded(server: Server) -> float:
    """Prompt tokens that came from the store so far, by vLLM's own account."""
    return server.metric("vllm:external_prefix_cache_hits_total")


@pytest.fixture(scope="module")
def server(vllm_folder: Path, alone: Alone) -> Iterator[Server]:
    server = server_of(place_of(vllm_folder, "store"), "solo", ["--block-size", "128"])
    assert server.connector is not None
    server.connector["kv_connector_extra_config"]["admin"] = ADMIN
    server.start().wait_ready()
    yield server
    server.kill()


def operate(verb: str, **fields: Any) -> Any:
    url, kind = f"http://{ADMIN}/pdlink/cache/{verb}", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(fields).encode(), kind), timeout=60) as answer:
        return json.load(answer)


def test_operators_warm_and_clear_prompts_by_token_ids(server: Server, alone: Alone) -> None:
    prompt, kept = prompt_of(2000, 2000), 1792

    ask = partial(operate, prompt=prompt)

    def completes(loads: int) -> None:
        before = loaded(server)
        assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
        assert loaded(server) == before + loads
        until(server.holds_nothing, "all of it is kept")

    completes(0)
    until(lambda: ask("move", source="memory", destination="disk")["tokens"] == kept, "the disk has it")
    assert ask("clear", places=["memory"])["records"] == kept // CHUNK
    assert ask("lookup")["runs"] == [{"place": "disk", "tokens": kept}]
    assert ask("warm") == {"tokens": kept}
    assert ask("lookup")["runs"] == [{"place": "memory", "tokens": kept}]
    assert ask("lookup", cache_salt="another")["tokens"] == 0
    completes(kept)
    assert ask("verify")["disk"] == {"right": kept // CHUNK, "wrong": 0, "unknown": 0}
    assert ask("clear")["records"] == kept // CHUNK
    completes(0)
    assert ask("clear")["records"] == kept // CHUNK, "it was kept again"


def test_a_session_keeps_its_kv_in_memory_while_others_push_until_an_operator_ends_it(server: Server) -> None:
    prompt, salt = prompt_of(600, 1), {"cache_salt": "agents"}
    session = {"kv_transfer_params": {"session_id": "agent", "session_ttl_s": 600}}
    first = server.complete(prompt, **salt, **session).tokens
    until(server.holds_nothing, "all of it is kept")
    with urllib.request.urlopen(f"http://{ADMIN}/pdlink/cache", timeout=60) as answer:
        state = json.load(answer)
    assert [(each["name"], each["records"]) for each in state["sessions"]] == [("agent", 2)]
    (scope,) = state["scopes"]
    operate("quota", **salt, gib=4.5 * sum(scope["record_nbytes"]) / 2**30)  # which others fill

    def push(seed: int) -> None:
        for number in range(3):
            server.complete(prompt_of(600, seed + number), **salt)
            until(server.holds_nothing, "all of it is kept")

    push(10)
    assert operate("lookup", prompt=prompt, **salt)["runs"] == [{"place": "memory", "tokens": 512}]
    before = loaded(server)
    assert server.complete(prompt, **salt, **session).tokens == first
    assert loaded(server) == before + 512
    assert operate("end_session", session_id="agent", **salt) == {"ended": True}
    push(20)
    assert operate("lookup", prompt=prompt, **salt)["runs"] == [{"place": "disk", "tokens": 512}]
    assert operate("end_session", session_id="agent", **salt) == {"ended": False}
    operate("quota", **salt)


@pytest.mark.parametrize("length", [255, 257, 513, 2000, 4096])
def test_a_prompt_that_was_computed_once_is_loaded(server: Server, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    before = loaded(server)
    assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
    assert loaded(server) == before
    until(server.holds_nothing, "all of it is kept")
    assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
    assert loaded(server) == before + min(length - 1, length // CHUNK * CHUNK)


def test_what_was_kept_outlives_sigkill(server: Server, alone: Alone) -> None:
    prompt = prompt_of(4096, 4096)
    assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
    until(lambda: server.metric(*WRITTEN) >= 16, "the disk has it")
    server.kill()
    server.start().wait_ready()
    assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
    assert loaded(server) == 4095


@pytest.mark.slow
def test_a_prompt_of_which_the_disk_has_lost_a_part_is_loaded_up_to_there(vllm_folder: Path, alone: Alone) -> None:
    """vLLM is promised all of it and parks the request; what does not come it computes, in the same blocks."""
    place, prompt = place_of(vllm_folder, "store-lossy"), prompt_of(4096, 4096)
    server = server_of(place, "lossy", ["--block-size", "128"], "recompute")
    try:
        server.start().wait_ready()
        assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
        until(lambda: server.metric(*WRITTEN) >= 16, "the disk has it")
        server.kill()
        server.start().wait_ready()
        assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
        assert "Recovered" not in server.log.read_text(), "all of it came"
        server.kill()
        spoil(place / "disk-lossy")
        server.start().wait_ready()
        assert server.complete(prompt).tokens == [alone[tuple(prompt)]]
        (affected,) = re.findall(r"Recovered from KV load failure: 1 .* \((\d+) tokens", server.log.read_text())
        assert 0 < int(affected) < 3840, "what came before the lost chunk counts"
        until(server.holds_nothing, "the server holds nothing")
    finally:
        server.kill()


def spoil(disk: Path) -> None:
    """Change bytes in the middle of what the records of a disk take."""
    path = max((one for one in disk.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    segments = np.memmap(path, np.uint8, "r+")
    used = np.flatnonzero(segments[: segments.size // 4096 * 4096].reshape(-1, 4096).any(axis=1))[-1] * 4096
    segments[used // 2 : used // 2 + (1 << 16)] ^= 1
    segments.flush()


def test_prompts_of_another_salt_are_computed(server: Server, alone: Alone) -> None:
    prompt = prompt_of(2000, 2000)
    server.complete(prompt)
    until(server.holds_nothing, "all of it is kept")
    before = loaded(server)
    assert server.complete(prompt, cache_salt="another").tokens == [alone[tuple(prompt)]]
    assert loaded(server) == before


def test_sixteen_at_once_with_preemption_do_not_mix(vllm_folder: Path, alone: Alone) -> None:
    """Blocks for the prompts, not for their answers; twice, so that half of them are loaded."""
    place = place_of(vllm_folder, "store-tight")
    tight = ["--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", "72"]
    tight += ["--no-scheduler-reserve-full-isl", "--long-prefill-token-threshold", "64"]
    server = server_of(place, "tight", tight, chunk_size=64)
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    try:
        server.start().wait_ready()
        for _ in range(3):
            with ThreadPoolExecutor(len(prompts)) as threads:
                answers = list(threads.map(server.complete, prompts))
            assert [answer.tokens for answer in answers] == [[alone[tuple(prompt)]] for prompt in prompts]
        assert server.metric("vllm:num_preemptions_total") > 0, "there was room for all prompts"
        assert loaded(server) > 0
        until(server.holds_nothing, "the server holds nothing")
    finally:
        server.kill()
