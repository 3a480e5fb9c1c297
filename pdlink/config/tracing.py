"""Spans for OpenTelemetry."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pdlink.config.section import Section

TRACES_PATH = "/v1/traces"
"""Of OTLP over HTTP (OpenTelemetry Protocol, "OTLP/HTTP Request")."""


class TracingConfig(Section):
    """Spans of requests, sent over OTLP; needs the extra `otel`."""

    endpoint: str | None = Field(default=None, repr=False)
    """Where spans go: "http://127.0.0.1:4318"; without a path, /v1/traces is taken. None makes none; `traceparent`
    and `tracestate` go to the workers in any case. A collector that wants a key gets OTEL_EXPORTER_OTLP_HEADERS."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests without a `traceparent` that begin a trace. With one, its sampled flag decides."""

    @field_validator("endpoint")
    @classmethod
    def _whole(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("tracing.endpoint: must be http://HOST:PORT or https://HOST:PORT (OTLP over HTTP)")
        return value.rstrip("/") + TRACES_PATH if parts.path in ("", "/") else value
