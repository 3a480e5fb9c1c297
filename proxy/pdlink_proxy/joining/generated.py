"""SGLang's own /generate: each event has all of the answer so far, by its place in a batch (0.5.23,
managers/tokenizer_manager.py; unless the server was started with `--incremental-streaming-output`).

So only the newest event of each answer is remembered, and of another worker's events pass those that say more.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ..sse import payloads
from .base import Diverged


class _Meta(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"null")
    finish_reason: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    text: str = ""
    """Not there from a server without a tokenizer."""
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    index: int = 0


class _Place(msgspec.Struct):
    index: int = 0


_UNREADABLE = -1
"""Place of an event that names none."""
_LAST_FIELD, _LAST_NBYTES = re.compile(rb'"index": ?(\d{1,9})}\s*$'), 24
"""Where SGLang writes the place."""
_EVENT = msgspec.json.Decoder(_Event)
_PLACE = msgspec.json.Decoder(_Place)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _place_of(event: bytes) -> int:
    if (found := _LAST_FIELD.search(event, max(0, len(event) - _LAST_NBYTES))) is not None:
        return int(found[1])
    try:
        return _PLACE.decode(next(payloads(event))).index
    except (ValueError, RecursionError):
        return _UNREADABLE


class Generated:
    mark = b'"meta_info"'

    def __init__(self, *, batch: bool = True) -> None:
        """batch: of several prompts, or of a list of one; only then events name their place."""
        self._batch = batch
        self._newest: dict[int, bytes] = {}
        """Events that were not read yet."""
        self._parts: dict[int, _Event] = {}

    @property
    def said(self) -> bool:
        return any(part.output_ids or part.text for part in self._parts.values())

    def sent(self, data: bytes) -> None:
        # Of a long answer each event is long: it is looked at from its end, and read if a worker dies.
        if not self._batch:
            if data.find(b"\n") != len(data) - 2:  # several events; one has no line ends in it
                data = data[data.rfind(b"\n\n", 0, -2) + 2 :]
            if data.rfind(self.mark) >= 0:
                self._newest[0] = data
            return
        for event in data.split(b"\n\n"):
            if self.mark in event:
                self._newest[_place_of(event)] = event + b"\n\n"

    def take(self) -> bytes:
        found = b"".join(self._newest.values())
        self._newest.clear()
        return found

    def read(self, payload: bytes) -> str:
        try:
            event = _EVENT.decode(payload)
        except (ValueError, RecursionError):
            return "an event that cannot be read"
        self._parts[event.index] = event
        return ""

    def begin(self) -> None:
        """Its events say all, whatever came before."""

    def joined(self, document: bytes) -> bytes:
        try:
            event = _EVENT.decode(document)
        except (ValueError, RecursionError):
            raise Diverged("another worker sent no event") from None
        had = self._parts.get(event.index)
        if had is None:
            return document
        if had.meta_info.finish_reason is not None:
            return b""
        num = min(len(event.output_ids), len(had.output_ids))
        if event.output_ids[:num] != had.output_ids[:num]:
            raise Diverged("another worker answers in other tokens")
        num = min(len(event.text), len(had.text))
        if event.text[:num] != had.text[:num]:
            raise Diverged("another worker answers in other words")
        more = (len(event.output_ids) - len(had.output_ids), len(event.text) - len(had.text))
        if event.meta_info.finish_reason is not None:
            if more[0] < 0:
                raise Diverged("another worker ends its answer earlier")
        elif min(more) < 0 or max(more) == 0:
            return b""
        fields: dict[str, Any] = _FIELDS.decode(document)
        meta: dict[str, Any] = _FIELDS.decode(fields["meta_info"])
        return msgspec.json.encode({**fields, "meta_info": {**meta, "id": had.meta_info.id}})
