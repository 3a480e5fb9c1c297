"""The model of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pdlink.config.section import Section

SMALL_MODEL = {"path": str(Path(__file__).parents[1] / "engine" / "small"), "name": "pdlink-tiny"}
"""Comes with pdlink: less than a million weights, trained on its pages (`tools/small_model/`)."""


class ModelConfig(Section):
    """Which model a worker holds."""

    path: str | None = None
    """Local directory or hub id of a transformers causal LM. None makes a small Llama from `seed` on the spot."""
    revision: str = "main"
    """Revision on the hub; part of every block key and compared in the handshake."""
    name: str = "pdlink-tiny"
    """Name clients use in `model`; also the name of the built model. Defaults to the last part of `path`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and KV."""
    seed: int = 0
    """Of the built model's weights."""
    num_layers: int = Field(default=8, ge=1)
    """Layers of the built model."""
    max_tokens: int = Field(default=8192, ge=1)
    """Longest prompt plus answer, in tokens."""

    @model_validator(mode="before")
    @classmethod
    def _name_from_path(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("path") and not data.get("name"):
            return {**data, "name": Path(str(data["path"])).name}
        return data
