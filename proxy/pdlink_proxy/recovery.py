"""A stream whose worker dies goes on at another one. No I/O.

What the client was sent is remembered as it was sent, packed in lumps, and read only if a worker dies: to read each
event of every stream took a quarter of a streamed token's CPU. After a failure another worker is asked for the rest
of the answer, behind the tokens that the client has (`Resumes.behind`), or for all of it again, of which `join` drops
what the client has. Either way the client's events keep their id, and what is dropped must be what was sent:
otherwise the stream ends with an error.
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from .openai import CHAT, COMPLETIONS
from .sse import payloads, rewritten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .openai import Call

_FRAMES = 32
"""Pieces kept as they are; so many are packed: 0.5 us and 15 bytes for an event of 186 bytes, to read it 7.4 us."""
_LUMP_NBYTES = 2048
"""A piece of this size is packed at once."""
_FAST = 1
"""Level of zlib; 6 takes twice as long for 3 % less."""
_MARK = b'"choices"'
_NOT_HEAD = ("choices", "usage", "prompt_token_ids", "kv_transfer_params")


class Diverged(ValueError):
    """Another worker answers in other words."""


@dataclass(frozen=True, slots=True)
class Resumes:
    """How the workers of a dialect give the rest of an answer."""

    refusal: Callable[[Call], str]
    """Why another worker would answer something else; empty if it would not."""
    begin: Callable[[Call, int], Call] = lambda call, _seed: call
    """What to ask of each stream, with a seed for clients that gave none."""
    behind: Callable[[Call, Sequence[int]], Call] | None = None
    """Asks for the rest, behind these tokens; None: the whole answer is made again."""
    paths: tuple[str, ...] = (COMPLETIONS, CHAT)
    """Of requests whose streams may go on."""


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None
    finish_reason: str | None = None

    @property
    def said(self) -> dict[str, Any]:
        return {"text": self.text} if self.delta is None else self.delta


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    """Of the event with the usage at the end of a stream: none."""


@dataclass(slots=True)
class _Part:
    """What the client has of one choice."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    """By field, its pieces."""
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    num_logprobs: int = 0
    finished: bool = False
    without_ids: bool = False
    """Some tokens came without their ids."""

    def add(self, choice: _Choice) -> str:
        """Returns the name of a field that cannot be continued, or nothing."""
        for name, value in choice.said.items():
            if isinstance(value, str) and name != "role":
                self.texts.setdefault(name, []).append(value)
            elif value and name != "role":
                return name
        if choice.token_ids is not None:
            self.token_ids.extend(choice.token_ids)
        elif choice.finish_reason is None and any(choice.said.values()):
            self.without_ids = True
        self.num_logprobs += _num_logprobs(choice.logprobs)
        self.finished = self.finished or choice.finish_reason is not None
        return ""


class _Copy:
    """The same choice of another worker, of which is dropped what the client has."""

    def __init__(self, part: _Part) -> None:
        self._texts = {name: "".join(pieces) for name, pieces in part.texts.items()}
        self._at = dict.fromkeys(self._texts, 0)
        """How much of each text has been dropped."""
        self._token_ids, self._at_token = part.token_ids[:], 0
        self._num_logprobs, self._finished = part.num_logprobs, part.finished

    def drop(self, choice: dict[str, Any]) -> bool:
        """Take out of an event's choice what the client has; whether anything is left. Raises Diverged."""
        if self._finished:
            return False
        said = choice if "text" in choice else choice.get("delta") or {}
        said.pop("role", None)
        for name, had in self._texts.items():
            if not isinstance(value := said.get(name), str):
                continue
            at = self._at[name]
            num = min(len(value), len(had) - at)
            if not had.startswith(value[:num], at):
                raise Diverged("another worker answers in other words")
            said[name], self._at[name] = value[num:], at + num
        if isinstance(ids := choice.get("token_ids"), list):
            at = self._at_token
            num = min(len(ids), len(self._token_ids) - at)
            if ids[:num] != self._token_ids[at : at + num].tolist():
                raise Diverged("another worker answers in other tokens")
            choice["token_ids"], self._at_token = ids[num:], at + num
        new_logprobs = 0
        if isinstance(logprobs := choice.get("logprobs"), dict):
            num = min(_num_logprobs(logprobs), self._num_logprobs)
            self._num_logprobs -= num
            new_logprobs = _num_logprobs(logprobs) - num  # perhaps of a token whose text waits for the next one
            choice["logprobs"] = {
                name: value[num:] if isinstance(value, list) else value for name, value in logprobs.items()
            }
        if choice.get("finish_reason") is not None:
            if any(self._at[name] < len(had) for name, had in self._texts.items()):
                raise Diverged("another worker ends its answer earlier")
            return True
        texts = (value for name, value in said.items() if name in ("text", "delta") or said is not choice)
        return any(texts) or bool(choice.get("token_ids")) or new_logprobs > 0


def _num_logprobs(logprobs: Any) -> int:
    lists = [value for value in logprobs.values() if isinstance(value, list)] if isinstance(logprobs, dict) else []
    return max(map(len, lists), default=0)


class Recovery:
    """Of one stream."""

    def __init__(self, call: Call, resumes: Resumes, limit: int, seed: int) -> None:
        """limit: how often it may go on."""
        self.call = resumes.begin(call, seed)
        """What its workers are asked now."""
        self.num_behind = 0
        """Tokens of the answer that its workers are told with the prompt, to go on behind them."""
        self.joins = False
        """The client has tokens of an earlier attempt: what a worker sends must pass `join`."""
        self._first_call, self._resumes, self._left = self.call, resumes, limit
        self._packed: list[bytes] = []
        self._frames: list[bytes] = []
        self._parts: dict[int, _Part] = {}
        self._copies: dict[int, _Copy] = {}
        self._head: dict[str, msgspec.Raw] = {}
        self._counted = False
        """The client has the usage."""
        self._strange = ""

    def sent(self, data: bytes) -> None:
        """The client gets these whole events."""
        self._frames.append(data)
        if len(self._frames) >= _FRAMES or len(data) >= _LUMP_NBYTES:
            self._packed.append(zlib.compress(b"".join(self._frames), _FAST))
            self._frames.clear()

    def go_on(self) -> str:
        """Make `call` the one for another worker; why that is not possible, or nothing."""
        if not self._left:
            return "it has gone on elsewhere too often (recover_streams)"
        if refusal := self._resumes.refusal(self._first_call):
            return refusal
        self._read()
        if self._strange:
            return f"it holds {self._strange}"
        self._copies = {}
        if self._resumes.behind is None:
            self._copies = {index: _Copy(part) for index, part in self._parts.items()}
        else:
            (part,) = self._parts.values() if len(self._parts) == 1 else (_Part(without_ids=True),)
            if part.without_ids:
                return "its worker told no token ids"
            self.call = self._resumes.behind(self._first_call, part.token_ids)
            self.num_behind = len(part.token_ids)
            self._copies[0] = _Copy(_Part(finished=part.finished))
        self._left -= 1
        self.joins = True
        return ""

    def join(self, data: bytes) -> bytes:
        """Whole events of another worker as the client's next ones. Raises Diverged."""
        return rewritten(data, _MARK, self._joined)

    def _joined(self, document: bytes) -> bytes:
        try:
            fields: dict[str, Any] = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
            msgspec.json.decode(document, type=_Event)  # checks what `drop` reads
            choices = msgspec.json.decode(fields.get("choices", b"null"), type=list[dict[str, Any]])
        except (ValueError, RecursionError):
            raise Diverged("another worker sent no event") from None
        kept = []
        for choice in choices:
            copy = self._copies.get(choice.get("index", 0))
            if copy is None or copy.drop(choice):
                kept.append(choice)
        if (choices and not kept) or (self._counted and not choices):
            return b""
        fields.pop("prompt_token_ids", None)
        return msgspec.json.encode({**fields, **self._head, "choices": kept})

    def _read(self) -> None:
        for lump in (*map(zlib.decompress, self._packed), b"".join(self._frames)):
            self._read_lump(lump)
        self._packed.clear()
        self._frames.clear()

    def _read_lump(self, events: bytes) -> None:
        for payload in payloads(events):
            if _MARK not in payload:
                continue
            try:
                event = msgspec.json.decode(payload, type=_Event)
                if not self._head:
                    fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
                    self._head = {name: value for name, value in fields.items() if name not in _NOT_HEAD}
            except (ValueError, RecursionError):
                self._strange = "an event that cannot be read"
                continue
            self._counted = self._counted or not event.choices
            for choice in event.choices:
                strange = self._parts.setdefault(choice.index, _Part()).add(choice)
                self._strange = self._strange or strange
