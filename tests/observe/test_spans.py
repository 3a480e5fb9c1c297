"""The trace context that spans belong to, and where they go."""

from __future__ import annotations

import pytest

from pdlink.config.tracing import TracingConfig
from pdlink.observe.spans import context_for, new_span_id, read_context

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-has", True),
        (f"cc-{TRACE}-{PARENT}-01", True),
    ],
)
def test_a_trace_context_is_read_as_w3c_has_it(header: str, sampled: bool) -> None:
    found = read_context(header, "a=1")
    assert found is not None
    assert (found.trace_id, found.span_id, found.sampled, found.state) == (TRACE, PARENT, sampled, "a=1")
    mine = new_span_id()
    assert read_context(found.traceparent(mine)) == (TRACE, mine, found.flags & 3, "")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00-1-2-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01,00-{TRACE}-{PARENT}-01",
    ],
)
def test_another_header_begins_a_new_trace_of_which_a_share_is_sampled(header: str | None) -> None:
    assert read_context(header) is None
    new = context_for(header, "a=1", share=1.0)
    assert (new.span_id, new.state, new.sampled) == ("", "", True)
    assert new.trace_id != TRACE
    assert not context_for(header, None, share=0.0).sampled


def test_the_sampled_flag_of_a_context_is_above_the_share() -> None:
    assert context_for(f"00-{TRACE}-{PARENT}-01", None, share=0.0).sampled
    assert not context_for(f"00-{TRACE}-{PARENT}-00", None, share=1.0).sampled


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://collector:4317", "http://", "file:///tmp/x"])
def test_an_endpoint_that_is_no_url_of_http_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be http://HOST:PORT"):
        TracingConfig(endpoint=url)


def test_an_endpoint_without_a_path_gets_that_of_otlp() -> None:
    assert TracingConfig(endpoint="http://c:4318").endpoint == "http://c:4318/v1/traces"
    assert TracingConfig(endpoint="https://c/otlp/v1/traces").endpoint == "https://c/otlp/v1/traces"
