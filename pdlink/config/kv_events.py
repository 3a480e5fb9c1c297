"""KV events: what a worker tells routers about the KV it keeps."""

from __future__ import annotations

from pydantic import Field, model_validator

from pdlink.config.section import Section, is_loopback


class KVEventsConfig(Section):
    """Events in vLLM's format over ZeroMQ. They hold the token ids of prompts, in the clear."""

    endpoint: str | None = None
    """Where subscribers dial: tcp://HOST:PORT, port 0 for a free one, or ipc://PATH. None publishes nothing. GET
    /health says what came of it."""
    replay_endpoint: str | None = None
    """Where they ask for what they missed; as `endpoint`. Who missed more than 10,000 batches is told all that is
    there."""
    topic: str = Field(default="", max_length=255)
    """First frame of each message; {name} in it is the worker's name. Some routers want kv@NAME@MODEL."""
    insecure: bool = False
    """Written out, it lets other hosts than this one reach the endpoints."""

    @model_validator(mode="after")
    def _usable(self) -> KVEventsConfig:
        if self.endpoint is None and self.replay_endpoint is not None:
            raise ValueError("kv_events.endpoint: missing, and kv_events.replay_endpoint is of no use without it")
        for setting in ("endpoint", "replay_endpoint"):
            endpoint: str | None = getattr(self, setting)
            if endpoint is None:
                continue
            scheme, _, rest = endpoint.partition("://")
            host, _, port = rest.rpartition(":")
            if not (scheme == "ipc" and rest) and not (
                scheme == "tcp" and host and (port == "*" or port.isdecimal())
            ):
                raise ValueError(
                    f"kv_events.{setting}: got {endpoint!r}; expected tcp://HOST:PORT or ipc://PATH; write one"
                )
            if scheme == "tcp" and not is_loopback(host.strip("[]")) and not self.insecure:
                raise ValueError(
                    f"kv_events.{setting}: other hosts can reach {host}, and events hold the token ids of prompts; "
                    "use 127.0.0.1, or write out kv_events.insecure: true"
                )
        return self
