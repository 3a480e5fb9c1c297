"""Streams of the engines' own servers, cut at every byte on their way through the proxy: the client gets the same
bytes wherever the network cuts them, and the worker's marks are found there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdlink._http import Exchange
from pdlink.api.openai import LAST_EVENTS, parse
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.flow import Flow, Limits
from pdlink_proxy.http_connection import AnswerListener
from pdlink_proxy.steps import Answered, Chunk, Ended, EndStream, Forward, Leg, Outcome, Placed
from tests.proxy.fakes import passed
from tests.proxy.test_joining import _INPUTS, events_of, path_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdlink._http import Headers

HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PREFILLED = b'{"choices":[],"meta_info":{},"usage":{"prompt_tokens_details":{"cached_tokens":3}}}'
TWO_CHOICES = (
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[{"index":1,"text":"b","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":1,"text":"","finish_reason":"length"}],"kv_transfer_params":{"pdlink_kv":"x"}}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
    b"data: [DONE]\n\n",
)
"""A mark in the middle, two in one event, and one that is merged."""
ERROR = (TWO_CHOICES[0], b'data: {"error":{"message":"no","code":500}}\n\n', b"data: [DONE]\n\n")
RECORDED = {
    "vllm": ("vllm-chat", "vllm-completions"),
    "sglang": ("sglang-chat", "sglang-completions", "sglang-generate", "sglang-messages", "sglang-responses"),
    "pdlink": ("vllm-completions",),
}
STREAMS = [
    (dialect, path_of(name), name, tuple(events_of(name))) for dialect, names in RECORDED.items() for name in names
] + [
    (dialect, path_of("vllm-completions"), name, events)
    for dialect in RECORDED
    for name, events in (("two choices", TWO_CHOICES), ("an error", ERROR))
]


def chunked(events: Iterable[bytes]) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


class _Unsent(Exchange):
    """A connection to no worker: what comes is fed."""

    def send_rest(self, data: bytes) -> None:
        pass


class Client(AnswerListener):
    """What a client gets of decode's answer, by the native reader and the flow, as a request runs them."""

    def __init__(self, dialect: str, path: str) -> None:
        rules = DIALECTS[dialect].rules
        body = b'{"model":"m","stream":true,"%b":%b}' % (
            _INPUTS[path].encode(),
            b"[]" if _INPUTS[path] == "messages" else b'"a"',
        )
        if (rules_of := DIALECTS[dialect].rules_of) is not None:
            rules = rules_of(parse(path, body, "m")) or rules
        limits = Limits(retries=0, first_byte_s=10, idle_s=5, request_s=100)
        self.flow = Flow(limits, 0.0, rules, last_events=LAST_EVENTS.get(path, ()))
        self.flow.on(Placed("p", "d"), 0.0)
        self.flow.on(Answered(1, Leg.PREFILL, 200, PREFILLED), 0.0)
        self.data, self.passed = b"", 0
        self.status, self.free = 0, False

    def hears(self, pieces: Sequence[bytes]) -> None:
        exchange = _Unsent()
        exchange.ask(b"", b"", b"", self, self)
        for piece in pieces:
            exchange.feed(piece)
        assert (self.status, self.free) == (200, True)

    def on_head(self, status: int, _headers: Headers) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        if self.data and passed(self.flow, 1, Leg.DECODE, data, 1.0):
            self.passed += 1
            self.data += data
        else:
            self._tell(Chunk(1, Leg.DECODE, data))

    def freed(self, _exchange: Exchange) -> None:
        self.free = True

    def on_end(self, data: bytes) -> None:
        self._tell(Ended(1, Leg.DECODE, data))

    def _tell(self, event: Chunk | Ended) -> None:
        for action in self.flow.on(event, 1.0):
            if isinstance(action, Forward | EndStream):
                self.data += action.data


@pytest.mark.parametrize(
    ("dialect", "path", "name", "events"), STREAMS, ids=[f"{one[0]}: {one[2]}" for one in STREAMS]
)
def test_a_stream_cut_at_any_byte_is_the_same_for_its_client(
    dialect: str, path: str, name: str, events: tuple[bytes, ...]
) -> None:
    wire, whole = chunked(events), Client(dialect, path)
    each = [HEAD, *(b"%x\r\n%b\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]
    whole.hears(each)
    assert whole.flow.outcome is (Outcome.BROKEN if name == "an error" else Outcome.OK)
    if name == "two choices":
        assert (b"pdlink_kv" in whole.data) == (dialect != "vllm")
        assert b'"cached_tokens":3' in whole.data, "as prefill said"
    elif name != "an error":
        assert whole.passed > len(events) // 3, "most events pass as they are"
    for cut in range(len(HEAD), len(wire)):
        client = Client(dialect, path)
        client.hears([wire[:cut], wire[cut:]])
        assert client.data == whole.data, cut
        assert client.flow.outcome is whole.flow.outcome, cut
