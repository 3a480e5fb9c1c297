"""A collector of spans, as OpenTelemetry's: takes OTLP over HTTP, and keeps what it decodes."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")


@dataclass(frozen=True)
class Got:
    """One span, decoded."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str
    links: tuple[str, ...]
    state: str


@dataclass
class Collector:
    """Listens while it is entered."""

    status: int = 200
    gate: threading.Event | None = None
    """Waited for before an answer."""
    asked: int = 0
    """Requests that it got."""
    found: list[Got] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> Self:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                with collector._news:
                    collector.asked += 1
                    collector._news.notify_all()
                if collector.gate is not None:
                    collector.gate.wait(WAIT_S)
                if collector.status == 200:
                    assert self.path == "/v1/traces"
                    packed = self.headers.get("Content-Encoding") == "gzip"
                    collector._take(gzip.decompress(data) if packed else data)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.gate is not None:
            self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def until(self, true: Callable[[Collector], bool], what: str) -> None:
        """Wait for a state of it."""
        with self._news:
            if not self._news.wait_for(lambda: true(self), WAIT_S):
                pytest.fail(f"the collector still waits for {what}; it has {[each.name for each in self.found]}")

    def spans(self, count: int) -> list[Got]:
        """All, when there are so many."""
        self.until(lambda _: len(self.found) >= count, f"{count} spans")
        return list(self.found)

    def _take(self, data: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        asked = ExportTraceServiceRequest.FromString(data)
        with self._news:
            for resource in asked.resource_spans:
                names = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    assert scope.scope.name == "pdlink"
                    self.found += [_got(span, names["service.name"]) for span in scope.spans]
            self._news.notify_all()


def _got(span: Any, service: str) -> Got:
    return Got(
        service,
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        span.status.message if span.status.code == 2 else "",
        tuple(link.span_id.hex() for link in span.links),
        span.trace_state,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}
