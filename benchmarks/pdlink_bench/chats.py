"""Synthetic chats for a simulated fleet (`pdlink.plan.fleet`), drawn from a seed."""

from __future__ import annotations

import itertools
import random

import numpy as np

from pdlink.plan.traffic import KEY_TOKENS, Traffic


def conversations(num: int, seed: int) -> Traffic:
    """Chats of several turns, each with all that was said before, some with a long beginning in common."""
    rng = random.Random(seed)
    keys = itertools.count(1)
    systems = [[next(keys) for _ in range(rng.choice((1, 2, 8)))] for _ in range(20)]
    found: list[tuple[float, int, int, tuple[int, ...]]] = []
    while len(found) < num:
        said, at_s = list(rng.choice(systems)), rng.random() * num
        for _ in range(1 + int(rng.expovariate(0.3))):
            said += [next(keys) for _ in range(1 + int(rng.lognormvariate(1.2, 1.2)))]
            tokens = len(said) * KEY_TOKENS - rng.randrange(KEY_TOKENS)
            found.append((at_s, tokens, 1 + int(rng.expovariate(1 / 300)), tuple(said)))
            at_s += num * 0.02 * rng.random()
    at, prompts, answers, chains = zip(*sorted(found[:num], key=lambda each: each[0]), strict=True)
    return Traffic(f"synthetic chats, seed {seed}", np.array(at), np.array(prompts), np.array(answers), tuple(chains))
