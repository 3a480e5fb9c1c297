"""Random answers whose workers die at random bytes: the client's events are those of one undisturbed answer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.api.openai import CHAT, COMPLETIONS, Call, parse
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.flow import Flow, Limits
from pdlink_proxy.recovery import Recovery
from pdlink_proxy.steps import (
    Chunk,
    Ended,
    EndStream,
    Event,
    Forward,
    Leg,
    Loss,
    Lost,
    Outcome,
    Place,
    Placed,
    Respond,
    StartLegs,
    Why,
)
from tests.proxy.fakes import DONE, passed

if TYPE_CHECKING:
    from collections.abc import Iterator

P, D = Leg.PREFILL, Leg.DECODE
ROUNDS = 300
_PIECES = ["a", "b ", "€", "data: [DONE]", '"choices"', "\n\n", "\\", "", "", '{"error"']


@dataclass
class _Answer:
    """Tokens and end of each choice."""

    texts: list[list[str]]
    ends: list[str]
    chat: bool
    logprobs: bool
    ids: bool
    usage: bool

    @classmethod
    def drawn(cls, rng: random.Random, *, own: bool) -> _Answer:
        num = 1 if own else rng.choice([1, 1, 3])
        texts = [[rng.choice(_PIECES) for _ in range(rng.randint(1, 12))] for _ in range(num)]
        ends = [rng.choice(["stop", "length"]) for _ in range(num)]
        logprobs = not own and rng.random() < 0.5
        return cls(texts, ends, rng.random() < 0.5, logprobs, own or rng.random() < 0.5, rng.random() < 0.5)

    def stream(self, rng: random.Random, name: str, begin: int, *, own: bool) -> list[bytes]:
        """Its events from token `begin` on. own: a token an event; else tokens come in any groups, choices in any
        order, the end alone or with the last tokens."""
        left = [list(range(begin, len(texts))) for texts in self.texts]
        out: list[bytes] = []
        if self.chat and not own:
            out += [self._event(name, index, [], None, role=True) for index in range(len(self.texts))]
        open_choices = list(range(len(self.texts)))
        while open_choices:
            index = rng.choice(open_choices)
            num = 1 if own else rng.randint(1, 3)
            now, left[index] = left[index][:num], left[index][num:]
            end = None
            if not left[index] and (not now or (not own and rng.random() < 0.5)):
                end = self.ends[index]
                open_choices.remove(index)
            out.append(self._event(name, index, now, end, role=own and self.chat and now == [0]))
        if self.usage:
            usage = {"completion_tokens": sum(map(len, self.texts))}
            out.append(b"data: " + json.dumps({"id": name, "choices": [], "usage": usage}).encode() + b"\n\n")
        return [*out, DONE]

    def _event(self, name: str, index: int, tokens: list[int], end: str | None, *, role: bool) -> bytes:
        text = "".join(self.texts[index][token] for token in tokens)
        said: dict[str, Any] = {"role": "assistant"} if role else {}
        choice: dict[str, Any] = {"index": index, "finish_reason": end, "logprobs": None}
        choice |= {"delta": {**said, "content": text}} if self.chat else {"text": text}
        if self.logprobs and tokens:
            key = "content" if self.chat else "token_logprobs"
            choice["logprobs"] = {key: [-float(token) for token in tokens]}
        if self.ids and tokens:
            choice["token_ids"] = tokens
        return b"data: " + json.dumps({"id": name, "choices": [choice]}).encode() + b"\n\n"


class _Read:
    """What a client makes of its bytes."""

    def __init__(self, data: bytes) -> None:
        assert data.endswith(DONE), data[-300:]
        assert data.count(b"\ndata: [DONE]\n") + data.startswith(DONE) == 1
        self.names: set[str] = set()
        self.texts: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, list[str]] = {}
        self.roles: dict[int, int] = {}
        self.usages: list[Any] = []
        for line in data.removesuffix(DONE).splitlines():
            if not line:
                continue
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            self.names.add(event["id"])
            if "usage" in event:
                self.usages.append(event["usage"])
            for choice in event["choices"]:
                self._add(choice)

    def _add(self, choice: dict[str, Any]) -> None:
        index, delta = choice["index"], choice.get("delta") or {}
        text = choice.get("text", delta.get("content", ""))
        self.texts[index] = self.texts.get(index, "") + text
        self.roles[index] = self.roles.get(index, 0) + ("role" in delta)
        self.ids.setdefault(index, []).extend(choice.get("token_ids") or ())
        for values in (choice.get("logprobs") or {}).values():
            self.logprobs.setdefault(index, []).extend(values)
        if choice["finish_reason"] is not None:
            self.ends.setdefault(index, []).append(choice["finish_reason"])


class _Client:
    """A flow as a request runs it, without connections."""

    def __init__(self, call: Call, dialect: str, limit: int, *, prefill: bool) -> None:
        resumes = DIALECTS[dialect].resumes
        assert resumes is not None
        asks = call if resumes.begin is None else resumes.begin(call, 7)
        self.recovery = Recovery(asks, resumes, limit)
        limits = Limits(retries=limit, first_byte_s=10, idle_s=5, request_s=100)
        self.flow = Flow(limits, 0.0, DIALECTS[dialect].rules, recovery=self.recovery)
        self.data = b""
        self.recovered = 0
        self.passed = 0
        self._prefill = "p" if prefill else None
        self.tell(Placed(self._prefill, "d"))

    def tell(self, event: Event) -> None:
        for action in self.flow.on(event, 1.0):
            match action:
                case Forward(data=data) | EndStream(data=data):
                    self.data += data
                case Place(why=why):
                    self.recovered += why is Why.RECOVER
                    self.tell(Placed(self._prefill, "d"))
                case Respond():
                    raise AssertionError(action)
                case StartLegs(prefill=prefill):
                    assert prefill == self._prefill

    def sent(self, data: bytes) -> None:
        if self.data and passed(self.flow, self.flow.attempts, D, data, 1.0):
            self.passed += 1
            self.data += data
        else:
            self.tell(Chunk(self.flow.attempts, D, data))


def _pieces(rng: random.Random, data: bytes) -> Iterator[bytes]:
    while data:
        num = rng.choice([1, 5, 60, 300, 2000])
        yield data[:num]
        data = data[num:]


def _asked(answer: _Answer) -> Call:
    path, what = (CHAT, "messages") if answer.chat else (COMPLETIONS, "prompt")
    return parse(path, json.dumps({"model": "m", "stream": True, "temperature": 0, what: []}).encode())


@pytest.mark.parametrize("dialect", ["pdlink", "vllm"])
@pytest.mark.parametrize("whole_events", [False, True])
def test_a_client_reads_one_answer_wherever_its_workers_die(dialect: str, whole_events: bool) -> None:
    """whole_events: each read of a socket brings one event, which the flow may pass on unread."""
    own = dialect == "pdlink"
    passed = recovered = 0
    for seed in range(ROUNDS):
        rng = random.Random(f"{dialect} {whole_events} {seed}")
        print("seed", seed)
        answer = _Answer.drawn(rng, own=own)
        deaths = rng.randint(0, 3)
        client = _Client(_asked(answer), dialect, 3, prefill=own and rng.random() < 0.5)
        for attempt in range(deaths + 1):
            begin = len(json.loads(bytes(client.recovery.call.fields.get("output_token_ids", b"[]"))))
            events = answer.stream(rng, f"attempt-{attempt}", begin, own=own)
            pieces = events if whole_events else list(_pieces(rng, b"".join(events)))
            if attempt < deaths:
                pieces = pieces[: rng.randint(0, len(pieces) - 1)]
            prefill_at = rng.randint(0, len(pieces)) if client._prefill else -1
            for at, piece in enumerate([*pieces, b""]):
                if client.flow.over:
                    break
                if at == prefill_at:
                    client.tell(Chunk(client.flow.attempts, P, events[0]))
                    client.tell(Ended(client.flow.attempts, P))
                if piece:
                    client.sent(piece)
            if client.flow.over:
                break
            client.tell(Lost(client.flow.attempts, D, Loss.RESET, "died"))
        assert client.flow.outcome is Outcome.OK
        read = _Read(client.data)
        assert len(read.names) == 1
        for index, texts in enumerate(answer.texts):
            assert read.texts[index] == "".join(texts)
            assert read.ends[index] == [answer.ends[index]]
            assert read.roles[index] == answer.chat
            if answer.ids:
                assert read.ids[index] == list(range(len(texts)))
            if answer.logprobs:
                assert read.logprobs[index] == [-float(token) for token in range(len(texts))]
        assert len(read.usages) == answer.usage
        passed, recovered = passed + client.passed, recovered + client.recovered
    assert recovered > ROUNDS // 3
    assert (passed > ROUNDS) == whole_events or passed
