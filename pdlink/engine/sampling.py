"""One row of logits → one token, without any state: the same row, seed and index give the same token anywhere.

A link needs more than a seeded generator: prefill draws token 0 in one process and decode the next ones in another,
and the two compute logits that may differ in the last bits. So the random number comes from a hash of (seed, index),
and it picks from the cumulative distribution in order of token ids, where a small change of the logits moves only
the borders. In order of probability two near-equal tokens could swap places and change the whole answer.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pdlink.engine.request import SamplingParams


def choose(logits: torch.Tensor, sampling: SamplingParams, index: int) -> int:
    """The token at output position `index`. logits: [vocab_size], finite maximum."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double()
    probabilities = ((scaled - scaled.max()) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    cumulative = probabilities.cumsum(-1)
    target = uniform(sampling.seed, index) * float(cumulative[-1])
    chosen = int(torch.searchsorted(cumulative, target, right=True))
    # The product can round up to the total, past the last token that has any probability.
    return chosen if chosen < len(cumulative) else int(probabilities.nonzero()[-1])


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) alone, equal on every machine and library version."""
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8, person=b"pdlink-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero for all but the fewest likeliest tokens that together reach `top_p`."""
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(probabilities)
    inside = before < top_p  # the likeliest token always is
    kept[tokens[inside]] = ordered[inside]
    return kept
