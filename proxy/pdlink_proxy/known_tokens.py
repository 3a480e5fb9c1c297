"""Token ids of texts, as far as earlier prompts tell, and whether it pays to ask for more. No I/O and no clock.

A prompt that begins as an earlier one did begins with its tokens. How many of them its beginning has is estimated by
bytes: a tokeniser does not say where in a prompt's JSON a token ends. An estimate is enough to compare workers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from pdlink._http import names_media
from pdlink.api.openai import BYTES_PER_TOKEN, CHAT, COMPLETIONS

from .fleet import KEY_TOKENS

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pdlink.api.openai import Call

    from .fleet import PlacementRequest, Tokens

CHUNK_NBYTES = BYTES_PER_TOKEN * KEY_TOKENS
"""Of a prompt's JSON; shorter prompts are not worth a question."""
MAX_TOKENS = 16_000_000
"""Of all texts that are remembered: 64 MB."""
ENOUGH = 0.8
"""Share of a prompt whose tokens are known, from which on nothing waits for the rest: text that no earlier prompt had
is computed nowhere. Source: llm-d's prefix store (min-prefix-overlap-ratio)."""

_MORE = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message") + (
    "add_special_tokens",
)
"""Fields beside the prompt that change its tokens."""
_ANY_MORE = frozenset(_MORE)


class Text(msgspec.Struct, frozen=True):
    """A prompt whose tokens depend on no more than this."""

    model: str
    call: Call
    keys: Sequence[Hashable]
    """Of its beginnings, each `CHUNK_NBYTES` longer than the one before."""

    @property
    def body(self) -> bytes:
        """What `/tokenize` of an engine is asked, in JSON."""
        fields, names = self.call.fields, ("messages" if self.call.path == CHAT else "prompt", *_MORE)
        return msgspec.json.encode({"model": self.model, **{name: fields[name] for name in names if name in fields}})


def text_of(request: PlacementRequest, call: Call) -> Text | None:
    """None for token ids, batches, prompts with media, and short ones."""
    prompt, fields = request.prompt, call.fields
    if call.path not in (COMPLETIONS, CHAT) or len(prompt) < CHUNK_NBYTES:
        return None
    is_text = prompt[:1] == b'"' if call.path == COMPLETIONS else not (request.counted or names_media(prompt))
    if not is_text:
        return None
    keys: Sequence[Hashable] = request.keys
    if not _ANY_MORE.isdisjoint(fields):
        more = [(name, bytes(fields[name])) for name in _MORE if name in fields]
        salt = hashlib.blake2b(repr(more).encode(), digest_size=16).digest()
        keys = [(key, salt) for key in keys]
    return Text(request.model, call, keys)


class KnownIds(msgspec.Struct, frozen=True):
    ids: Tokens
    share: float
    """Of the prompt's bytes that these stand for."""


class KnownTokens:
    """Of the prompts that were tokenised last."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._of: OrderedDict[int, _Prompt] = OrderedDict()
        """By number, least recently used first."""
        self._by_key: dict[Hashable, tuple[int, int]] = {}
        """Number of a prompt, and how many of its tokens this beginning has."""
        self._num_tokens = self._next = 0

    def __len__(self) -> int:
        """Tokens."""
        return self._num_tokens

    def find(self, text: Text, nbytes: int) -> KnownIds | None:
        """The tokens of the longest beginning that is known. nbytes: of the prompt."""
        by_key, least, most = self._by_key, 0, len(text.keys)
        middle = most  # a whole prompt that came before is the usual case
        while least < most:  # who has a key has all before it
            if text.keys[middle - 1] in by_key:
                least = middle
            else:
                most = middle - 1
            middle = (least + most + 1) // 2
        if not least:
            return None
        number, num = by_key[text.keys[least - 1]]
        self._of.move_to_end(number)
        prompt = self._of[number]
        if least == len(text.keys) == len(prompt.keys) and nbytes == prompt.nbytes:
            return KnownIds(prompt.ids, 1.0)
        return KnownIds(prompt.ids[:num], least * CHUNK_NBYTES / nbytes)

    def note(self, text: Text, nbytes: int, ids: Tokens) -> None:
        """These are all tokens of a prompt of `nbytes`."""
        number, self._next = self._next, self._next + 1
        self._of[number] = _Prompt(ids, text.keys, nbytes)
        self._num_tokens += len(ids)
        for index, key in enumerate(text.keys):
            before = self._by_key.get(key)
            self._by_key[key] = number, len(ids) * (index + 1) * CHUNK_NBYTES // nbytes
            if before is not None:
                self._lose(before[0])
        while self._num_tokens > self._max_tokens and len(self._of) > 1:
            self._drop(next(iter(self._of)))

    def _lose(self, number: int) -> None:
        """One of its keys stands for a newer prompt now."""
        prompt = self._of[number]
        prompt.num_keys -= 1
        if not prompt.num_keys:
            self._drop(number)

    def _drop(self, number: int) -> None:
        prompt = self._of.pop(number)
        self._num_tokens -= len(prompt.ids)
        for key in prompt.keys if prompt.num_keys else ():
            if self._by_key[key][0] == number:
                del self._by_key[key]


class _Prompt:
    __slots__ = ("ids", "keys", "nbytes", "num_keys")

    def __init__(self, ids: Tokens, keys: Sequence[Hashable], nbytes: int) -> None:
        self.ids, self.keys, self.nbytes, self.num_keys = ids, keys, nbytes, len(keys)


class Worth:
    """Whether the tokens of a text save more time than they cost.

    They cost what earlier questions cost for each byte. They save the share of the prompt that such prompts were
    found to have somewhere, at the pace of prefill. So nothing is asked for prompts that the workers compute faster
    than they tokenise, and little where prompts have nothing in common.
    """

    def __init__(self) -> None:
        self.s_per_byte = 1e-6
        """1 to 3 s a megabyte, measured with tokenisers of 32k to 150k entries."""
        self.found_share = 0.5
        """Of the prompts whose tokens were known, what the best worker had."""

    def pays(self, nbytes: int, tokens_per_s: float | None) -> bool:
        """tokens_per_s: of a prefill worker; None if none was measured."""
        if tokens_per_s is None:
            return True
        saved_s = max(_LEAST_SHARE, self.found_share) * nbytes / BYTES_PER_TOKEN / tokens_per_s
        return nbytes * self.s_per_byte < saved_s

    def cost(self, nbytes: int, took_s: float) -> None:
        """A question about so many bytes took so long."""
        self.s_per_byte += _SMOOTH * (took_s / nbytes - self.s_per_byte)

    def found(self, share: float) -> None:
        """So much of a prompt the best worker had, by its tokens."""
        self.found_share += _SMOOTH * (share - self.found_share)


_SMOOTH = 0.1
_LEAST_SHARE = 0.05
"""Or nobody would notice that prompts have something in common again."""
