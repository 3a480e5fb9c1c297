"""What placement knows: one request, and the workers it may go to. No I/O and no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from pdlink.kv.hashing import chain as chained
from pdlink.kv.hashing import namespace

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

KEY_TOKENS = 512
"""Tokens that one key of a prompt stands for."""
BYTES_PER_TOKEN = 4
"""Of a prompt in JSON; an estimate for English text."""
UNKNOWN_ANSWER_TOKENS = 256
"""Of a request without a limit."""

_DECAY = 0.97
_NOISE = 1.3
"""Speeds this far from the mean are measured where workers are equal: their prompts differ."""


@dataclass(slots=True, eq=False)
class PlacementRequest:
    """What is to be placed."""

    model: str
    num_tokens: int
    """Of the prompt; an estimate where only its text is known."""
    answer_tokens: int = UNKNOWN_ANSWER_TOKENS
    """At most."""
    prompt: bytes = b""
    """In JSON: text, token ids or messages."""
    salt: str = ""
    """Requests with different ones share no prefix."""
    session: str = ""
    """Of the client, where it names one."""
    priority: int = 0
    """Lower is earlier."""
    avoid: frozenset[str] = frozenset()
    """Keys of workers that are taken only where there is no other."""
    key_tokens: int = KEY_TOKENS
    chain: Sequence[Hashable] | None = None
    """`keys`, once they are known."""

    @property
    def keys(self) -> Sequence[Hashable]:
        """Names of the prompt's prefixes, shortest first, each `key_tokens` longer than the one before: equal keys
        mean equal beginnings. Of token ids the keys of `pdlink.kv.hashing`; otherwise of the prompt's JSON."""
        if self.chain is None:
            self.chain = _keys(self.prompt, _seed(self.model, self.salt))
        return self.chain

    @property
    def total_tokens(self) -> int:
        return self.num_tokens + self.answer_tokens


@lru_cache(maxsize=256)
def _seed(model: str, salt: str) -> bytes:
    return namespace(model=model, revision="", dtype="", chunk_tokens=KEY_TOKENS, salt=salt)


def _keys(prompt: bytes, seed: bytes) -> list[bytes]:
    if prompt[:1] == b"[" and prompt[1:].lstrip()[:1].isdigit():
        try:
            return chained(seed, msgspec.json.decode(prompt, type=list[int]), KEY_TOKENS)
        except (msgspec.DecodeError, OverflowError):
            return []  # the worker says what is wrong with it
    whole = len(prompt) // BYTES_PER_TOKEN * BYTES_PER_TOKEN
    words = memoryview(prompt)[:whole].cast("I")  # four bytes in place of a token
    return chained(seed, words, KEY_TOKENS)


def count_tokens(prompt: bytes) -> int:
    """Of a prompt in JSON: exact for one list of token ids, otherwise an estimate."""
    if prompt[:1] == b"[" and prompt[1:].lstrip()[:1].isdigit():
        return prompt.count(b",") + 1
    return len(prompt) // BYTES_PER_TOKEN + 1


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker as placement sees it, kept up to date by what is sent to it and what it says of itself."""

    key: str
    """Names the worker and its incarnation."""
    load: float = 0.0
    """Tokens it has to do: those of unfinished requests of ours, and the requests it has from others. For prefill the
    tokens it must compute, for decode those of prompt and answer."""
    requests: int = 0
    """Ours, not finished."""
    tokens: int = 0
    """Of those."""
    foreign: int = 0
    """Requests of others, by its own account."""
    room_tokens: int | None = None
    """Tokens whose KV it can still take; None if it does not say."""
    pool_tokens: int | None = None
    """Tokens whose KV it can hold; None if it does not say."""
    tokens_per_s: float | None = None
    """Finished per second in which there was something to do; None if not measured."""
    slowness: float = 1.0
    """Time for a token, relative to the mean of its pool. 1 for differences that may be chance."""
    _mean_tokens: float = 0.0
    _counted: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Tokens finished and seconds they took, each finished request counting less than the next."""
    _since_s: float = 0.0

    def sent(self, tokens: int, now: float) -> None:
        """A request of ours leaves for it."""
        if self.requests == 0:
            self._since_s = now
        self.requests += 1
        self.tokens += tokens
        self._mean_tokens += (0.1 if self._mean_tokens else 1.0) * (tokens - self._mean_tokens)
        if self.room_tokens is not None:
            self.room_tokens -= tokens
        self._weigh()

    def finished(self, tokens: int, now: float, *, served: bool) -> None:
        """A request that was `sent` needs nothing of it any more. served: it did what it was asked."""
        self.requests -= 1
        self.tokens -= tokens
        if self.room_tokens is not None:
            self.room_tokens += tokens
        if served:
            counted = self._counted
            counted[:] = counted[0] * _DECAY + tokens, counted[1] * _DECAY + now - self._since_s
            self.tokens_per_s = counted[0] / counted[1] if counted[1] > 0 else None
        self._since_s = now
        self._weigh()

    def heard(self, requests: int, free_tokens: int | None) -> None:
        """By its own account it has this many requests, and room for so many tokens."""
        self.foreign = max(0, requests - self.requests)
        self.room_tokens = free_tokens
        self._weigh()

    def _weigh(self) -> None:
        self.load = self.tokens + self.foreign * (self._mean_tokens or 1.0)


def compare(workers: Sequence[WorkerState]) -> None:
    """Set `slowness` of the workers of one pool."""
    speeds = [worker.tokens_per_s for worker in workers if worker.tokens_per_s is not None]
    mean = sum(speeds) / len(speeds) if speeds else 0.0
    for worker in workers:
        ratio = mean / worker.tokens_per_s if worker.tokens_per_s else 1.0
        worker.slowness = ratio if ratio > _NOISE or ratio * _NOISE < 1 else 1.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that may get a request now."""

    prefill: Sequence[WorkerState]
    decode: Sequence[WorkerState]
    refused: frozenset[tuple[str, str]] = frozenset()
    """Keys of prefill and decode workers that do not exchange KV."""
    barred: frozenset[str] = frozenset()
    """Legs with workers that do not let this proxy in."""
    needs_prefill: bool = False
    """Decode must not compute prompts."""
