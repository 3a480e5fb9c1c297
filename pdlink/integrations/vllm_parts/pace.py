"""How long a rank takes for tokens that it does not load: what it computes, and what another server sends it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdlink.store.worth import Speed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class VllmPace:
    """Measured by vLLM's thread; others read `computing` and `receiving`, seconds for tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.computing, self.receiving = Speed(), Speed()
        self._clock = clock
        self._step: tuple[float, int] | None = None
        """Since when the step runs, and the tokens of prompts that it computes."""
        self._offers: dict[str, tuple[float, int]] = {}

    def begin(self, num_tokens: int) -> None:
        """A step begins that computes so many tokens of prompts."""
        self._step = (self._clock(), num_tokens) if num_tokens else None

    def end(self) -> None:
        """Its forward pass has ended. What it computed of answers beside prompts is in its time, too."""
        step, self._step = self._step, None
        if step is not None:
            began_s, num_tokens = step
            now_s = self._clock()
            self.computing.measured(num_tokens, now_s - began_s, now_s)

    def abandon(self) -> None:
        """Its forward pass has failed, and took no time worth knowing."""
        self._step = None

    def offered(self, request_id: str, num_tokens: int) -> None:
        """Another server is asked for so many tokens."""
        self._offers[request_id] = self._clock(), num_tokens

    def received(self, request_ids: Collection[str], failed: Collection[str]) -> None:
        """They have come, but for those of `failed`."""
        for request_id in request_ids if self._offers else ():
            offered_s, num_tokens = self._offers.pop(request_id, (0.0, 0))
            if num_tokens and request_id not in failed:
                now_s = self._clock()
                self.receiving.measured(num_tokens, now_s - offered_s, now_s)
