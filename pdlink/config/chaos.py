"""Faults on purpose."""

from __future__ import annotations

from pydantic import Field

from pdlink.config.section import Section


class ChaosConfig(Section):
    """Faults of the links between workers, for tests only: what this worker sends is lost, repeated or late."""

    seed: int = 0
    """With the worker's name it decides which frames are hit."""
    drop: float = Field(default=0.0, ge=0, lt=1)
    """Share of control frames that are lost."""
    duplicate: float = Field(default=0.0, ge=0, lt=1)
    """Share of control frames that are sent twice, the second time late."""
    delay_s: float = Field(default=0.0, ge=0)
    """Most seconds a control frame is late; the order of a connection stays."""
    link_nbytes_per_s: float = Field(default=0.0, ge=0)
    """KV is reported as sent no faster than this, over each transport; 0 slows nothing."""

    @property
    def enabled(self) -> bool:
        """Whether anything is to happen to control frames."""
        return bool(self.drop or self.duplicate or self.delay_s)
