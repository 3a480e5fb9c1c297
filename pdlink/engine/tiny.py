"""A small Llama made on the spot from a seed: no download, and an answer that depends on every prompt token.

The answer of a default-initialised model is one token repeated, whatever its KV holds; it would hide every error of
a link. With unit-normal embeddings, wide linear layers and sharpened attention, changing one prompt token changes
the whole greedy continuation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
END_TOKEN_ID = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one layer."""

    hidden: int = 256
    intermediate: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32


def build_model(
    *, seed: int, num_layers: int, max_tokens: int, dtype: torch.dtype, sizes: Sizes | None = None
) -> Any:
    """A LlamaForCausalLM whose weights depend on `seed`, `num_layers` and `sizes` alone."""
    sizes = sizes or Sizes()
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL_TOKENS),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=END_TOKEN_ID + 1,
    )
    model = LlamaForCausalLM(config)
    # numpy's generator gives every host the same numbers; torch's depends on the instruction set.
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                normal = torch.from_numpy(random.standard_normal(weight.shape, dtype=np.float32))
                weight.copy_(normal * deviation(name, weight))
        # Only printable ASCII can win: the other tokens' logits are 0, far below the largest of 95 printable ones
        # (deviation 0.3 x sqrt(256)), so that answers can be read in a terminal and are valid UTF-8.
        model.lm_head.weight[[token for token in range(config.vocab_size) if not 32 <= token < 127]] = 0
    return model.to(dtype).eval()


def deviation(name: str, weight: torch.Tensor) -> float:
    """Standard deviation of a matrix of weights; the values were measured to make the model sensitive."""
    if "embed_tokens" in name:
        return 1.0
    if "lm_head" in name:
        return 0.3
    linear = math.sqrt(2 / weight.shape[1])
    return 1.5 * linear if "q_proj" in name or "k_proj" in name else linear


def build_tokenizer() -> Any:
    """One token per byte of UTF-8, its id the byte's value, then `SPECIAL_TOKENS`."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE
    )


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2, encoder.py `bytes_to_unicode`)."""
    symbols = []
    num_unprintable = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + num_unprintable))
            num_unprintable += 1
    return symbols
