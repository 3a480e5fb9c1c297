"""From logits to an answer: the next token, and the text of all of them. Both without state that a process keeps: the
same row, seed and index give the same token anywhere, and the same tokens the same text.

A link needs more than a seeded generator: prefill draws token 0 in one process and decode the next ones in another,
and the two compute logits that may differ in the last bits. So the random number comes from a hash of (seed, index),
and it picks from the cumulative distribution in order of token ids, where a small change of the logits moves only
the borders. In order of probability two near-equal tokens could swap places and change the whole answer.

Prefill turns token 0 into text and decode starts again from token 0 with the same prompt, so both must print the
same. Two things hold text back: a character whose bytes are not all there yet, and an end of the text that may turn
out to be the beginning of a stop string.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.engine.request import SamplingParams

_CONTEXT_TOKENS = 8
"""Tokens decoded together with the next ones. One is needed where a tokenizer drops the space of a text's first
token (SentencePiece), four where each is one byte of a character."""
_LONGEST_TOKENS = 24
"""Most tokens decoded at once; then the oldest are dropped."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_INCOMPLETE_CHARS = 3
"""A UTF-8 character that lacks its last byte has at most three others, each shown as a replacement character by
byte-fallback decoders; byte-level ones show one for all."""


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


class Detokenizer:
    """The text of one answer."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._num_sent = len(self._decode())
        """Characters of the decoded `_tokens` that were printed or are in `_held`."""
        self._held = ""
        """Text that may be the beginning of a stop string."""

    def add(self, token: int) -> tuple[str, bool]:
        """(newly printable text, whether a stop string is complete). After True nothing may be added."""
        self._tokens.append(token)
        text = self._decode()
        num_incomplete = min(len(text) - len(text.rstrip(_INCOMPLETE)), _INCOMPLETE_CHARS)  # it may change yet
        end = len(text) - num_incomplete
        new = text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        if len(self._tokens) > _LONGEST_TOKENS:
            num_unsent = len(text) - self._num_sent
            self._tokens = self._tokens[-_CONTEXT_TOKENS:]
            self._num_sent = len(self._decode()) - num_unsent
        return self._release(new)

    def finish(self) -> str:
        """The text still held back, when the answer ends without a stop string."""
        text, stopped = self._release(self._decode()[self._num_sent :])
        return text if stopped else text + self._held

    def _release(self, new: str) -> tuple[str, bool]:
        pending = self._held + new
        starts = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
        if starts:
            return pending[: min(starts)], True
        end = len(pending) - max((_overlap(pending, stop) for stop in self._stop), default=0)
        self._held = pending[end:]
        return pending[:end], False

    def _decode(self) -> str:
        # Cleaning up spaces would change text that was printed already.
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
