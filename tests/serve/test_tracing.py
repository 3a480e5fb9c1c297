"""Spans of two real workers, one transfer between them, at a collector that decodes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdlink.config.tracing import TracingConfig
from pdlink.observe.spans import transfer_span_id
from tests.observe.collector import Collector, Got
from tests.serve.pair import Script, WorkerPair

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

TRACE = "0af7651916cd43dd8448eb211c80319c"
LEGS = {"prefill": "aaaaaaaaaaaaaaaa", "decode": "bbbbbbbbbbbbbbbb"}
PROMPT = [7 * i % 250 + 1 for i in range(64)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(script: Script, collector: Collector) -> Iterator[WorkerPair]:
    with WorkerPair(script, tracing=TracingConfig(endpoint=collector.url, share=0)) as pair:
        yield pair


def ask(pair: WorkerPair, transfer_id: str, flags: str, **fields: object) -> list[int]:
    """Both legs at once, below a span of a proxy each."""
    seed = pair.number()
    pair.script.answers[seed] = [65, 66, 67, 68]
    body = pair.body(seed, prompt=PROMPT, max_tokens=4, **fields)

    async def both() -> list[int]:
        replies = await asyncio.gather(
            *(
                pair.post(
                    role,
                    "/v1/completions",
                    pair.leg(role, transfer_id, body),
                    {"traceparent": f"00-{TRACE}-{LEGS[role]}-{flags}", "X-Request-Id": "mine"},
                )
                for role in LEGS
            )
        )
        return [reply.status for reply in replies]

    return pair.run(both())


def test_a_transfer_is_a_span_in_both_workers_below_their_legs(traced: WorkerPair, collector: Collector) -> None:
    assert ask(traced, "unsampled", "00") == [200, 200]
    assert ask(traced, "sampled", "01") == [200, 200]
    names = {"prefill", "decode", "send KV", "receive KV", "KV in flight"}
    collector.until(lambda it: names <= {each.name for each in it.found}, "both legs and both sides")
    spans = {(each.service, each.name): each for each in collector.found}
    assert {each.attributes.get("pdlink.transfer_id", "sampled") for each in collector.found} == {"sampled"}
    assert {each.trace_id for each in collector.found} == {TRACE}

    def below(parent: Got) -> set[str]:
        return {each.name for each in collector.found if each.parent_id == parent.span_id}

    legs = {each.name: each for each in collector.found if each.kind == "server"}
    assert {role: each.parent_id for role, each in legs.items()} == LEGS
    assert below(legs["prefill"]) == {"queue", "prefill", "send KV"}
    assert below(legs["decode"]) == {"queue", "wait for KV", "decode", "receive KV"}
    for leg in legs.values():
        assert leg.error == ""
        assert leg.attributes["pdlink.request_id"] == "mine"
        assert leg.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert legs["decode"].attributes["pdlink.prompt_tokens.received"] > 0
    sent, received = spans["pdlink-prefill", "send KV"], spans["pdlink-decode", "receive KV"]
    assert sent.span_id == transfer_span_id("sender", "sampled")
    assert received.links == (sent.span_id,), "no clock is compared: the one names the other"
    assert sent.attributes["pdlink.bytes"] == received.attributes["pdlink.bytes"] > 0
    assert (sent.attributes["pdlink.lane"], sent.attributes["pdlink.peer"]) == ("tcp", "decode")
    assert sent.attributes["pdlink.exposed_ms"] >= 0
    flight = spans["pdlink-prefill", "KV in flight"]
    assert flight.parent_id == sent.span_id
    assert sent.begin_ns <= flight.begin_ns <= flight.end_ns <= sent.end_ns
