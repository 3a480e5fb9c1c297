"""A worker that sleeps in place of computing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pdlink.config.section import Section

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SleepConfig(Section):
    """For planning and tests of routing: a forward pass sleeps for as long as these costs say and computes nothing,
    so that many workers share a machine as if each had its own. Answers are one token repeated, KV is zeros; all else
    is real. The costs have the names that `pdlink plan --curves` reads. All 0: it computes."""

    prompt_s: Cost = 0.0
    """Of each pass over prompts, seconds."""
    token_s: Cost = 0.0
    """Of each new token of a prompt."""
    attention_s: Cost = 0.0
    """Of each pair of a new token and one before it."""
    step_s: Cost = 0.0
    """Of each pass over answers."""
    sequence_s: Cost = 0.0
    """Of each answer in it."""
    context_s: Cost = 0.0
    """Of each token of KV that it reads."""

    @property
    def sleeps(self) -> bool:
        return any(self.model_dump().values())
