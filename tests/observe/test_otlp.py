"""The way of spans to a collector that is slow, wrong or dead."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any

import pytest

from pdlink.config.tracing import TracingConfig
from pdlink.observe.otlp import SpanSender
from pdlink.observe.spans import Span, TraceContext, new_span_id
from tests.observe.collector import Collector
from tests.waiting import WAIT_S, until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = TraceContext(TRACE, PARENT)


def span(name: str = "work", **more: Any) -> Span:
    said: dict[str, Any] = {"span_id": new_span_id(), "parent_id": PARENT}
    return Span(name=name, begin_s=1.0, end_s=2.5, **(said | more))


def sender_to(url: str, max_waiting: int = 100) -> SpanSender:
    made = SpanSender(TracingConfig(endpoint=url), "pdlink-test", "one", max_waiting=max_waiting)
    made.open()
    return made


def until_dropped(sender: SpanSender, count: int) -> None:
    until(lambda: sender.num_dropped >= count, f"{count} are dropped")


def test_a_collector_gets_what_was_said() -> None:
    with Collector() as collector:
        sender = sender_to(collector.url)
        context = TraceContext(TRACE, PARENT, 1, "a=1,b=2")
        more: dict[str, Any] = {
            "kind": "client",
            "attributes": {"n": 1, "text": "é", "share": 0.5, "on": True},
            "error": "reset",
        }
        sender.send(context, [span(links=("00f067aa0ba902b7",), **more), span("first", parent_id="")])
        sender.close()
        work, first = collector.spans(2)
    assert (work.service, work.name, work.kind, work.error) == ("pdlink-test", "work", "client", "reset")
    assert (work.trace_id, work.parent_id, work.state) == (TRACE, PARENT, "a=1,b=2")
    assert work.links == ("00f067aa0ba902b7",)
    assert work.begin_ns / 1e9 == pytest.approx(time.time() - time.monotonic() + 1.0, abs=60)
    assert work.end_ns - work.begin_ns == pytest.approx(1.5e9, abs=2000)
    assert work.attributes == more["attributes"]
    assert (first.parent_id, first.kind, first.error) == ("", "internal", "")
    assert (sender.num_sent, sender.num_dropped) == (2, 0)


def test_a_tracestate_that_is_none_costs_no_other_span() -> None:
    with Collector() as collector:
        sender = sender_to(collector.url)
        odd = ["=", "a=1,,,", "é=ü", "x" * 9000, "a=1,a=2"]
        for state in odd:
            sender.send(TraceContext(TRACE, PARENT, 1, state), [span()])
        sender.close()
        assert len(collector.spans(len(odd))) == len(odd)


def test_a_slow_collector_keeps_so_many_waiting_and_no_caller() -> None:
    with Collector(gate=threading.Event()) as collector:
        assert collector.gate is not None
        sender = sender_to(collector.url, max_waiting=600)
        sender.send(CONTEXT, [span()] * 512)  # a batch, which the collector does not take
        collector.until(lambda it: it.asked == 1, "the first batch")
        for _ in range(7):
            sender.send(CONTEXT, [span()] * 100)
        assert sender.num_dropped == 100
        collector.gate.set()
        sender.close()
        assert (len(collector.spans(1112)), sender.num_sent, sender.num_dropped) == (1112, 1112, 100)


def test_a_dead_collector_is_told_once_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    with Collector(status=400) as collector:
        sender = sender_to(collector.url)
        for count in (1, 2):
            sender.send(CONTEXT, [span()])
            until_dropped(sender, count)
        collector.status = 200
        sender.send(CONTEXT, [span()])
        collector.spans(1)
        sender.close()
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == [logging.WARNING] * 2, said
    assert "spans are lost: Failed to export spans batch code: 400" in said[0][1]
    assert said[1][1].endswith("takes spans again; 2 were lost")


def test_a_collector_that_is_not_there_delays_the_end_by_little() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # nobody answers
        sender = sender_to(f"http://127.0.0.1:{taken.getsockname()[1]}")
        sender.send(CONTEXT, [span()] * 512)
        began_s = time.monotonic()
        sender.close()
        assert time.monotonic() - began_s < WAIT_S
