"""Sends spans to a collector, from a thread of its own, with OpenTelemetry's exporter (extra `otel`).

A request never waits for it: what the collector does not take in time is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink import threads
from pdlink.observe.spans import unix_offset_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.config.tracing import TracingConfig
    from pdlink.observe.spans import Span, TraceContext

log = logging.getLogger(__name__)

_FLUSH_S = 1.0
"""Longest wait for a batch to fill."""
MAX_WAITING = 8192
"""Spans for the collector; more are dropped and counted, so that no request waits for a dead one."""
_BATCH = 512
_TIMEOUT_S = 5.0
"""Of one batch, its repetitions included."""
_CLOSE_S = 2.0


class _Sent(NamedTuple):
    span: Span
    context: TraceContext
    offset_s: float
    """From its clock to Unix time."""


class SpanSender:
    """Takes spans from any thread. `open` begins, `close` sends what is left."""

    def __init__(self, config: TracingConfig, service: str, instance: str, *, max_waiting: int = MAX_WAITING) -> None:
        """service, instance: `service.name` and `service.instance.id` of all its spans. max_waiting: spans. Raises
        ModuleNotFoundError without the extra (`pdlink.extras.needed`)."""
        assert config.endpoint is not None
        self._endpoint, self._max_waiting = config.endpoint, max_waiting
        self._made = _Exporter(config.endpoint, {"service.name": service, "service.instance.id": instance})
        self._waiting: list[_Sent] = []
        self._more = threading.Condition()
        self._closing = False
        self.num_sent = self.num_dropped = 0
        self._failing = False
        self._thread = threads.guarded("pdlink-spans", self._run, self._died)

    def open(self) -> None:
        self._thread.start()

    def send(self, context: TraceContext, spans: Sequence[Span]) -> None:
        """Never waits; spans for which there is no room are dropped. context: of their request."""
        offset_s = unix_offset_s()
        with self._more:
            room = self._max_waiting - len(self._waiting)
            self._waiting += [_Sent(span, context, offset_s) for span in spans[:room]]
            self.num_dropped += max(0, len(spans) - room)
            if len(self._waiting) >= _BATCH:
                self._more.notify()

    def close(self) -> None:
        """Sends what waits, for at most two seconds."""
        with self._more:
            self._closing = True
            self._more.notify()
        self._thread.join(_CLOSE_S)
        self._made.close()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._more:
                if not self._closing and len(self._waiting) < _BATCH:
                    self._more.wait(_FLUSH_S)
                batch, closing = self._waiting[:_BATCH], self._closing
                del self._waiting[: len(batch)]
            if batch:
                self._export(batch)
            elif closing:
                return

    def _died(self, _why: str) -> None:
        """Drop what comes, and count it."""
        with self._more:
            self.num_dropped += len(self._waiting)
            self._waiting.clear()
            self._max_waiting = 0

    def _export(self, batch: Sequence[_Sent]) -> None:
        failure = self._made.export(batch)
        with self._more:
            if failure is None:
                self.num_sent += len(batch)
            else:
                self.num_dropped += len(batch)
        if failure is not None and not self._failing:
            log.warning("tracing.endpoint %s: spans are lost: %s", self._endpoint, failure)
        elif failure is None and self._failing:  # as loud as its loss
            log.warning("tracing.endpoint %s: takes spans again; %d were lost", self._endpoint, self.num_dropped)
        self._failing = failure is not None


class _Exporter:
    """OpenTelemetry's, with what it says kept for one line of ours: it would repeat itself every few seconds."""

    def __init__(self, endpoint: str, names: dict[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from pdlink import __version__

        self._span: Any = ReadableSpan
        self._success = SpanExportResult.SUCCESS
        self._scope = InstrumentationScope("pdlink", __version__)
        self._resource = Resource.create(names)
        self._exporter = OTLPSpanExporter(endpoint, timeout=_TIMEOUT_S)
        self._said = _Said()
        self._logger = logging.getLogger(OTLPSpanExporter.__module__)
        self._logger.addFilter(self._said)

    def export(self, spans: Sequence[_Sent]) -> str | None:
        """Why it failed."""
        self._said.last = ""
        try:
            if self._exporter.export([self._readable(span) for span in spans]) is self._success:
                return None
        except Exception as error:  # noqa: BLE001 -- of foreign code, in a thread that must go on
            return f"{type(error).__name__}: {error}"
        return self._said.last or "the exporter does not say why"

    def close(self) -> None:
        self._exporter.shutdown()
        self._logger.removeFilter(self._said)

    def _readable(self, sent: _Sent) -> Any:
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        span, said, offset_s = sent
        trace_id, flags = int(said.trace_id, 16), TraceFlags(said.flags)
        state = TraceState.from_header([said.state]) if said.state else None

        def context(span_id: str, *, remote: bool = False) -> Any:
            return SpanContext(trace_id, int(span_id, 16), remote, flags, state)

        return self._span(
            span.name,
            context=context(span.span_id),
            parent=context(span.parent_id, remote=span.kind == "server") if span.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            links=[Link(context(each)) for each in span.links],
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int((offset_s + span.begin_s) * 1e9),
            end_time=int((offset_s + max(span.begin_s, span.end_s)) * 1e9),
            instrumentation_scope=self._scope,
        )


class _Said(logging.Filter):
    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False
