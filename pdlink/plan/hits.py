"""Which part of each prompt is there already: the requests of a trace through a cache, the least recent forgotten."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import ConfigError

from .traffic import KEY_TOKENS

if TYPE_CHECKING:
    from .traffic import Tokens, Traffic


def cached_tokens(traffic: Traffic, capacity_tokens: int) -> Tokens:
    """Of each prompt, the leading tokens that a cache of this size has: all tiers of all workers together.

    A prompt is there for the requests behind it at once, and its last token is always computed. Raises ConfigError
    for traffic that does not say which prompts begin alike.
    """
    if not traffic.keys:
        raise ConfigError(
            f"cache-tokens: got {capacity_tokens}, and {traffic.name} does not say which prompts begin alike; "
            "expected a trace with `hash_ids`; leave the option out"
        )
    held: OrderedDict[int, None] = OrderedDict()
    found = np.zeros(len(traffic), np.int64)
    for number, keys in enumerate(traffic.keys):
        there = 0
        for key in keys:
            if key not in held:
                break
            there += 1
        found[number] = min(there * KEY_TOKENS, int(traffic.prompt_tokens[number]) - 1)
        for key in reversed(keys):  # suffix first: a beginning is newer than what follows it
            held[key] = None
            held.move_to_end(key)
        while len(held) * KEY_TOKENS > capacity_tokens:
            held.popitem(last=False)
    return found
