"""Real vLLM servers with an adapter whose files are replaced in place: every answer is of one of its two contents.

A trainer saves the next version over the last one; servers go on with what they have loaded until they load again.
Run with `make test-vllm`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from tests.e2e.engine_servers import place_of, prompt_of, until  # noqa: E402
from tests.e2e.test_vllm_store import tiers_of  # noqa: E402
from tests.e2e.vllm_servers import COMPUTES, Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "sql"
PROMPTS = [prompt_of(length, length) for length in (300, 700, 1500)]
CHUNK = 256
RANK = 8


def save_adapter(place: Path, model: Path, seed: int) -> None:
    """Of the attention's projections, with weights that change its answers."""
    config = json.loads((model / "config.json").read_text())
    chance = torch.Generator().manual_seed(seed)
    width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or width // heads
    sizes = {"q_proj": (heads * head, width), "k_proj": (kv_heads * head, width), "v_proj": (kv_heads * head, width)}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (outputs, inputs) in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, inputs, generator=chance) * inputs**-0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, RANK, generator=chance) * 0.2
    place.mkdir(parents=True)
    save_file(tensors, place / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes), "bias": "none"}
    said |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": "m", "lora_dropout": 0.0}
    (place / "adapter_config.json").write_text(json.dumps(said))


def flags(**adapters: Path) -> list[str]:
    modules = [f"{name}={path}" for name, path in adapters.items()]
    return ["--block-size", "128", "--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", *modules]


class Adapter:
    """A path that servers load, and the two contents that it has one after the other."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.place, self.contents = folder / "adapter", {name: folder / name for name in ("old", "new")}
        for seed, path in enumerate(self.contents.values()):
            save_adapter(path, model, seed)

    def put(self, name: str) -> None:
        """As a trainer saves: each file at once."""
        self.place.mkdir(exist_ok=True)
        for file in self.contents[name].iterdir():
            shutil.copy(file, self.place / "next")
            (self.place / "next").rename(self.place / file.name)


@pytest.fixture(scope="module")
def folder(vllm_folder: Path) -> Path:
    return place_of(vllm_folder, "adapters")


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Adapter:
    return Adapter(folder, folder / "model")


@pytest.fixture(scope="module")
def answers(folder: Path, adapter: Adapter) -> dict[str, list[list[int]]]:
    """Of a server that has both contents, by their names, to every prompt."""
    both = flags(old=adapter.contents["old"], new=adapter.contents["new"]) + ["--max-loras", "2"]
    with Server("both", folder / "model", folder / "both.log", [*COMPUTES, *both]).serving() as server:
        found = {name: [server.complete(p, model=name).tokens[0] for p in PROMPTS] for name in ("old", "new")}
    assert all(one != other for one, other in zip(found["old"], found["new"], strict=True))
    return found


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_store_has_no_kv_of_an_adapter_that_was_not_loaded_when_it_was_computed(
    folder: Path, adapter: Adapter, answers: dict[str, list[list[int]]], cleanup: ExitStack
) -> None:
    adapter.put("old")
    extra: dict[str, Any] = {"name": "kept", "tiers": tiers_of(folder)}
    connector = {"kv_role": "kv_both", "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
    words = [*COMPUTES, *flags(**{NAME: adapter.place})]
    server = Server("kept", folder / "model", folder / "kept.log", words, connector).start().wait_ready()
    cleanup.callback(server.kill)

    def asked() -> list[list[int]]:
        found = [server.complete(prompt, model=NAME).tokens[0] for prompt in PROMPTS]
        until(server.holds_nothing, "all of it is kept")
        return found

    def loaded() -> float:
        return server.metric("vllm:external_prefix_cache_hits_total")

    assert asked() == answers["old"]
    assert asked() == answers["old"]
    assert loaded() > 0, "what was loaded at the start is known, so its KV is kept and found"
    before = loaded()
    adapter.put("new")
    assert asked() == asked() == answers["old"], "the server goes on with what it has loaded"
    assert loaded() == before
    server.kill()
    server.start().wait_ready()
    assert asked() == answers["new"]
    assert loaded() == 0
    assert asked() == answers["new"]
    assert loaded() > 0


def test_a_pair_of_servers_that_have_loaded_two_contents_moves_no_kv(
    folder: Path, adapter: Adapter, answers: dict[str, list[list[int]]], cleanup: ExitStack
) -> None:
    adapter.put("old")
    words = [*COMPUTES, *flags(**{NAME: adapter.place})]
    pair = Pair.of(folder, prefill_flags=words, decode_flags=words)
    cleanup.callback(pair.stop)
    assert [pair.tokens(prompt, model=NAME)[0] for prompt in PROMPTS] == answers["old"]
    moved = pair.transferred()
    assert moved == sum(len(prompt) - 1 for prompt in PROMPTS), "equal contents: all of it is moved"
    adapter.put("new")
    pair.decode.kill()
    pair.decode.start().wait_ready()
    assert [pair.tokens(prompt, model=NAME)[0] for prompt in PROMPTS] == answers["new"]
    assert pair.decode.metric("vllm:kv_cache_usage_perc") == 0
    pair.prefill.kill()
    pair.prefill.start().wait_ready()
    moved = pair.transferred()
    assert [pair.tokens(prompt, model=NAME)[0] for prompt in PROMPTS] == answers["new"]
    assert pair.transferred() > moved, "both have the new one now"
