"""vLLM on a GPU: prefill and decode share one by shares of its memory, and answer as one server without a connector.

Needs vLLM's build for CUDA; a stage of `make gpu`. Not run yet: virtual memory, tiers with graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402

from tests.e2e.engine_servers import place_of, prompt_of, save_model, until  # noqa: E402
from tests.e2e.test_vllm_store import CHUNK, loaded, server_of  # noqa: E402
from tests.e2e.vllm_servers import Pair, Server  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHARE = [
    # In bytes: two servers that start at once would each count the other's memory as its own while they profile.
    *("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30)),
    *("--max-num-batched-tokens", "512", "--no-enable-prefix-caching", "--attention-backend", "TRITON_ATTN"),
]
LENGTHS = [1, 33, 513, 2000]
GRAPHS = {"piecewise graphs": "--no-enforce-eager", "eager": "--enforce-eager"}
LANES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mapped-cuda, piecewise graphs": ({"kind": "mapped", "require": "mapped-cuda"}, []),
    "staged-tcp, eager": ({"kind": "tcp", "require": "staged-tcp"}, ["--enforce-eager"]),
    # mapped-cuda if this build of vLLM makes its virtual memory with handles, else pinned slots; the log says which.
    "virtual memory, eager": ({"kind": "mapped"}, ["--enforce-eager", "--enable-cumem-allocator"]),
}


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    """Their environment. In float32 other chunks of a prompt give the same tokens; with TF32 they might not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        patch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would be compiled at the start
        patch.setattr(Server, "ready_s", 180.0)  # all start at once
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm-gpu")
    save_model(folder / "model")
    return folder


@dataclass
class Cases:
    alone: Server
    """Without a connector."""
    solo: dict[str, Server]
    """With tiers, by their graphs."""
    pairs: dict[str, Future[Pair]]
    """By lane."""


@pytest.fixture(scope="module")
def cases(folder: Path) -> Iterator[Cases]:
    """Servers of all tests, which start at the same time: one after the other takes more than a visit has."""
    alone = Server("alone", folder / "model", folder / "alone.log", [*SHARE, "--enforce-eager"])
    solo = {}
    for graphs, flag in GRAPHS.items():
        place = place_of(folder, f"tiers-{graphs.partition(' ')[0]}")
        solo[graphs] = server_of(place, "solo", [*SHARE, flag], local_disk=None, max_local_disk_size=None)
    with ThreadPoolExecutor() as pool:
        pairs = {lane: pool.submit(pair_of, folder, lane) for lane in LANES}
        try:
            for server in (alone, *solo.values()):
                server.start()
            yield Cases(alone, solo, pairs)
        finally:
            for server in (alone, *solo.values()):
                server.kill()
            for pair in pairs.values():
                with contextlib.suppress(Exception):  # its test has told
                    pair.result().stop()


def pair_of(folder: Path, lane: str) -> Pair:
    transport, more = LANES[lane]
    flags = [*SHARE, *more]
    return Pair.of(
        place_of(folder, lane.partition(",")[0].replace(" ", "-")),
        prefill_flags=[*flags, "--block-size", "16"],
        decode_flags=[*flags, "--block-size", "32"],
        transport=transport,
    )


@pytest.fixture(scope="module")
def expected(cases: Cases) -> dict[int, list[int]]:
    cases.alone.wait_ready()
    return {length: cases.alone.complete(prompt_of(length, length)).tokens[0] for length in LENGTHS}


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_prompt_seen_before_comes_back_from_the_tiers_of_a_gpu(
    cases: Cases, expected: dict[int, list[int]], graphs: str
) -> None:
    """Nothing of it is in vLLM's pool any more: it caches no prefixes there."""
    server = cases.solo[graphs]
    server.wait_ready()
    for length in LENGTHS:
        prompt, before = prompt_of(length, length), loaded(server)
        assert server.complete(prompt).tokens[0] == expected[length]
        until(server.holds_nothing, "all of it is kept")
        assert server.complete(prompt).tokens[0] == expected[length]
        assert loaded(server) - before == min(length - 1, length // CHUNK * CHUNK)


@pytest.mark.parametrize("lane", LANES)
def test_tokens_are_those_of_one_server_on_the_gpu(cases: Cases, expected: dict[int, list[int]], lane: str) -> None:
    pair = cases.pairs[lane].result()
    assert {length: pair.tokens(prompt_of(length, length))[0] for length in LENGTHS} == expected
    assert pair.transferred() == sum(LENGTHS) - len(LENGTHS)
    for server in (pair.prefill, pair.decode):
        until(server.holds_nothing, f"{server.name} holds nothing")
