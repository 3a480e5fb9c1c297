"""Real vLLM servers whose weights are changed in place: every answer is of one model, as it was loaded at the time.

A trainer loads its next version into servers that run. Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from tests.e2e.engine_servers import place_of, post, prompt_of  # noqa: E402
from tests.e2e.vllm_servers import COMPUTES, Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [prompt_of(length, length) for length in (300, 700, 1500)]


def load(server: Server, model: Path) -> None:
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    assert post(f"{server.url}/collective_rpc", call).status == 200


@pytest.fixture(scope="module")
def folder(vllm_folder: Path) -> Path:
    """With a checkpoint `model`, and its next version: another norm in one layer, which changes its answers."""
    place = place_of(vllm_folder, "weights")
    new = place / "new"
    new.mkdir()
    for file in (place / "model").iterdir():
        (new / file.name).write_bytes(file.read_bytes())
    weights = load_file(new / "model.safetensors")
    norm = weights["model.layers.0.input_layernorm.weight"]
    norm.mul_(torch.rand(norm.shape, generator=torch.Generator().manual_seed(1)) + 0.5)
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    pair = Pair.of(folder, prefill_flags=COMPUTES, decode_flags=COMPUTES, environment=environment)
    yield pair
    pair.stop()


def test_a_pair_moves_kv_between_equal_weights_only(folder: Path, pair: Pair) -> None:
    def alone() -> list[list[int]]:
        return [pair.decode.complete(prompt).tokens[0] for prompt in PROMPTS]

    def together() -> list[list[int]]:
        return [pair.tokens(prompt)[0] for prompt in PROMPTS]

    def moved() -> float:
        """Prompts whose KV decode has got from prefill so far."""
        return pair.decode.metric("vllm:pdlink_transfers_total", 'side="receiver"', 'state="ready"')

    old = alone()
    assert together() == old
    assert moved() == 3
    load(pair.prefill, folder / "new")
    assert together() == old
    assert moved() == 3, "prefill has other weights"
    load(pair.decode, folder / "new")
    new = alone()
    assert all(one != other for one, other in zip(old, new, strict=True))
    assert together() == new
    assert moved() == 6, "both have the new ones"
    load(pair.decode, folder / "model")
    assert together() == old
    assert moved() == 6
