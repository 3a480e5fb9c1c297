"""Spans that a proxy makes of its requests, at a collector that decodes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdlink.observe.spans import read_context
from tests.observe.collector import Collector, Got
from tests.proxy.fakes import END, FakeWorker, event, proxy_of, until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1,b=2"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


async def found(collector: Collector, count: int) -> dict[str, Got]:
    """By name, when there are so many."""
    spans = await asyncio.to_thread(collector.spans, count)
    assert len(spans) == count, [each.name for each in spans]
    return {each.name: each for each in spans}


def parent_at(worker: FakeWorker, index: int = 0) -> str:
    """The span that a worker was told to work below."""
    context = read_context(worker.received[index].headers["traceparent"])
    assert context is not None
    assert (context.trace_id, context.sampled) == (TRACE, True)
    return context.span_id


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_a_span_with_its_phases_and_legs_below(
    prefill: FakeWorker, decode: FakeWorker, collector: Collector, stream: bool
) -> None:
    decode.needs = prefill
    async with proxy_of([prefill], [decode], tracing={"endpoint": collector.url}) as proxy:
        headers = {**SAMPLED, "X-Request-Id": "mine"}
        body = {"model": "m", "prompt": "hello", "stream": stream}
        async with proxy.client.post(f"{proxy.url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
            await answer.read()
            transfer_id = answer.headers["X-Pdlink-Transfer"]
        spans = await found(collector, 7)
        assert proxy.router.services.spans is not None
        assert proxy.router.services.spans.num_dropped == 0
    assert {(each.service, each.trace_id, each.state) for each in spans.values()} == {
        ("pdlink-proxy", TRACE, "a=1,b=2")
    }
    request = spans.pop("text_completion m")
    assert (request.kind, request.parent_id, request.error) == ("server", PARENT, "")
    said = request.attributes
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("text_completion", "m")
    assert (said["pdlink.request_id"], said["pdlink.outcome"], said["pdlink.attempts"]) == ("mine", "ok", 1)
    assert said["pdlink.kv"] == "transferred"
    assert {each.parent_id for each in spans.values()} == {request.span_id}
    assert set(spans) == {"queue", "prefill", "transfer", "decode", "prefill leg", "decode leg"}
    phases = [spans[name] for name in ("queue", "prefill", "transfer", "decode")]
    assert phases[0].begin_ns == request.begin_ns
    assert [each.end_ns for each in phases[:3]] == [each.begin_ns for each in phases[1:]], "one follows the other"
    assert phases[3].end_ns == pytest.approx(request.end_ns, abs=1000)
    for leg, worker in (("prefill", prefill), ("decode", decode)):
        mine = spans[f"{leg} leg"]
        assert mine.kind == "client"
        assert mine.span_id == parent_at(worker), "what the worker does is below its leg"
        assert mine.attributes["pdlink.transfer_id"] == transfer_id
        assert worker.received[0].headers["tracestate"] == "a=1,b=2"
        assert worker.received[0].headers["X-Request-Id"] == "mine"


async def test_every_attempt_has_legs_and_the_lost_one_says_why(
    prefill: FakeWorker, decodes: list[FakeWorker], collector: Collector
) -> None:
    prefill.gate = asyncio.Event()
    decodes[0].resets = 1
    async with proxy_of([prefill], decodes, tracing={"endpoint": collector.url}) as proxy:
        async with proxy.client.post(
            f"{proxy.url}/v1/completions", json={"model": "m", "prompt": "x", "stream": True}, headers=SAMPLED
        ) as answer:
            await answer.read()
        await asyncio.to_thread(
            collector.until, lambda it: any(" m" in each.name for each in it.found), "the request"
        )
    legs = [each for each in collector.found if each.kind == "client"]
    assert sorted(each.name for each in legs) == ["decode leg"] * 2 + ["prefill leg"] * 2
    assert len({each.attributes["pdlink.transfer_id"] for each in legs}) == 2
    assert [each.error for each in legs if each.name == "decode leg"] == ["reset", ""]
    assert sorted(each.span_id for each in legs) == sorted(
        [parent_at(prefill), parent_at(prefill, 1), parent_at(decodes[0]), parent_at(decodes[1])]
    )


async def test_a_request_that_failed_is_a_failed_span(
    prefill: FakeWorker, decode: FakeWorker, collector: Collector
) -> None:
    prefill.fail_with = decode.fail_with = 500
    async with proxy_of([prefill], [decode], retries=0, tracing={"endpoint": collector.url}) as proxy:
        async with proxy.post() as answer:
            assert answer.status == 500
        await asyncio.to_thread(
            collector.until, lambda it: any(" m" in each.name for each in it.found), "the request"
        )
    (request,) = [each for each in collector.found if each.kind == "server"]
    assert (request.parent_id, request.error) == ("", "failed"), "no traceparent: the trace begins here"
    assert any(each.error for each in collector.found if each.kind == "client")


async def test_the_sampled_flag_is_honoured_and_handed_on(
    prefill: FakeWorker, decode: FakeWorker, collector: Collector
) -> None:
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00", "tracestate": "a=1"}
    async with proxy_of([prefill], [decode], tracing={"endpoint": collector.url, "share": 0}) as proxy:
        for headers in (unsampled, {"traceparent": "nonsense", "tracestate": "a=1"}, {}, SAMPLED):
            async with proxy.client.post(
                f"{proxy.url}/v1/completions", json={"model": "m", "prompt": "x"}, headers=headers
            ) as answer:
                assert answer.status == 200
        await asyncio.to_thread(
            collector.until, lambda it: any(" m" in each.name for each in it.found), "the request"
        )
        sent = proxy.router.services.spans
    assert {each.trace_id for each in collector.found} == {TRACE}
    assert sent is not None
    assert sent.num_sent == len(collector.found) <= 7, "of one request alone"
    first, *new, _ = [received.headers for received in decode.received]
    assert (first["traceparent"], first["tracestate"]) == (unsampled["traceparent"], "a=1")
    for headers_ in new:
        begun = read_context(headers_["traceparent"])
        assert begun is not None
        assert not begun.sampled, "or each worker would decide for itself"
        assert "tracestate" not in headers_


async def test_a_dead_collector_changes_nothing_for_requests(prefill: FakeWorker, decode: FakeWorker) -> None:
    whole = b"".join(map(event, decode.tokens)) + END
    async with proxy_of([prefill], [decode], tracing={"endpoint": "http://127.0.0.1:9"}) as proxy:
        for _ in range(5):
            assert await proxy.stream() == whole
        sender = proxy.router.services.spans
        assert sender is not None
        await until(lambda: sender.num_dropped >= 25, "what is dropped to be counted")
        assert sender.num_sent == 0
        async with proxy.client.get(f"{proxy.url}/metrics") as answer:
            said = await answer.text()
        assert f"pdlink_proxy_spans_dropped_total {float(sender.num_dropped)}" in said
