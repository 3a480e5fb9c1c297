"""What a simulated fleet (`fleet.py`) is asked: a trace, or chats drawn from a seed."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .fleet import Curves

KEY_TOKENS = 512
"""Tokens of one `hash_ids` entry of a Mooncake trace."""


@dataclass(slots=True, eq=False)
class Request:
    at_s: float
    prompt_tokens: int
    answer_tokens: int
    keys: tuple[int, ...]


def read_trace(path: Path, limit: int) -> list[Request]:
    """The first requests of a Mooncake trace (JSON lines). Raises ConfigError."""
    found = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, limit):
                row = json.loads(line)
                keys = tuple(int(key) for key in row["hash_ids"])
                at_s = row["timestamp"] / 1000
                found.append(Request(at_s, int(row["input_length"]), max(1, int(row["output_length"])), keys))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"trace: cannot read {path}: {error!r}; give a file of Mooncake's FAST25 traces") from None
    return found


def conversations(num: int, seed: int) -> list[Request]:
    """Synthetic: chats of several turns, each with all that was said before, some with a long beginning in common."""
    rng = random.Random(seed)
    keys = itertools.count(1)
    systems = [[next(keys) for _ in range(rng.choice((1, 2, 8)))] for _ in range(20)]
    found: list[Request] = []
    while len(found) < num:
        said, at_s = list(rng.choice(systems)), rng.random() * num
        for _ in range(1 + int(rng.expovariate(0.3))):
            said += [next(keys) for _ in range(1 + int(rng.lognormvariate(1.2, 1.2)))]
            tokens = len(said) * KEY_TOKENS - rng.randrange(KEY_TOKENS)
            found.append(Request(at_s, tokens, 1 + int(rng.expovariate(1 / 300)), tuple(said)))
            at_s += num * 0.02 * rng.random()
    return sorted(found[:num], key=lambda each: each.at_s)


def at_load(requests: Sequence[Request], load: float, num_prefill: int, curves: Curves) -> list[Request]:
    """The same requests, so fast that prefill without any cache would be busy for this share of the time."""
    work_s = sum(curves.prefill_s(each.prompt_tokens, 0) for each in requests)
    first_s = requests[0].at_s
    span_s = requests[-1].at_s - first_s or 1.0
    scale = work_s / load / num_prefill / span_s
    return [
        Request((each.at_s - first_s) * scale, each.prompt_tokens, each.answer_tokens, each.keys) for each in requests
    ]
