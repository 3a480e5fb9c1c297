"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdlink.errors import CapacityExceeded, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.errors import PdlinkError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the answer's tokens are chosen and when it ends. Raises InvalidRequest for values out of range."""

    max_tokens: int
    """Tokens to generate, at least 1."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have at least this probability."""
    seed: int = 0
    """The token at output index i is drawn with (seed, i) and nothing else, so that prefill may choose index 0 and
    decode the rest, or one process all of them, with the same result."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; not part of it."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; their text is not part of it."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if "" in self.stop:
            raise InvalidRequest("stop must not hold an empty string: it would end every answer before it begins")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    request_id: str
    """Unique among the requests the engine has not ended yet."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    external_tokens: int = 0
    """The KV of so many leading tokens of the prompt comes from elsewhere. Blocks are reserved, then the engine waits
    for `kv_arrived` or `kv_failed` and computes the rest. The whole prompt leaves nothing to compute: then the first
    token of the answer comes from elsewhere, too."""
    awaits_lookup: bool = False
    """A source is still asked about the prompt: it keeps its place in line, and is admitted after `kv_found`."""
    goes_on: bool = False
    """True: another process continues the answer after `max_tokens`, from the same prompt and tokens. Text that is
    held back then is left to it."""
    num_answered: int = 0
    """Last tokens of the prompt that are the first ones of the answer: another process gave them to the client, and
    died. Sampling and text go on behind them, as if they had been chosen here; `max_tokens` counts the others."""
    salt: str = ""
    """Prefixes are shared only between requests of equal salt: keeps tenants apart."""

    def check(self, *, max_tokens: int, vocab_size: int) -> None:
        """Raises InvalidRequest for an impossible request, CapacityExceeded for more than `max_tokens` tokens."""
        prompt = self.prompt_token_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        if not 0 <= self.num_answered < len(prompt):
            raise InvalidRequest(f"num_answered: got {self.num_answered} of {len(prompt)} tokens; expected one less")
        if not 0 <= self.external_tokens <= len(prompt):
            raise InvalidRequest(f"external_tokens: got {self.external_tokens}; the prompt has {len(prompt)} tokens")
        if len(prompt) + self.sampling.max_tokens > max_tokens:
            raise CapacityExceeded(
                f"{len(prompt)} prompt tokens and max_tokens {self.sampling.max_tokens} make "
                f"{len(prompt) + self.sampling.max_tokens}, this worker serves at most {max_tokens}"
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"token {token} is outside the vocabulary of {vocab_size}")


@dataclass(frozen=True, slots=True)
class TokenOutput:
    request_id: str
    index: int
    """Position in the answer, from 0; behind `num_answered` tokens the next one."""
    token_id: int
    text: str
    """Printable text; "" while a UTF-8 character or a possible stop string is incomplete."""
    finish_reason: str | None
    """None while the answer goes on, then "stop" or "length"."""
    num_cached_tokens: int
    """Prompt tokens that were not computed for this request, nor sent to it by a peer."""


class KVListener(Protocol):
    """Hears of the KV of every request, in the engine's thread, between layers too: be quick, do not raise."""

    def admitted(self, request_id: str, blocks: Sequence[int], num_cached_tokens: int, external_tokens: int) -> None:
        """The request has every block it will ever need (prompt and max_tokens), `blocks`, from token 0 on.

        The first `num_cached_tokens` are in the cache for all layers: whole blocks, and less than the prompt unless
        all of it is external. external_tokens: so many leading ones are to come from elsewhere; 0 if they are here.
        Called again, with other blocks, after `kv_failed(recompute=True)`.
        """

    def layer_needed(self, request_id: str, layer: int, timeout_s: float) -> bool:
        """Whether the request's external KV of `layer` is in its blocks; wait up to `timeout_s` for it.

        Asked after `kv_coming`, before attention reads the layer. False: this pass is given up, and the request
        waits for `kv_arrived` or `kv_ends`. Where less than the prompt is external, True for the last layer says that
        all of it is here and counts.
        """

    def prefilling(self, on: bool) -> None:
        """A forward pass with prompt tokens in it begins (on), or has ended."""

    def layer_written(self, layer: int, spans: Sequence[tuple[str, int, int]]) -> None:
        """The KV of prompt tokens [start, end) of each (request_id, start, end) is in the pool for `layer`.

        On a GPU the kernels that write it are launched in the current stream. Cached tokens and generated ones are
        not reported.
        """


class EngineListener(Protocol):
    """Hears of the answer of every request, in the engine's thread. Must not raise."""

    def output(self, output: TokenOutput) -> None: ...

    def ended(self, request_id: str, error: PdlinkError | None) -> None:
        """Exactly once per accepted request, after its last output; the engine no longer holds its blocks.

        error: None if the answer is complete, RequestAborted after `abort` or `stop`.
        """
