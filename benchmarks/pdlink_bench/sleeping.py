"""A model that sleeps in place of computing: layers are ready when they would be, answers are one token repeated.

    SLEEPING_COSTS='{"step_s": 0.01}' python -m pdlink_bench.sleeping decode

is a worker with such a model, so that many workers share a machine as if each had its own. KV is zeros; all else is
real.

A pass that follows another one at once begins where that one should have ended, not where it did: on a machine that
is shared by many workers, waking up and HTTP take a while, which a real engine does beside its GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch

from pdlink import cli
from pdlink.engine.forward import LoadedModel
from pdlink.engine.models import load_model
from pdlink.serve.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import ModelConfig
    from pdlink.engine.forward import PagedCache, QuerySpan

AT_ONCE_S = 0.02
"""So late after the one before a pass still counts as following at once."""


COSTS = "SLEEPING_COSTS"
"""The environment variable with the costs, a JSON object. No setting, so its name does not begin as theirs do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds, by the names that `pdlink plan --curves` reads."""

    prompt_s: float = 0.0
    """Of each pass over prompts."""
    token_s: float = 0.0
    """Of each new token of a prompt."""
    attention_s: float = 0.0
    """Of each pair of a new token and one before it."""
    step_s: float = 0.0
    """Of each pass over answers."""
    sequence_s: float = 0.0
    """Of each answer in it."""
    context_s: float = 0.0
    """Of each token of KV that it reads."""


@dataclass(slots=True)
class _Clock:
    ended_s: float = 0.0
    """When the last pass should have ended; time.monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepingModel(LoadedModel):
    """Takes the tokenizer, the layout and the name from a real model."""

    costs: Costs
    token: int
    """Of every answer."""
    clock: _Clock = field(default_factory=_Clock)

    @classmethod
    def of(cls, model: LoadedModel, costs: Costs) -> SleepingModel:
        """The same model, asleep."""
        known = {each.name: getattr(model, each.name) for each in fields(LoadedModel)}
        visible = (
            token
            for token in range(model.vocab_size)
            if token not in model.eos_token_ids and model.tokenizer.decode([token]).strip()
        )
        return cls(**known, costs=costs, token=next(visible))

    def seconds(self, spans: Sequence[QuerySpan]) -> float:
        """Of a pass. A span of one token is an answer's."""
        prompts = [span for span in spans if span.end - span.start > 1]
        answers = [span for span in spans if span.end - span.start == 1]
        costs, took_s = self.costs, 0.0
        if prompts:
            took_s += costs.prompt_s
        for span in prompts:
            new = span.end - span.start
            took_s += costs.token_s * new + costs.attention_s * new * (span.start + new / 2)
        if answers:
            took_s += costs.step_s + costs.sequence_s * len(answers)
            took_s += costs.context_s * sum(span.end for span in answers)
        return took_s

    def logits(
        self,
        cache: PagedCache,
        tokens: torch.Tensor,
        spans: Sequence[QuerySpan],
        rows: Sequence[int],
        *,
        layer_written: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """After the time of a pass, logits [len(rows), vocab_size] that all say the same token."""
        took_s, num_layers = self.seconds(spans), len(cache.layout.layers)
        began_s = time.monotonic()
        if began_s - self.clock.ended_s < AT_ONCE_S:
            began_s = self.clock.ended_s
        for layer in range(num_layers):
            if layer_written is not None or layer == num_layers - 1:
                time.sleep(max(0.0, began_s + took_s * (layer + 1) / num_layers - time.monotonic()))
            if layer_written is not None:
                layer_written(layer)
        self.clock.ended_s = began_s + took_s
        found = torch.zeros(len(rows), self.vocab_size)
        found[:, self.token] = 1.0
        return found


def main(words: Sequence[str]) -> int:
    """`pdlink` with these words, whose workers sleep."""
    costs = Costs(**json.loads(os.environ[COSTS]))

    def asleep(config: ModelConfig, device: str = "cpu") -> LoadedModel:
        return SleepingModel.of(load_model(config, device), costs)

    Worker.load_model = staticmethod(asleep)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
