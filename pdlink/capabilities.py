"""What a transport declares of itself. Peers tell each other in the handshake, which knows nothing else of it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MemoryKind = Literal["host", "cuda"]
Reach = Literal["process", "host", "network"]
"""How far apart its two ends may be: in one process, on one host and in one pid namespace, anywhere."""
Trust = Literal["blocks", "pool", "process"]
"""Where a peer that was invited can write: to the blocks offered to it, which the owner checks for every byte; to all
registered memory; to any address of the process (docs/security.md)."""


class Capabilities(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(max_length=256)]
    reach: Reach
    memory: Annotated[tuple[MemoryKind, ...], msgspec.Meta(max_length=8)]
    trust: Trust

    def __str__(self) -> str:
        return f"{self.name} (reach {self.reach}, moves {'+'.join(self.memory)}, trusts with {self.trust})"
