"""What placement knows: one request, and the workers it may go to. No I/O and no clock."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from pdlink._index import keys_of, words_of_json
from pdlink.api.openai import BYTES_PER_TOKEN
from pdlink.kv.hashing import Origin, namespace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdlink._index import HeldKV
    from pdlink.api.openai import Call

    from .decisions import Considered
    from .pair_times import Behind
    from .sessions import SessionTurn
    from .table import Workers, WorkerState

    Tokens: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint32]]

KEY_TOKENS = 512
"""Tokens that one key of a prompt stands for."""
UNKNOWN_ANSWER_TOKENS = 256
"""Of a request without a limit."""

_KEY_NBYTES = BYTES_PER_TOKEN * KEY_TOKENS
"""Of a text's JSON, and of token ids in 32 bits."""


class PlacementRequest(msgspec.Struct, eq=False):
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
    whole: bool = False
    """One worker must serve it: its prompt's KV is not enough for its answer, or cannot be moved."""
    plain: bool = False
    """That must be a plain server: decode computes no prompts."""
    avoid: frozenset[str] = frozenset()
    """Keys of workers that are taken only where there is no other."""
    key_tokens: int = KEY_TOKENS
    chain: Sequence[int] | None = None
    """`keys`, once they are known."""
    considered: dict[str, Considered] | msgspec.Raw | None = None
    """Set it to a mapping to learn, by leg, the policy and what it chose from; in MessagePack, where that is told for
    both legs at once."""
    known_ids: Tokens | None = None
    """Of a text, its first token ids, as far as they are known; see `Tokenizing`."""
    held: HeldKV | None = None
    """What workers that publish their KV say that they have of the prompt, by `WorkerState.number`."""
    turn: SessionTurn | None = None
    """Of a session."""
    pinned: Mapping[str, str] = MappingProxyType({})
    """By leg, the label of the worker that has the KV of its session."""
    behind: dict[str, float] | None = None
    """Of decode's worker, once it is chosen: see `pair_times.Behind`."""
    _ids: Tokens | None = None
    _read: bool = False
    """`_ids` is what the prompt has."""

    @property
    def keys(self) -> Sequence[int]:
        """Names of the prompt's prefixes, shortest first, each `key_tokens` longer than the one before: equal keys
        mean equal beginnings. Of token ids, otherwise of the prompt's JSON."""
        if self.chain is None:
            ids = self.ids if self.prompt[:1] == b"[" else None
            data = self.prompt if ids is None else ids.tobytes()
            self.chain = keys_of(_seed(self.model, self.salt), data, _KEY_NBYTES)
        return self.chain

    @property
    def ids(self) -> Tokens | None:
        """Token ids of the prompt, uint32; None for a text, and for what the worker will refuse."""
        if not self._read:
            self._read = True
            if self.counted:
                with suppress(ValueError):
                    self._ids = np.frombuffer(words_of_json(self.prompt), np.uint32)
        return self._ids

    @property
    def counted(self) -> bool:
        """`num_tokens` is exact: the prompt is a list of token ids."""
        return self.prompt[:1] == b"[" and _IDS.match(self.prompt) is not None

    @property
    def total_tokens(self) -> int:
        return self.num_tokens + self.answer_tokens


@lru_cache(maxsize=256)
def _seed(model: str, salt: str) -> int:
    origin = Origin(model, revision="", dtype="", chunk_tokens=KEY_TOKENS, salt=salt)
    return int.from_bytes(namespace(origin)[:8])


_IDS = re.compile(rb"\[\s*[0-9]")
"""As one list of token ids begins in JSON."""


def wanted(call: Call, session: str | None) -> PlacementRequest:
    """What placement must know of a request. session: the client's header; otherwise its `user` counts."""
    prompt, said, most = call.prompt, call.said, call.max_tokens
    request = PlacementRequest(
        call.model,
        prompt.count(b",") + 1 if _IDS.match(prompt) else len(prompt) // BYTES_PER_TOKEN + 1,
        answer_tokens=UNKNOWN_ANSWER_TOKENS if most is None else most,
        prompt=prompt,
        salt=said.cache_salt if isinstance(said.cache_salt, str) else "",
        session=session or said.user or "",
        priority=said.priority or 0,
    )
    if len(prompt) < _KEY_NBYTES and request.num_tokens < KEY_TOKENS:
        request.chain = ()
    return request


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
    behind: Behind = {}
    """What its pairs differ by: see `pair_times.Behind`."""


def fitting(workers: Workers, others: Workers) -> Workers:
    """Those of `workers` that may exchange KV with one of `others`, by their cells and fingerprints."""
    return workers.only(workers.table.exchanging(others.table.groups_of(others.fit)))
