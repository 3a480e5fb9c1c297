"""vLLM on a GPU: prefill and decode share one by shares of its memory, and answer as one server without a connector.

Needs vLLM's build for CUDA; a stage of `make gpu`. Not run yet: virtual memory, tiers with graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        patch.setattr(Server, "ready_s", 150.0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm-gpu")
    save_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    with Server("alone", folder / "model", folder / "alone.log", [*SHARE, "--enforce-eager"]).serving() as alone:
        return {length: alone.complete(prompt_of(length, length)).tokens[0] for length in LENGTHS}


@pytest.mark.parametrize("graphs", ["piecewise graphs", "eager"])
def test_a_prompt_seen_before_comes_back_from_the_tiers_of_a_gpu(
    folder: Path, expected: dict[int, list[int]], graphs: str
) -> None:
    """Nothing of it is in vLLM's pool any more: it caches no prefixes there."""
    place = place_of(folder, f"tiers-{graphs.partition(' ')[0]}")
    flags = [*SHARE, "--enforce-eager" if graphs == "eager" else "--no-enforce-eager"]
    with server_of(place, "solo", flags, local_disk=None, max_local_disk_size=None).serving() as server:
        for length in LENGTHS:
            prompt, before = prompt_of(length, length), loaded(server)
            assert server.complete(prompt).tokens[0] == expected[length]
            until(server.holds_nothing, "all of it is kept")
            assert server.complete(prompt).tokens[0] == expected[length]
            assert loaded(server) - before == min(length - 1, length // CHUNK * CHUNK)


@pytest.mark.parametrize("lane", LANES)
def test_tokens_are_those_of_one_server_on_the_gpu(folder: Path, expected: dict[int, list[int]], lane: str) -> None:
    transport, more = LANES[lane]
    flags = [*SHARE, *more]
    place = place_of(folder, lane.partition(",")[0].replace(" ", "-"))
    pair = Pair.of(
        place,
        prefill_flags=[*flags, "--block-size", "16"],
        decode_flags=[*flags, "--block-size", "32"],
        transport=transport,
    )
    try:
        assert {length: pair.tokens(prompt_of(length, length))[0] for length in LENGTHS} == expected
        assert pair.transferred() == sum(LENGTHS) - len(LENGTHS)
        for server in (pair.prefill, pair.decode):
            until(server.holds_nothing, f"{server.name} holds nothing")
    finally:
        pair.stop()
