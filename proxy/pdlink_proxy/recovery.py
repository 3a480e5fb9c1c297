"""A stream whose worker dies goes on at another one. No I/O.

After a failure another worker is asked for the rest of the answer, behind the tokens that the client has
(`Resumes.behind`), or for all of it again, of which `join` drops what the client has. Either way the client's events
keep their ids, and what is dropped must be what was sent: otherwise the stream ends with an error. So do streams of
other routes than completions and chats.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pdlink._http import Packed
from pdlink.api.openai import CHAT, COMPLETIONS
from pdlink.api.sse import payloads, rewritten

if TYPE_CHECKING:
    from pdlink.api.openai import Call

PATHS = (COMPLETIONS, CHAT)
"""Of requests whose streams may go on."""

_NOT_HEAD = ("choices", "usage", "prompt_token_ids", "kv_transfer_params")

Links: TypeAlias = Sequence[Mapping[str, Any]]
"""`Health.link` of every worker that may get a request."""


@dataclass(frozen=True, slots=True)
class Resumes:
    """How the workers of a dialect give the rest of an answer."""

    refusal: Callable[[Call, Links], str]
    """Why another worker would answer something else; empty if it would not."""
    begin: Callable[[Call, int], Call] | None = None
    """What to ask of each stream, with a seed for clients that gave none; None: what the client asks."""
    behind: Callable[[Call, Sequence[int]], Call] | None = None
    """Asks for the rest, behind these tokens; None: the whole answer is made again."""


class Recovery(msgspec.Struct, eq=False):
    """Of one stream. What the client was sent is kept packed, and read only if a worker dies: to read each event of
    every stream took a quarter of a streamed token's CPU."""

    call: Call
    """What its workers are asked now; first as of `Resumes.begin`."""
    resumes: Resumes
    left: int
    """How often it may go on."""
    links: Callable[[], Links] = tuple
    """Asked when it is to."""
    sent: Packed = msgspec.field(default_factory=Packed)
    """Gets the whole events that the client gets."""
    num_behind: int = 0
    """Tokens of the answer that its workers are told with the prompt, to go on behind them."""
    joins: bool = False
    """The client has tokens of an earlier attempt: what a worker sends must pass `join`."""
    _first_call: Call | None = None
    """Once it has gone on."""
    _had: Choices | None = None
    """All that was sent before it went on."""
    _strange: str = ""

    def go_on(self) -> str:
        """Make `call` the one for another worker; why that is not possible, or nothing."""
        if not self.left:
            return "it has gone on elsewhere too often (recover_streams)"
        had, resumes = self._read(), self.resumes
        first = self._first_call = self._first_call or self.call
        refusal = resumes.refusal(first, self.links())
        if refusal and had.said:  # any answer may follow what says nothing yet
            return refusal
        if self._strange:
            return f"it holds {self._strange}"
        if resumes.behind is None:
            had.begin()
        else:
            token_ids = had.go_behind()
            if token_ids is None:
                return "its worker told no token ids"
            self.call = resumes.behind(first, token_ids)
            self.num_behind = len(token_ids)
        self.left -= 1
        self.joins = True
        return ""

    def join(self, data: bytes) -> bytes:
        """Whole events of another worker as the client's next ones. Raises Diverged."""
        assert self._had is not None, "it has not gone on"
        return rewritten(data, Choices.mark, self._had.joined)

    def _read(self) -> Choices:
        """What the client has."""
        had = self._had = self._had or Choices()
        for payload in payloads(self.sent.take()):
            if Choices.mark in payload:
                self._strange = had.read(payload) or self._strange
        return had


# ---- what a client has of a stream of completions or of a chat, and how events of another worker follow it


class Diverged(ValueError):
    """Another worker answers in other words."""


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

    @property
    def said(self) -> bool:
        return self.finished or bool(self.token_ids) or any(map(any, self.texts.values()))

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


class Choices:
    """What the client has of each."""

    mark = b'"choices"'
    """Of an event with some."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        self._copies: dict[int, _Copy] = {}
        self._heads: dict[int, dict[str, msgspec.Raw]] = {}
        """By choice, what else its first event said: SGLang has an id for each prompt of a batch."""
        self._counted = False
        """The client has the usage."""

    @property
    def said(self) -> bool:
        return any(part.said for part in self._parts.values())

    def read(self, payload: bytes) -> str:
        try:
            event = msgspec.json.decode(payload, type=_Event)
            for choice in event.choices:
                if choice.index not in self._heads:
                    fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
                    self._heads[choice.index] = {name: fields[name] for name in fields if name not in _NOT_HEAD}
        except (ValueError, RecursionError):
            return "an event that cannot be read"
        self._counted = self._counted or not event.choices
        strange = ""
        for choice in event.choices:
            strange = self._parts.setdefault(choice.index, _Part()).add(choice) or strange
        return strange

    def begin(self) -> None:
        self._copies = {index: _Copy(part) for index, part in self._parts.items()}

    def go_behind(self) -> array[int] | None:
        """Another worker is told these tokens, and what follows is its rest of the answer. None if the client has not
        one choice with the ids of all its tokens."""
        (part,) = self._parts.values() if len(self._parts) == 1 else (_Part(without_ids=True),)
        if part.without_ids:
            return None
        self._copies = {0: _Copy(_Part(finished=part.finished))}
        return part.token_ids

    def joined(self, document: bytes) -> bytes:
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
        head = self._heads.get(kept[0].get("index", 0)) if kept else None
        if head is None:
            head = next(iter(self._heads.values()), {})
        return msgspec.json.encode({**fields, **head, "choices": kept})
