"""`pdlink` as a program whose engine stands still where a test says, until the test lets it go on.

A pass over prompts stands still after a layer, one over answers before it begins. So what a test does in the middle
of a transfer happens in the middle of it, however busy the machine is.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from pdlink import cli
from pdlink.config import ModelConfig
from pdlink.engine.forward import LoadedModel
from pdlink.engine.models import load_model
from pdlink.serve.worker import Worker

HELD_BY = "HELD_BY"
"""Variable of such a process: the path of a file. While it is there, the engine stands still where its text says:
"layer 2" is after that layer of a prompt, "answers 3" after three passes over answers since the process began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel(LoadedModel):
    file: Path
    passes: Iterator[int]
    """Numbers of passes over answers."""

    def logits(
        self, *arguments: Any, layer_written: Callable[[int], None] | None = None, **options: Any
    ) -> torch.Tensor:
        def written(layer: int) -> None:
            assert layer_written is not None
            layer_written(layer)
            while self._held_at() == f"layer {layer}":
                time.sleep(0.002)

        if layer_written is not None:
            return LoadedModel.logits(self, *arguments, layer_written=written, **options)
        number = next(self.passes)
        while (held_at := self._held_at()).startswith("answers ") and number >= int(held_at.split()[1]):
            time.sleep(0.002)
        return LoadedModel.logits(self, *arguments, **options)

    def _held_at(self) -> str:
        try:
            return self.file.read_text()
        except FileNotFoundError:
            return ""


def main(words: Sequence[str]) -> int:
    """`pdlink` with these words."""

    def held(config: ModelConfig, device: str = "cpu") -> LoadedModel:
        model = load_model(config, device)
        parts = {each.name: getattr(model, each.name) for each in fields(LoadedModel)}
        return HeldModel(**parts, file=Path(os.environ[HELD_BY]), passes=itertools.count())

    Worker.load_model = staticmethod(held)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
