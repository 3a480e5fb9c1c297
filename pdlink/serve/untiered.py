"""What a worker without tiers says of the KV of its prompts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdlink.events import PromptSourced, emit
from pdlink.node.port import EnginePort

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.engine.engine import Engine
    from pdlink.kv.groups import AnyTables
    from pdlink.node.node import Node


class Untiered(EnginePort):
    """The port of an engine whose prompts are in its blocks, received or computed."""

    def __init__(self, node: Node, engine: Callable[[], Engine], prompt_tokens: Callable[[str], int]) -> None:
        """prompt_tokens: of a request that has begun."""
        super().__init__(node)
        self._engine, self._prompt_tokens = engine, prompt_tokens

    def admitted(self, request_id: str, block_table: AnyTables, num_cached_tokens: int = 0) -> None:
        super().admitted(request_id, block_table, num_cached_tokens)
        num_tokens = self._prompt_tokens(request_id)
        rest = num_tokens - num_cached_tokens
        receives = self._engine().external_tokens(request_id) == num_tokens
        emit(
            PromptSourced(
                request_id=request_id,
                cached=num_cached_tokens,
                loaded=0,
                received=rest if receives else 0,
                computed=0 if receives else rest,
                found=0,
                reason="no_tiers",
                load_s=0.0,
                other_s=0.0,
                began_s=time.monotonic(),
            )
        )
