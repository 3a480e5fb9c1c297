"""Models load as transformers loads them; what the engine cannot run is refused at start, by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from pdlink.config import ModelConfig
from pdlink.engine import tiny
from pdlink.engine.models import load_model
from pdlink.errors import ConfigError
from tests.engine.small import prompt_of, rig, small_model

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def _sensitive(model: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, tiny.deviation(name, weight), generator=generator)
    return model.eval()


def _saved(model: Any, path: Path) -> str:
    model.save_pretrained(path)
    tiny.build_tokenizer().save_pretrained(path)
    return str(path)


def _config(path: str) -> ModelConfig:
    return ModelConfig(path=path, name="saved")


def test_built_model_is_the_same_for_the_same_seed_and_says_so() -> None:
    configs = (ModelConfig(num_layers=1, seed=seed) for seed in (1, 1, 2))
    one, same, other = (load_model(config) for config in configs)
    weights = [loaded.model.lm_head.weight for loaded in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert one.revision == same.revision != other.revision
    assert one.content == same.content != other.content
    assert one.content == load_model(ModelConfig(num_layers=1, seed=1, max_tokens=64)).content


def test_answers_of_the_built_model_are_printable() -> None:
    for seed in range(3):
        worker = rig()
        worker.generate(prompt_of(12, seed), 40)
        assert worker.heard.text("r").isascii()
        assert worker.heard.text("r").isprintable()
        assert len(worker.heard.text("r")) == 40


def test_built_tokenizer_is_one_token_per_byte() -> None:
    tokenizer = small_model().tokenizer
    text = "Grüße, 世界 🙂\n\t\0 end"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer("a<|end|>")["input_ids"] == [97, tiny.END_TOKEN_ID]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>hi<|end|><|assistant|>"
    assert small_model().vocab_size == len(tokenizer)
    assert small_model().eos_token_ids == {tokenizer.eos_token_id}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_saved_model_is_loaded_with_its_tokenizer(tmp_path: Path, dtype: Any) -> None:
    path = _saved(_sensitive(LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=[256, 3]))), tmp_path)
    loaded = load_model(ModelConfig(path=path, name="saved", dtype=dtype, max_tokens=10_000))
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, loaded.vocab_size) == (2, 2, 16, 262)
    assert loaded.eos_token_ids == {256, 3}
    assert loaded.max_tokens == 256, "the model has no more positions"
    assert loaded.model.lm_head.weight.dtype == getattr(torch, dtype)
    assert len(rig(model=loaded).generate(prompt_of(20), 6, ignore_eos=True)) == 6


def test_sliding_window_is_that_of_the_model(tmp_path: Path) -> None:
    """The window is shorter than the prompt, and the last tokens are decoded past it."""
    model = _sensitive(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=11, eos_token_id=256)))
    path = _saved(model, tmp_path)
    prompt = prompt_of(45)
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "use_cache": False}
    expected = model.generate(ids, **options)[0, len(prompt) :].tolist()
    model.config.sliding_window = None
    assert model.generate(ids, **options)[0, len(prompt) :].tolist() != expected, "the window has no effect"
    loaded = load_model(_config(path))
    for max_batched_tokens in (7, 512):
        worker = rig(model=loaded, max_batched_tokens=max_batched_tokens)
        assert worker.generate(prompt, 12, ignore_eos=True) == expected


def test_attention_of_another_kind_is_refused_at_start(tmp_path: Path) -> None:
    sizes = {**SIZES, "sliding_window": 16, "eos_token_id": 256, "attn_logit_softcapping": 20.0}
    path = _saved(Gemma2ForCausalLM(Gemma2Config(**sizes)), tmp_path)
    with pytest.raises(ConfigError, match="softcap"):
        load_model(_config(path))


def test_rope_that_looks_at_the_whole_batch_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    path = _saved(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)), tmp_path)
    with pytest.raises(ConfigError, match="dynamic"):
        load_model(_config(path))


def test_what_cannot_be_loaded_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_model(_config(str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty"):
        load_model(_config(str(tmp_path / "empty")))
    path = _saved(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="torn"):
        load_model(_config(path))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    """transformers fills them at random and warns; the answers would be noise."""
    path = _saved(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"lacks \d+ weights.*layers\.2"):
        load_model(_config(path))
