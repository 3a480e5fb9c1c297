"""Loads a model, its tokenizer, and the few facts about them that the engine, the handshake and block keys need.

transformers' model code and weight loading are used as they are. What our paged attention cannot compute is refused
here, at start: after loading, one short forward pass with the paged cache is compared with transformers' own.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from pdlink.content import digest_of
from pdlink.engine import forward, tiny
from pdlink.engine.forward import LoadedModel, PagedCache, QuerySpan
from pdlink.engine.places import find_model
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from pdlink.config import ModelConfig


def load_model(config: ModelConfig, device: str = "cpu") -> LoadedModel:
    """The configured model, ready for the engine. Raises ConfigError that says why it cannot be loaded or run."""
    forward.register()
    where = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {device!r}, and torch {torch.__version__} finds no CUDA device")
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.path is None:
        model = tiny.build_model(
            seed=config.seed, num_layers=config.num_layers, max_tokens=config.max_tokens, dtype=dtype
        )
        model.set_attn_implementation(forward.IMPLEMENTATION)
        revision = f"seed-{config.seed}-layers-{config.num_layers}"
        return _describe(model.to(where), tiny.build_tokenizer(), config, revision, _digest_of(model), where)
    model, tokenizer = _from_pretrained(config, dtype)
    revision = getattr(model.config, "_commit_hash", None) or config.revision
    loaded = _describe(model.to(where), tokenizer, config, revision, digest_of(_directory(config)), where)
    _compare_with_transformers(loaded)
    return loaded


_MAX_REASON_CHARS = 400


def _from_pretrained(config: ModelConfig, dtype: torch.dtype) -> tuple[Any, Any]:
    # No code and no pickles from the hub. Missing weights would be made up at random, so they are an error.
    options = {"revision": config.revision, "trust_remote_code": False, "local_files_only": find_model(config)}
    disable_progress_bar()  # it would stand in the middle of the log
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, **options)
        model, report = AutoModelForCausalLM.from_pretrained(
            config.path, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]  # transformers explains at length
        raise ConfigError(f"model.path {config.path!r} cannot be loaded: {reason}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"model.path {config.path!r} lacks {len(missing)} weights, the first is {missing[0]}")
    return model.eval(), tokenizer


def _directory(config: ModelConfig) -> str:
    """The directory of the loaded files; of a hub model, in transformers' cache."""
    assert config.path is not None
    if os.path.isdir(config.path):
        return config.path
    found = cached_file(config.path, "config.json", revision=config.revision, local_files_only=True)
    return os.path.dirname(str(found))


def _digest_of(model: Any) -> str:
    """The digest of a built model, which has no files: of the first numbers of each weight."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} ".encode())
        digest.update(weight.flatten()[:_SAMPLED].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


_SAMPLED = 4096
"""Numbers of each weight. All weights come from one random sequence, so a difference changes all later ones."""


def _describe(
    model: Any, tokenizer: Any, config: ModelConfig, revision: str, content: str, device: torch.device
) -> LoadedModel:
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = text.eos_token_id if eos is None else eos
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=config.name,
        revision=revision,
        content=content,
        dtype=config.dtype,
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        longest_token=max(map(len, tokenizer.get_vocab())),
        vocab_size=model.get_input_embeddings().num_embeddings,
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
        max_tokens=min(config.max_tokens, getattr(text, "max_position_embeddings", None) or config.max_tokens),
        device=device,
    )


_PROBE_CHUNKS = ((0, 3), (3, 5), (5, 6))
"""A chunk without and one with KV behind it, then a single token."""
_PROBE_DIFFERENCE = {"float32": 0.01, "bfloat16": 0.3, "float16": 0.1}
"""Largest relative difference of logits that may be rounding; wrong attention gives about 1."""


def _compare_with_transformers(loaded: LoadedModel) -> None:
    """Set the model to paged attention and see that it gives the logits it gave before, whole and continued.

    Raises ConfigError for a model with attention of another kind (latent, linear, softcapped, ...), for one that does
    not let its attention be replaced, and for RoPE that depends on the longest request of a batch.
    """
    model, path = loaded.model, loaded.model.config.name_or_path
    rope = _rope_types(model.config.get_text_config()) & {"dynamic", "longrope"}
    if rope:
        raise ConfigError(
            f"model.path {path!r} has {rope.pop()} RoPE, which would depend on the other requests of a batch"
        )
    num_tokens = _PROBE_CHUNKS[-1][1]
    ids = (torch.arange(num_tokens) * 37 + 11) % loaded.vocab_size
    cache = PagedCache(loaded, num_blocks=2, block_tokens=num_tokens - 2)
    blocks = torch.tensor([1, 0])
    try:
        with torch.inference_mode():
            expected = model(ids[None].to(loaded.device), use_cache=False).logits[0].cpu()
        model.set_attn_implementation(forward.IMPLEMENTATION)
        parts = []
        for start, end in _PROBE_CHUNKS:
            rows = list(range(end - start))
            parts.append(loaded.logits(cache, ids[start:end], [QuerySpan(blocks, start, end)], rows))
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"model.path {path!r} does not run with paged attention: {error}") from error
    finally:
        cache.close()
    difference = float((torch.cat(parts) - expected).abs().max() / expected.abs().max())
    if not difference <= _PROBE_DIFFERENCE[loaded.dtype]:
        raise ConfigError(
            f"model.path {path!r} gives other logits with paged attention than without: relative {difference:.2g}"
        )


def _rope_types(text: Any) -> set[str]:
    """Kinds of RoPE of a model; some have one per kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in (parameters, *nested)}
