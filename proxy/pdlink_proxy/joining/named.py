"""/v1/responses and /v1/messages: events with names, which open, extend and close parts of the answer.

The client's events are a list of steps: an event, or a text and where it belongs, in however many pieces it came.
Another worker's events must begin with the same steps. Its names for the response and its parts become the client's,
and its events are numbered on. Shapes: vLLM 0.32 (entrypoints/openai/responses, entrypoints/anthropic), SGLang 0.5.23
(entrypoints/openai/serving_responses.py, entrypoints/anthropic).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from .base import Diverged, Packed

_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
"""Of MESSAGES: pieces of text, and the field that holds them."""
_PLACES = ("index", "output_index", "content_index", "summary_index")
_PARTS = ("item", "content_block", "part", "response", "message")
"""Fields with an object that has a type, and perhaps names."""
_NAMES = frozenset(("id", "item_id", "call_id", "response_id"))
_KEPT = ("created_at", "model")
"""Of a response: those of the first worker."""
_ASIDE = frozenset(("ping", "keepalive", "response.keepalive"))
_OBJECT = msgspec.json.Decoder(dict[str, Any])

Key: TypeAlias = tuple[object, ...]


@dataclass(slots=True)
class _Step:
    key: Key
    """What it is and where it belongs."""
    names: dict[str, str]
    """By the field, what it calls its parts."""
    text: str | None = None
    """None for an event that is no piece of a text."""
    kept: dict[str, Any] | None = None
    where: tuple[str, ...] = ()
    """Fields that lead to its text."""


class Named(Packed):
    mark = b'"type"'

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[_Step] = []
        self._pieces: list[str] = []
        """Of the last step, if that is a text."""
        self._number: int | None = None
        """Of the client's last event, where they have numbers."""
        self._at = self._at_text = 0
        """Steps, and characters of the text there, that another worker has repeated."""
        self._names: dict[str, str] = {}
        """What the client knows by another name."""

    @property
    def said(self) -> bool:
        return any(step.text for step in self._steps) or bool(self._pieces)

    def read(self, payload: bytes) -> str:
        try:
            event = _OBJECT.decode(payload)
            step = _step_of(event)
        except (ValueError, RecursionError):
            return "an event that cannot be read"
        if isinstance(number := event.get("sequence_number"), int):
            self._number = number
        if step is None:
            return ""
        if step.text is not None and event.get("logprobs"):
            return "log-probabilities"
        if step.text is None:
            self._close()
            self._steps.append(step)
        elif step.text:
            if not self._goes_on_with(step):
                self._close()
                self._steps.append(step)
            self._pieces.append(step.text)
        return ""

    def _goes_on_with(self, step: _Step) -> bool:
        """Whether this is a further piece of the last text."""
        if not self._steps or (last := self._steps[-1]).text is None or last.key != step.key:
            return False
        if not self._pieces:
            self._pieces = [last.text]
        return True

    def begin(self) -> None:
        self._close()
        self._at = self._at_text = 0
        self._names = {}

    def joined(self, document: bytes) -> bytes:
        try:
            event = _OBJECT.decode(document)
            step = _step_of(event)
        except (ValueError, RecursionError):
            raise Diverged("another worker sent no event") from None
        if event.get("type") in ("error", "response.failed"):
            return document
        if step is None:
            return document if self._at == len(self._steps) else b""
        if self._at < len(self._steps) and not self._repeats(step):
            return b""
        if step.text is not None:
            _put(event, step.where, step.text)
        return self._renamed(event)

    def _repeats(self, step: _Step) -> bool:
        """Whether something of this step is left behind what the client has, which it repeats. Raises Diverged."""
        had = self._steps[self._at]
        if had.text is not None and self._at_text == len(had.text) and step.key != had.key:
            self._at, self._at_text = self._at + 1, 0
            if self._at == len(self._steps):
                return True
            had = self._steps[self._at]
        if step.text == "":
            return False
        if step.key != had.key:
            raise Diverged("another worker answers in other events")
        for field, name in had.names.items():
            if (new := step.names.get(field)) is not None:
                self._names[new] = name
        if step.text is None or had.text is None:
            self._at += 1
            return False
        num = min(len(step.text), len(had.text) - self._at_text)
        if not had.text.startswith(step.text[:num], self._at_text):
            raise Diverged("another worker answers in other words")
        self._at_text += num
        if not (rest := step.text[num:]):
            return False
        if self._at + 1 < len(self._steps):
            raise Diverged("another worker says more")
        step.text, self._at, self._at_text = rest, self._at + 1, 0
        return True

    def _close(self) -> None:
        """No further piece belongs to the last text."""
        if self._pieces:
            last = self._steps[-1]
            last.text = "".join(self._pieces)
            self._pieces = []

    def _renamed(self, event: dict[str, Any]) -> bytes:
        event = _with_names(event, self._names)
        if self._number is not None and "sequence_number" in event:
            self._number += 1
            event["sequence_number"] = self._number
        if isinstance(response := event.get("response"), dict) and self._steps and (kept := self._steps[0].kept):
            response.update({name: value for name, value in kept.items() if name in response})
        return msgspec.json.encode(event)


def _step_of(event: dict[str, Any]) -> _Step | None:
    """None for an event that is no part of the answer. Raises ValueError for one of another kind."""
    kind = event["type"] if isinstance(event.get("type"), str) else ""
    if not kind:
        raise ValueError("no type")
    if kind in _ASIDE:
        return None
    key: list[object] = [kind, *(event.get(name) for name in _PLACES)]
    names = {name: event[name] for name in _NAMES & event.keys() if isinstance(event[name], str)}
    delta = event.get("delta")
    if kind == "content_block_delta":
        if not isinstance(delta, dict):
            raise ValueError("no delta")
        field = _DELTAS.get(delta.get("type", ""))
        key.append(delta.get("type"))
        if field is None:  # a signature, which is drawn at random
            return _Step((*key,), names)
        if not isinstance(text := delta.get(field), str):
            raise ValueError("no text")
        return _Step((*key,), names, text, where=("delta", field))
    if kind.endswith(".delta"):
        if not isinstance(delta, str):
            raise ValueError("no text")
        return _Step((*key,), names, delta, where=("delta",))
    kept = None
    for part in _PARTS:
        if isinstance(found := event.get(part), dict):
            key += [part, found.get("type"), found.get("name")]
            names |= {f"{part}.{name}": found[name] for name in _NAMES & found.keys() if isinstance(found[name], str)}
            if part == "response":
                kept = {name: found[name] for name in _KEPT if name in found}
    return _Step((*key,), names, kept=kept)


def _put(event: dict[str, Any], where: tuple[str, ...], text: str) -> None:
    *path, last = where
    for name in path:
        event = event[name]
    event[last] = text


def _with_names(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            name: names.get(each, each) if name in _NAMES and isinstance(each, str) else _with_names(each, names)
            for name, each in value.items()
        }
    return [_with_names(each, names) for each in value] if isinstance(value, list) else value
