"""What placement knows: one request, and the workers it may go to. No I/O and no clock."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_128

from pdlink._index import words_of_json
from pdlink.api.openai import BYTES_PER_TOKEN
from pdlink.kv.hashing import Origin, namespace
from pdlink.kv.hashing import chain as chained

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from pdlink.api.openai import Call

    from .table import Column, Table, Workers

    Tokens: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint32]]

KEY_TOKENS = 512
"""Tokens that one key of a prompt stands for."""
UNKNOWN_ANSWER_TOKENS = 256
"""Of a request without a limit."""

_KEY_NBYTES = BYTES_PER_TOKEN * KEY_TOKENS
_DECAY = 0.97
_MOST_OF_MEAN = 4
_FIRST_MEAN_TOKENS = 4096
"""Where tokens are what clients allow: one request counts in a worker's pace as at most so many mean ones, and nobody
knows the mean of the first. Else a client that allows millions, and gets ten, makes its worker look quick."""
_NOISE = 1.3
"""Speeds this far from the mean are measured where workers are equal: their prompts differ."""


class PlacementRequest:
    """What is to be placed. One is made for each request, so only what it was given is its own."""

    whole = False
    """One worker must serve it: its prompt's KV is not enough for its answer, or cannot be moved."""
    plain = False
    """That must be a plain server: decode computes no prompts."""
    avoid: frozenset[str] = frozenset()
    """Keys of workers that are taken only where there is no other."""
    key_tokens = KEY_TOKENS
    chain: Sequence[Hashable] | None = None
    """`keys`, once they are known."""
    considered: dict[str, tuple[str, Workers, Sequence[float] | Column]] | None = None
    """Set it to a mapping to learn, by leg, the policy, the workers it chose from, and their scores."""
    known_ids: Tokens | None = None
    """Of a text, its first token ids, as far as they are known; see `Tokenizing`."""
    held: Mapping[str, int] = MappingProxyType({})
    """By key of a worker that `publishes`, tokens of the prompt whose KV it says it has."""
    loading: Mapping[str, float] = MappingProxyType({})
    """Of the same workers, what bringing that KV to the device costs, in tokens computed."""
    behind: Mapping[str, float] | None = None
    """Of decode's worker, once it is chosen: see `pair_times.Behind`."""

    def __init__(
        self,
        model: str,
        num_tokens: int,
        answer_tokens: int = UNKNOWN_ANSWER_TOKENS,
        prompt: bytes = b"",
        salt: str = "",
        session: str = "",
        priority: int = 0,
        **more: Any,
    ) -> None:
        """num_tokens: of the prompt; an estimate where only its text is known. answer_tokens: at most. prompt: in
        JSON: text, token ids or messages. salt: requests with different ones share no prefix. session: of the client,
        where it names one. priority: lower is earlier. more: of the attributes above."""
        self.model, self.num_tokens, self.answer_tokens = model, num_tokens, answer_tokens
        self.prompt, self.salt, self.session, self.priority = prompt, salt, session, priority
        for name, value in more.items():
            if name not in _FURTHER:
                raise TypeError(f"a placement request has no {name}")
            setattr(self, name, value)

    @property
    def keys(self) -> Sequence[Hashable]:
        """Names of the prompt's prefixes, shortest first, each `key_tokens` longer than the one before: equal keys
        mean equal beginnings. Of token ids the keys of `pdlink.kv.hashing`; otherwise of the prompt's JSON."""
        if self.chain is None and self.num_tokens < KEY_TOKENS and len(self.prompt) < _KEY_NBYTES:
            self.chain = ()
        elif self.chain is None:
            seed, ids = _seed(self.model, self.salt), self.ids if self.prompt[:1] == b"[" else None
            self.chain = _text_keys(seed, self.prompt) if ids is None else chained(seed, ids, KEY_TOKENS)
        return self.chain

    @cached_property
    def ids(self) -> Tokens | None:
        """Token ids of the prompt, uint32; None for a text, and for what the worker will refuse."""
        if not _looks_like_ids(self.prompt):
            return None
        try:
            return np.frombuffer(words_of_json(self.prompt), np.uint32)
        except ValueError:
            return None

    @property
    def counted(self) -> bool:
        """`num_tokens` is exact: the prompt is a list of token ids."""
        return _looks_like_ids(self.prompt)

    @property
    def total_tokens(self) -> int:
        return self.num_tokens + self.answer_tokens


_FURTHER = frozenset(name for name in vars(PlacementRequest) if not name.startswith("_"))


def _text_keys(parent: bytes, prompt: bytes) -> list[bytes]:
    """Each the hash of all before it: the same in every router, so without a secret. A quick one: XXH3 takes 2 us for
    16 KB, keyed BLAKE3 18. Unequal texts of equal keys, which a stranger may look for, send a prompt where it has no
    KV, or count its tokens wrongly; no answer depends on them."""
    hashed, text, found = xxh3_128(parent), memoryview(prompt), []
    add, digest = hashed.update, hashed.digest
    for at in range(0, len(text) - _KEY_NBYTES + 1, _KEY_NBYTES):
        add(text[at : at + _KEY_NBYTES])
        found.append(digest())
    return found


@lru_cache(maxsize=256)
def _seed(model: str, salt: str) -> bytes:
    return namespace(Origin(model, revision="", dtype="", chunk_tokens=KEY_TOKENS, salt=salt))


_IDS = re.compile(rb"\[\s*[0-9]")


def _looks_like_ids(prompt: bytes) -> bool:
    """Whether a prompt in JSON begins as one list of token ids does."""
    return _IDS.match(prompt) is not None


def count_tokens(prompt: bytes) -> int:
    """Of a prompt in JSON: exact for one list of token ids, otherwise an estimate."""
    if prompt[:1] == b"[" and _looks_like_ids(prompt):
        return prompt.count(b",") + 1
    return len(prompt) // BYTES_PER_TOKEN + 1


def wanted(call: Call, session: str | None) -> PlacementRequest:
    """What placement must know of a request. session: the client's header; otherwise its `user` counts."""
    prompt, said, most = call.prompt, call.said, call.max_tokens
    return PlacementRequest(
        call.model,
        count_tokens(prompt),
        UNKNOWN_ANSWER_TOKENS if most is None else most,
        prompt,
        said.cache_salt if isinstance(said.cache_salt, str) else "",
        session or said.user or "",
        said.priority or 0,
    )


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker as placement sees it, kept up to date by what is sent to it and what it says of itself."""

    key: str
    """Names the worker and its incarnation."""
    label: str = ""
    """Names it for people."""
    load: float = 0.0
    """Tokens it has to do: those of unfinished requests of ours, and the requests it has from others. For prefill the
    tokens it must compute, for decode those of prompt and answer."""
    requests: int = 0
    """Ours, not finished."""
    tokens: int = 0
    """Of those."""
    foreign: int = 0
    """Requests of others, by its own account."""
    foreign_tokens: float | None = None
    """What it has to do for them, by its own account; None if it says only how many they are."""
    room_tokens: int | None = None
    """Tokens whose KV it can still take; None if it does not say."""
    pool_tokens: int | None = None
    """Tokens whose KV it can hold; None if it does not say."""
    tokens_per_s: float | None = None
    """Finished per second in which there was something to do; None if not measured."""
    publishes: bool = False
    """It says what KV it has, in events; some have come."""
    silence: str = ""
    """Why it does not although it should, for people."""
    group: tuple[str, str] = ("", "")
    """Its cell and the fingerprint of its KV: KV moves within a group only. Unknown parts fit everything."""
    taken: float = 0.0
    """KV that it has computed of late, in shares of its pool: see `policies.cost`."""
    slowness: float = 1.0
    """Time for a token, relative to the mean of its pool. 1 for differences that may be chance."""
    allowed: bool = False
    """Its tokens are what clients allow (decode), and not what it computes for sure (prefill)."""
    table: Table | None = None
    """Where `row` is kept up to date."""
    row: int = 0
    _mean_tokens: float = 0.0
    _most_counted: float = math.inf
    """As so many tokens a request counts at most, in means and paces."""
    _done_tokens: float = 0.0
    """Finished, each request counting less than the next; `_done_s` they took."""
    _done_s: float = 0.0
    _since_s: float = 0.0
    _counts_alone: bool = False
    """Nothing but our tokens changes its load, and it has told no room."""

    def __post_init__(self) -> None:
        if self.allowed:
            self._most_counted = _FIRST_MEAN_TOKENS

    def sent(self, tokens: int, now: float) -> None:
        """A request of ours leaves for it."""
        requests, mean = self.requests, self._mean_tokens
        if not requests:
            self._since_s = now
        self.requests = requests + 1
        counted = tokens if tokens < self._most_counted else self._most_counted
        self._mean_tokens = mean = mean + 0.1 * (counted - mean) if mean else float(counted)
        if self.allowed:
            self._most_counted = mean * _MOST_OF_MEAN or _FIRST_MEAN_TOKENS
        self.tokens += tokens
        if self._counts_alone:
            self.load = load = self.load + tokens
            if (table := self.table) is not None:
                table.load[self.row] = load
            return
        if self.room_tokens is not None:
            self.room_tokens -= tokens
        self._weigh()

    def finished(self, tokens: int, now: float, *, served: bool) -> None:
        """A request that was `sent` needs nothing of it any more. served: it did what it was asked."""
        self.requests = requests = self.requests - 1
        self.tokens -= tokens
        if served:
            counted = tokens if tokens < self._most_counted else self._most_counted
            self._done_tokens = done = self._done_tokens * _DECAY + counted
            self._done_s = took_s = self._done_s * _DECAY + now - self._since_s
            self.tokens_per_s = done / took_s if took_s > 0 else None
        self._since_s = now
        if self._counts_alone:  # at rest it is counted anew: sums of floats lose a little
            self.load = load = self.load - tokens if requests else self.tokens + (self.foreign_tokens or 0)
            if (table := self.table) is not None:
                table.load[self.row] = load
            return
        if self.room_tokens is not None:
            self.room_tokens += tokens
        self._weigh()

    def heard(self, requests: int, free_tokens: int | None, load_tokens: int | None = None) -> None:
        """By its own account it has this many requests, room for so many tokens, and so many to do."""
        self.foreign = max(0, requests - self.requests)
        self.foreign_tokens = None if load_tokens is None else max(0, load_tokens - self.tokens)
        self.room_tokens = free_tokens
        self._weigh()
        if self.table is not None:
            self.table.tell_room(self, self.row)

    @property
    def idle(self) -> bool:
        """It has no request, of nobody."""
        return self.requests + self.foreign == 0

    def grouped(self, group: tuple[str, str]) -> None:
        if group != self.group:
            self.group = group
            if self.table is not None:
                self.table.tell_group(self, self.row)

    def compared(self, slowness: float) -> None:
        if slowness != self.slowness:
            self.slowness = slowness
            if self.table is not None:
                self.table.tell(self, self.row)

    def took(self, taken: float) -> None:
        self.taken = taken
        if self.table is not None:
            self.table.taken[self.row] = taken

    def _weigh(self) -> None:
        foreign = self.foreign_tokens
        if foreign is None:
            foreign = self.foreign * (self._mean_tokens or 1.0)
        self.load = load = self.tokens + foreign
        self._counts_alone = not self.foreign and self.room_tokens is None
        if (table := self.table) is not None:
            table.load[self.row] = load
            if self.room_tokens is not None:
                table.tell_room(self, self.row)


def mean_speed(workers: Iterable[WorkerState]) -> float:
    """Tokens per second of those of which it is measured; 0 if there are none."""
    speeds = [worker.tokens_per_s for worker in workers if worker.tokens_per_s is not None]
    return sum(speeds) / len(speeds) if speeds else 0.0


def compare(workers: Sequence[WorkerState]) -> None:
    """Set `slowness` of the workers of one pool."""
    mean = mean_speed(workers)
    for worker in workers:
        ratio = mean / worker.tokens_per_s if worker.tokens_per_s else 1.0
        worker.compared(ratio if ratio > _NOISE or ratio * _NOISE < 1 else 1.0)


class Fleet(msgspec.Struct, frozen=True):
    """The workers that may get a request now."""

    prefill: Sequence[WorkerState]
    decode: Sequence[WorkerState]
    refused: frozenset[tuple[str, str]] = frozenset()
    """Keys of prefill and decode workers that do not exchange KV."""
    barred: frozenset[str] = frozenset()
    """Legs with workers that do not let this proxy in."""
    needs_prefill: bool = False
    """Decode must not compute prompts."""
    plain: Sequence[WorkerState] = ()
    """Workers that serve requests by themselves."""
    grouped: bool = False
    """Its workers are of several groups (`WorkerState.group`)."""
    behind: Mapping[str, Mapping[str, float]] = {}
    """What its pairs differ by: see `pair_times.Behind`."""


def fitting(workers: Workers, others: Workers) -> Workers:
    """Those of `workers` that may exchange KV with one of `others`, by their cells and fingerprints."""
    return workers.only(workers.table.exchanging(others.table.groups_of(others.fit)))
