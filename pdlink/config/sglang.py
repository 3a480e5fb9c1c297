"""The transfer backend inside of an SGLang server."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from pdlink.config.section import Port, Section
from pdlink.config.security import SecurityConfig
from pdlink.config.timeouts import PatientTimeouts
from pdlink.config.transport import TransportConfig
from pdlink.config.worker import WorkerConfig


class SglangConfig(Section):
    """Of one SGLang server with `--disaggregation-transfer-backend pdlink`, from its environment: SGLang has no flag
    for it. PDLINK_CONTROL_HOST=10.0.0.1, PDLINK_TRANSPORT__KIND=tcp."""

    control_host: str = "127.0.0.1"
    """Where this server's ranks listen for the control messages of others."""
    control_port: Port = 0
    """Rank r listens on this port + r; 0 takes free ones. SGLang's servers tell each other."""
    advertise_host: str | None = None
    """Address other hosts reach this server by; None uses `control_host`."""
    layerwise: bool = True
    """Push every layer as soon as it is written; off, when its chunk is computed."""
    transport: TransportConfig = TransportConfig()
    """How bytes travel."""
    timeouts: PatientTimeouts = PatientTimeouts()
    """Every deadline."""
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
            control_host=self.control_host,
            advertise_host=self.advertise_host,
            transport=self.transport,
            security=self.security,
        )
        return self
