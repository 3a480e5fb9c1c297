"""A whole deployment on one machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pdlink.config.proxy import ProxyConfig
from pdlink.config.section import Section
from pdlink.config.vllm import VllmConfig
from pdlink.config.worker import WorkerConfig


class UpConfig(Section):
    """`pdlink up`: a whole deployment on this machine."""

    engine: Literal["builtin", "vllm"] = "builtin"
    """What the workers run. With vllm, `vllm` says how, and `prefill` and `decode` here are not used."""
    vllm: VllmConfig = VllmConfig()
    proxy: ProxyConfig = ProxyConfig()
    prefill: WorkerConfig = WorkerConfig(role="prefill")
    decode: WorkerConfig = WorkerConfig(role="decode")
    num_prefill: int = Field(default=1, ge=1)
    num_decode: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> UpConfig:
        for side, worker in (("prefill", self.prefill), ("decode", self.decode)):
            if worker.timeouts.request_s >= self.proxy.request_timeout_s:
                raise ValueError(
                    f"{side}.timeouts.request_s = {worker.timeouts.request_s} s must be below "
                    f"proxy.request_timeout_s = {self.proxy.request_timeout_s} s"
                )
        return self
