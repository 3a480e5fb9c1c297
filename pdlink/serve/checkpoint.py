"""The small model of `engine/tiny.py` on disk, for engines that load models from files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdlink.engine import tiny

if TYPE_CHECKING:
    from pathlib import Path


def write_checkpoint(path: Path, *, num_layers: int = 8, max_tokens: int = 8192, seed: int = 0, **sizes: int) -> None:
    """A directory that transformers and vLLM load: float32 weights, tokenizer, chat template.

    sizes: those of `tiny.Sizes`.
    """
    layer = tiny.Sizes(**sizes)
    model = tiny.build_model(
        seed=seed, num_layers=num_layers, max_tokens=max_tokens, dtype=torch.float32, sizes=layer
    )
    model.save_pretrained(path)
    tiny.build_tokenizer().save_pretrained(path)
