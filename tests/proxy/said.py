"""What a client makes of a stream, whatever its route."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pdlink.api.openai import GENERATE, MESSAGES, RESPONSES
from pdlink.api.sse import payloads


@dataclass
class Said:
    """Fails for a stream that contradicts itself."""

    texts: dict[object, str] = field(default_factory=dict)
    """By choice, place in a batch, or part."""
    token_ids: dict[object, list[int]] = field(default_factory=dict)
    ends: list[object] = field(default_factory=list)
    num_logprobs: int = 0
    names: set[object] = field(default_factory=set, compare=False)
    """Of the answer and its parts."""

    @classmethod
    def of(cls, data: bytes, path: str) -> Said:
        said = cls()
        numbers = []
        for payload in payloads(data):
            if not payload or payload == b"[DONE]":
                continue
            event = json.loads(payload)
            assert event.get("error") is None, event
            if "sequence_number" in event:
                numbers.append(event["sequence_number"])
            if path == GENERATE:
                said._generated(event)
            elif path in (RESPONSES, MESSAGES):
                said._named(event)
            else:
                said._choices(event)
        assert numbers == list(range(len(numbers)))
        if not numbers:
            said.ends.sort(key=str)  # of answers side by side, as they come
        return said

    def _choices(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            at = choice["index"]
            self.names.add((at, event["id"]))
            delta = choice.get("delta") or {}
            self._add(at, choice.get("text") or delta.get("content") or "")
            self.token_ids.setdefault(at, []).extend(choice.get("token_ids") or ())
            logprobs = choice.get("logprobs") or {}
            self.num_logprobs += len(logprobs.get("content") or logprobs.get("token_logprobs") or ())
            self.ends += [(at, choice["finish_reason"])] if choice["finish_reason"] is not None else []
        self.ends += ["usage"] if event.get("usage") else []

    def _generated(self, event: dict[str, Any]) -> None:
        at = event.get("index", 0)
        had = self.token_ids.get(at, [])
        assert event["output_ids"][: len(had)] == had
        assert event["text"].startswith(self.texts.get(at, ""))
        self.names.add(event["meta_info"]["id"])
        self.texts[at], self.token_ids[at] = event["text"], event["output_ids"]
        self.ends += [at] if event["meta_info"]["finish_reason"] else []

    def _named(self, event: dict[str, Any]) -> None:
        kind, delta = event["type"], event.get("delta")
        if isinstance(delta, dict) and "text" in delta:
            self._add(event["index"], delta["text"])
            return
        if isinstance(delta, str):
            self._add(event["output_index"], delta)
            self.names.add(event["item_id"])
            return
        self.ends.append(kind)
        if kind.endswith("text.done"):
            assert event["text"] == self.texts[event["output_index"]]
        for part in ("response", "message", "item"):
            if part in event:
                self.names.add(event[part]["id"])

    def _add(self, where: object, text: str) -> None:
        self.texts[where] = self.texts.get(where, "") + text
