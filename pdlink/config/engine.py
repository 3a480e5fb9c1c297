"""The built-in engine."""

from __future__ import annotations

from pydantic import Field

from pdlink.config.section import Section


class EngineConfig(Section):
    """Scheduling of the built-in engine."""

    max_batched_tokens: int = Field(default=512, ge=1)
    """Most tokens of one forward pass; longer prompts are prefilled in chunks of this."""
    max_running: int = Field(default=64, ge=1)
    """Most requests in one forward pass."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests queued beyond the running ones before a new one is answered 503."""
    threads: int = Field(default=1, ge=1)
    """CPU threads torch may use."""
    device: str = Field(default="cpu", pattern="^(cpu|cuda(:[0-9]{1,3})?)$")
    """Where the model computes and the KV is: "cpu", "cuda" (the first GPU) or "cuda:1"."""
