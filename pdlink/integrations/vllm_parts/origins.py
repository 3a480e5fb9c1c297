"""Where the tokens of each prompt come from, for metrics and explanations: told once for each request.

Part of the scheduler's half; only decides, as `requests.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdlink.events import PromptSourced
from pdlink.integrations.vllm_parts.store_book import Chosen

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_TIERS = Chosen("no_tiers")
"""Of a server without a store."""
_HIT_SOURCES = {"memory": "HOST", "disk": "DISK", "peer": "P2P"}
"""What vLLM calls places of the store; it has no name for the others."""


@dataclass(slots=True)
class _Origin:
    cached: int
    """Tokens that vLLM had when it last asked."""
    told: PromptSourced | None = None
    loading: bool = False
    """It may yet come short of what was told."""


class Origins:
    def __init__(self) -> None:
        self._requests: dict[str, _Origin] = {}

    def asked(self, request_id: str, num_computed: int) -> None:
        """vLLM asks what comes from elsewhere, beside the first `num_computed` tokens, which are in its blocks."""
        origin = self._requests.setdefault(request_id, _Origin(num_computed))
        origin.cached = num_computed

    def admitted(
        self, request_id: str, num_tokens: int, num_external: int, loaded: int, chosen: Chosen
    ) -> PromptSourced | None:
        """vLLM has reserved blocks. `loaded` of the `num_external` tokens from elsewhere come from the store.

        None for a request that is to be loaded, which is told when vLLM reserves the other blocks, and for one of
        which it was told before: a preempted one.
        """
        origin = self._requests.get(request_id)
        if origin is None or origin.told is not None:
            told = origin.told if origin is not None and origin.loading else None
            if origin is not None:
                origin.loading = False
            return told
        origin.loading = loaded > 0
        received = num_external - loaded
        origin.told = PromptSourced(
            request_id=request_id,
            cached=origin.cached,
            loaded=loaded,
            received=received,
            computed=num_tokens - origin.cached - num_external,
            found=chosen.found,
            reason=chosen.reason,
            load_s=chosen.load_s,
            other_s=chosen.other_s,
            began_s=time.monotonic(),
            places=_cut(dict(chosen.places), loaded),
        )
        return None if origin.loading else origin.told

    def fell_short(self, request_id: str, end: int, *, receives: bool) -> None:
        """The load has brought tokens before `end` alone. receives: another server is asked for the others."""
        origin = self._requests.get(request_id)
        if origin is None or origin.told is None:
            return
        told = origin.told
        loaded = max(0, end - told.cached)
        lost = told.loaded - loaded
        origin.told = replace(
            told,
            loaded=loaded,
            received=told.received + (lost if receives else 0),
            computed=told.computed + (0 if receives else lost),
            places=dict(reversed(_cut(dict(reversed(told.places.items())), loaded).items())),
        )

    def sources(self, request_id: str) -> dict[str, int]:
        """What vLLM calls the places of tokens that came from elsewhere, and how many each."""
        origin = self._requests.get(request_id)
        if origin is None or origin.told is None:
            return {}
        found = {"P2P": origin.told.received} if origin.told.received else {}
        for place, tokens in origin.told.places.items():
            kind = place.partition(" ")[0].rstrip("-0123456789")
            name = _HIT_SOURCES.get(kind, "EXTERNAL_UNSPECIFIED")
            found[name] = found.get(name, 0) + tokens
        return found

    def ended(self, request_id: str) -> PromptSourced | None:
        """The request has ended; what was told of it."""
        origin = self._requests.pop(request_id, None)
        return origin.told if origin is not None else None


def _cut(places: Mapping[str, int], loaded: int) -> dict[str, int]:
    """Of what was found at these places, in order, the last `loaded` tokens: vLLM has the others by now."""
    found, rest = {}, loaded
    for place, tokens in reversed(list(places.items())):
        if rest > 0:
            found[place] = min(tokens, rest)
            rest -= tokens
    return dict(reversed(list(found.items())))
