"""`PeerSource`: the sender of one transfer as a source of KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.kv.sources import TokenRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.node.incoming import Incoming


class PeerSource:
    """Has the KV of the whole prompt, because its worker computes it for this transfer."""

    def __init__(self, incoming: Incoming, num_tokens: int) -> None:
        """num_tokens: of the prompt."""
        self._incoming, self._num_tokens = incoming, num_tokens

    def lookup(self, keys: Sequence[bytes]) -> tuple[TokenRange, ...]:
        return (TokenRange(0, self._num_tokens, self),)

    def load(self, wanted: TokenRange, blocks: Sequence[int]) -> Incoming:
        self._incoming.offer(blocks, range(wanted.begin, wanted.end))
        return self._incoming
