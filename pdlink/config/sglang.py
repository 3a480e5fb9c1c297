"""The transfer backend inside of an SGLang server."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from pdlink.config.listen import LinkListen
from pdlink.config.section import Section
from pdlink.config.security import SecurityConfig
from pdlink.config.timeouts import PatientTimeouts
from pdlink.config.transport import TransportConfig
from pdlink.config.worker import WorkerConfig


class SglangConfig(Section):
    """Of one SGLang server with `--disaggregation-transfer-backend pdlink`, from its environment: SGLang has no flag
    for it. PDLINK_LISTEN=10.0.0.1:8500, PDLINK_TRANSPORT__KIND=tcp."""

    listen: LinkListen = LinkListen()
    """Where this server's ranks listen for others: rank r on the port + r. SGLang's servers tell each other."""
    layerwise: bool = True
    """Push every layer as soon as it is written; off, when its chunk is computed."""
    transport: TransportConfig = TransportConfig()
    """How bytes travel."""
    timeouts: PatientTimeouts = PatientTimeouts()
    """How long it waits for others."""
    security: SecurityConfig = SecurityConfig()
    """Who may talk to it. Ranks of a server that has keys need a key file each: {rank} in its name is the rank."""
    timeline: str | None = None
    """File that a trace of the last transfers is kept in, for ui.perfetto.dev; or its events, for programs, if the
    name ends in .json. {rank} is replaced."""
    untested_sglang: Literal["refuse", "accept"] = "refuse"
    """What to do on an SGLang that is newer than those this was run with."""

    @model_validator(mode="after")
    def _locked(self) -> SglangConfig:
        """The rules of a worker hold here: who can be reached needs keys."""
        WorkerConfig(
            listen=self.listen.as_control(),
            transport=self.transport,
            security=self.security,
        )
        return self
