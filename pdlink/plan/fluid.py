"""A fleet in virtual time with its placement compiled, too: for sweeps.

A request goes to the decode worker with the fewest tokens of those with room for all of it, else it waits, in one
line for the whole fleet; then to the prefill worker with the fewest tokens. In a large fleet the better of two drawn
by chance takes the place of the best one. Workers are those of `core.py`. (`fleet.py` plays the proxy's own
policies before the same workers, at a fiftieth of the speed.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlink.compiled import compiled

from .core import NOTHING, Played, enter, happen, make_arrays, outcome, speeds_of
from .state import CHANCE, NUM_PLACED, Speeds

if TYPE_CHECKING:
    from .curves import Curves
    from .traffic import Seconds, Tokens

LOOK_AT_ALL = 64
"""Workers of one side; with more, two are drawn by chance."""


def play(
    curves: Curves,
    num_prefill: int,
    num_decode: int,
    at_s: Seconds,
    prompt_tokens: Tokens,
    answer_tokens: Tokens,
    cached_tokens: Tokens | None = None,
    *,
    seed: int = 1,
) -> Played:
    """The requests through a fleet. at_s: ascending. cached_tokens: of each prompt, with the prefill worker already.

    The same arguments give the same outcome. Cost: one to two microseconds a request, after some seconds of compiling
    the first time.
    """
    arrays = make_arrays(curves, num_prefill, num_decode, prompt_tokens, answer_tokens, seed=seed, notes=False)
    new = prompt_tokens if cached_tokens is None else prompt_tokens - cached_tokens
    arrays.jobs["new"], arrays.jobs["moved"] = np.maximum(1, new), prompt_tokens
    _play(speeds_of(curves), *arrays, np.asarray(at_s, np.float64))
    return outcome(curves, arrays, at_s)


@compiled
def _play(
    speeds: Speeds,
    jobs: Any,
    prefills: Any,
    decodes: Any,
    sequences: Any,
    places: Any,
    order: Any,
    due: Any,
    counters: Any,
    ended: Any,
    at_s: Any,
) -> None:
    """To the end of all requests."""
    num, arrived = len(jobs), 0
    while True:
        arrive_s = at_s[arrived] if arrived < num else math.inf
        now_s, changed = happen(
            speeds, jobs, prefills, decodes, sequences, places, order, due, counters, ended, arrive_s
        )
        if changed == NOTHING:
            if arrived == num:
                return
            now_s = arrive_s
            arrived += 1
            if counters[NUM_PLACED] < arrived - 1:
                continue  # nothing has changed for those before it
        elif changed < 0:
            continue
        while counters[NUM_PLACED] < arrived:
            decode = _decode_of(speeds, jobs, decodes, counters, changed)
            if decode < 0:
                break
            job = counters[NUM_PLACED]
            counters[NUM_PLACED] += 1
            prefill = _least(prefills, counters)
            enter(speeds, jobs, prefills, decodes, places, order, due, counters, job, prefill, decode, now_s)


# ---- placement


@compiled
def _drawn(counters: Any, num: int) -> int:
    """Below `num`, by a linear congruential generator (Knuth's MMIX)."""
    counters[CHANCE] = counters[CHANCE] * 6364136223846793005 + 1442695040888963407
    return ((counters[CHANCE] >> 33) & 0x7FFFFFFF) % num  # type: ignore[no-any-return]


@compiled
def _least(workers: Any, counters: Any) -> int:
    """The worker with the smallest load; equal ones by chance."""
    num, best, equal = len(workers), 0, 1
    if num > LOOK_AT_ALL:
        best, other = _drawn(counters, num), _drawn(counters, num)
        return other if workers[other].load < workers[best].load else best
    for one in range(1, num):
        if workers[one].load < workers[best].load:
            best, equal = one, 1
        elif workers[one].load == workers[best].load:
            equal += 1
            if _drawn(counters, equal) == 0:
                best = one
    return best


@compiled
def _with_room(decodes: Any, counters: Any, need: int) -> int:
    """The same among those with room; -1 if nobody has any."""
    num, best, equal = len(decodes), -1, 0
    if num > LOOK_AT_ALL:
        for _ in range(2):
            one = _drawn(counters, num)
            if decodes[one].room >= need and (best < 0 or decodes[one].load < decodes[best].load):
                best = one
        if best >= 0:
            return best
    for one in range(num):
        if decodes[one].room >= need:
            if best < 0 or decodes[one].load < decodes[best].load:
                best, equal = one, 1
            elif decodes[one].load == decodes[best].load:
                equal += 1
                if _drawn(counters, equal) == 0:
                    best = one
    return best


@compiled
def _decode_of(speeds: Speeds, jobs: Any, decodes: Any, counters: Any, changed: int) -> int:
    """The decode worker of the first one in line; -1 if none has room for it.

    changed: the one decode worker that has more room than before; below 0 if that is unknown.
    """
    job = counters[NUM_PLACED]
    need = min(jobs[job].prompt + jobs[job].answer, speeds.pool_tokens)
    if changed >= 0 and len(decodes) > LOOK_AT_ALL:
        return changed if decodes[changed].room >= need else -1
    return _with_room(decodes, counters, need)
