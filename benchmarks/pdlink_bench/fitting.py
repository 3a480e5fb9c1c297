"""Curves from measured times: least squares of relative errors, with no negative cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALLEST_S = 1e-12
"""A cost per token or step that must be positive."""


def fit_prefill(measured: Any) -> dict[str, float]:
    """prompt_s, token_s, attention_s. measured: [n, 3] of new tokens, tokens before them, seconds of one pass."""
    new, before, seconds = np.asarray(measured, np.float64).T
    columns = {"prompt_s": np.ones_like(new), "token_s": new, "attention_s": new * (before + new / 2)}
    # What depends on the length is not seen at one length alone.
    lengths = len(set(new))
    names = ["prompt_s", "token_s", "attention_s"]
    if lengths < 3:
        names = names[:2] if lengths == 2 else names[1:2]
    found = dict.fromkeys(columns, 0.0) | _fit([columns[name] for name in names], seconds, names)
    return found | {"token_s": max(found["token_s"], _SMALLEST_S)}


def fit_decode(measured: Any) -> dict[str, float]:
    """step_s, sequence_s, context_s. measured: [n, 3] of sequences, tokens of KV of them all, seconds of a step."""
    batch, tokens, seconds = np.asarray(measured, np.float64).T
    columns = {"step_s": np.ones_like(batch), "sequence_s": batch, "context_s": tokens}
    names = ["step_s", "sequence_s", "context_s"]
    if len({*zip(batch, tokens, strict=True)}) == 1:
        names = ["step_s"]
    elif len(set(np.round(tokens / batch))) == 1:
        names = ["step_s", "context_s"]  # one context: not told from the sequences
    found = dict.fromkeys(columns, 0.0) | _fit([columns[name] for name in names], seconds, names)
    return found | {"step_s": max(found["step_s"], _SMALLEST_S)}


def errors(expected: Any, measured: Any) -> tuple[float, float]:
    """Mean and largest relative error."""
    relative = np.abs(np.asarray(expected) / np.asarray(measured) - 1)
    return float(relative.mean()), float(relative.max())


def _fit(columns: Sequence[Any], seconds: Any, names: Sequence[str]) -> dict[str, float]:
    """Without the column whose cost is most negative, until none is."""
    left = list(range(len(columns)))
    while True:
        weighted = np.stack([columns[index] / seconds for index in left], axis=1)
        scale = np.abs(weighted).max(axis=0)
        costs = np.linalg.lstsq(weighted / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (costs >= 0).all() or len(left) == 1:
            return {names[index]: max(0.0, float(cost)) for index, cost in zip(left, costs, strict=True)}
        worst = int(np.argmin(costs * scale))
        del left[worst]
