"""Tiny checkpoints of models whose layers do not all keep the same, sensitive to what each kind of layer keeps.

With the usual initialisation the greedy continuation of such a model hardly depends on what is in its caches: norms
after every block drown what attention adds, and gates forget at once. Here embeddings have the size of what a layer
adds, attention looks at few tokens, and states decay slowly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = 64
VOCABULARY = 512


def save_window_model(path: Path) -> None:
    """Sliding windows and full attention: two layers of every three have a window of 64 tokens."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _save(Gemma3ForCausalLM(config), path, embedding=config.hidden_size**-0.5)


def save_recurrent_model(path: Path, *, head_dim: int = 32) -> None:
    """Gated delta nets and full attention, in turn, with experts. vLLM runs it in bfloat16 on CPUs.

    head_dim: of attention; no multiple of 32 has a kernel that leaves a block's heads apart on CPUs with AMX, too.
    """
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        full_attention_interval=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _save(Qwen3NextForCausalLM(config).to(torch.bfloat16), path, embedding=1.0)


def save_convolution_model(path: Path) -> None:
    """Short convolutions and full attention, in turn."""
    config = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        conv_dim=256,
        block_dim=256,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"] * 2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _save(Lfm2ForCausalLM(config), path, embedding=1.0)


def _save(model: Any, path: Path, *, embedding: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, embedding)
            elif "lm_head" in name:
                parameter.normal_(0, 0.3)
            elif name.endswith("A_log"):
                parameter.fill_(-5.0)  # a state loses half a percent with a token
            elif name.endswith("dt_bias"):
                parameter.zero_()
            elif parameter.ndim >= 2:
                parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5)
    model.save_pretrained(path)
