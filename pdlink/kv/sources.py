"""KV that need not be computed here: which tokens of a prompt, and from where.

An engine sees ranges of tokens. A source finds them by block keys (`pdlink.kv.hashing`) and fills the engine's
blocks, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdlink.reasons import ABORTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.reasons import Reason


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [begin, end) of a prompt, whose KV `source` has for all layers."""

    begin: int
    end: int
    source: KVSource


class AnyLoad(Protocol):
    """KV on its way from a source into blocks."""

    def has_layer(self, layer: int) -> bool:
        """Whether `layer` is in the blocks, for all tokens of the range. Raises PdlinkError if it never will be."""

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """Wait until it is. Raises DeadlineExceeded after `timeout_s`, another PdlinkError if it never will be."""

    def cancel(self, reason: Reason = ABORTED) -> None:
        """Nobody wants the KV any more. The source keeps its hold on the blocks until it cannot write to them."""


class KVSource(Protocol):
    """Has KV of prompts. Its methods return at once."""

    def lookup(self, keys: Sequence[bytes]) -> tuple[TokenRange, ...]:
        """What it has of the prompt whose full blocks have these names, in order of tokens."""

    def load(self, wanted: TokenRange, blocks: Sequence[int]) -> AnyLoad:
        """Begin to fill `blocks`, of which the first one holds token `wanted.begin`."""
