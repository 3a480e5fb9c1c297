"""Answers whose first tokens the client has from a worker that died."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdlink.engine.answer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.engine.forward import LoadedModel
    from pdlink.engine.request import SamplingParams


def finish_of(
    model: LoadedModel, prompt: Sequence[int], sampling: SamplingParams, answered: Sequence[int]
) -> str | None:
    """Why an answer with these tokens is complete; None if it goes on.

    answered: at least one token. sampling: of the whole answer.
    """
    last = answered[-1]
    if (last in model.eos_token_ids and not sampling.ignore_eos) or last in sampling.stop_token_ids:
        return "stop"
    if sampling.stop:
        detokenizer = Detokenizer(model.tokenizer, prompt, sampling.stop)
        if any(detokenizer.add(token)[1] for token in answered):
            return "stop"
    return "length" if len(answered) >= sampling.max_tokens else None


def rest_of(sampling: SamplingParams, answered: Sequence[int]) -> SamplingParams:
    """For the tokens that are missing, of which there is at least one."""
    return replace(sampling, max_tokens=sampling.max_tokens - len(answered))
