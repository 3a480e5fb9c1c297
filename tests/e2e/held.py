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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdlink import cli
from pdlink.config import ModelConfig
from pdlink.engine.forward import LoadedModel
from pdlink.engine.models import load_model
from pdlink.serve.worker import Worker
from pdlink_bench.chaos.worker import SteppedModel

HELD_BY = "HELD_BY"
"""Variable of such a process: the path of a file. While it is there, the engine stands still where its text says:
"layer 2" is after that layer of a prompt, "answers 3" after three passes over answers since the process began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel(SteppedModel):
    file: Path
    passes: Iterator[int]
    """Numbers of passes over answers."""

    def logits(
        self, *arguments: Any, layer_written: Callable[[int], None] | None = None, **options: Any
    ) -> torch.Tensor:
        if layer_written is None:
            number = next(self.passes)
            while (at := held_at(self.file)).startswith("answers ") and number >= int(at.split()[1]):
                time.sleep(0.002)
        return SteppedModel.logits(self, *arguments, layer_written=layer_written, **options)


def held_at(file: Path) -> str:
    """Where the engine is to stand still; empty for nowhere."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def main(words: Sequence[str]) -> int:
    """`pdlink` with these words."""

    file = Path(os.environ[HELD_BY])

    def hold(layer: int) -> None:
        while held_at(file) == f"layer {layer}":
            time.sleep(0.002)

    def held(config: ModelConfig, device: str = "cpu") -> LoadedModel:
        return HeldModel.of(load_model(config, device), after_layer=hold, file=file, passes=itertools.count())

    Worker.load_model = staticmethod(held)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
