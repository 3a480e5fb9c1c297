"""`pdlink` whose workers have links with faults, and slow layers, as a program that takes its words."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from pdlink import cli
from pdlink.engine.forward import LoadedModel
from pdlink.engine.models import load_model
from pdlink.node.node import Node
from pdlink.serve.worker import Worker
from pdlink_bench.chaos.tamper import FAULTS, LAYER_S, LinkFaults, channels, slow_down

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdlink.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedModel(LoadedModel):
    """A model that does something after each layer of a prompt, which is told by then."""

    after_layer: Callable[[int], None]

    @classmethod
    def of(cls, model: LoadedModel, **more: Any) -> Self:
        """The same model, with `after_layer`, and what a subclass has in addition."""
        return cls(**{each.name: getattr(model, each.name) for each in fields(LoadedModel)}, **more)

    def logits(
        self, *arguments: Any, layer_written: Callable[[int], None] | None = None, **options: Any
    ) -> torch.Tensor:
        def written(layer: int) -> None:
            assert layer_written is not None
            layer_written(layer)
            self.after_layer(layer)

        told = written if layer_written is not None else None
        return LoadedModel.logits(self, *arguments, layer_written=told, **options)


def main(words: Sequence[str]) -> int:
    """`pdlink` with these words."""
    faults = LinkFaults(**json.loads(os.environ.get(FAULTS, "{}")))
    layer_s = float(os.environ.get(LAYER_S, 0.0))

    def make_node(*arguments: Any, **options: Any) -> Node:
        node = Node(*arguments, channel=channels(faults), **options)
        slow_down(node.endpoint.transports.values(), faults)
        return node

    def slow(config: ModelConfig, device: str = "cpu") -> LoadedModel:
        return SteppedModel.of(load_model(config, device), after_layer=lambda _: time.sleep(layer_s))

    Worker.make_node = staticmethod(make_node)
    if layer_s:
        Worker.load_model = staticmethod(slow)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
