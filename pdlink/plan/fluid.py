"""A fleet in virtual time, compiled: every request, pass and decode step of it, at a few events a request.

Prefill workers compute prompts in order of arrival, in passes of at most `max_batched_tokens` tokens: passes that
one prompt fills alone are one event. All sequences of a decode worker advance in step, and the steps between two
changes of its batch have a sum in closed form: a change costs one event, and newcomers join where a step ends. A
request goes to the decode worker with the fewest tokens of those with room for all of it, else it waits, in one line
for the whole fleet; then to the prefill worker with the fewest tokens. In a large fleet the better of two drawn by
chance takes the place of the best one. Not modelled: memory of prefill workers, failures, priorities.
(`pdlink_bench.fleet` plays the proxy's own policies, at a hundredth of the speed.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlink.compiled import compiled

from .agenda import DUE, make_agenda, set_worker, take_job
from .decoding import complete, end_s, join, leave
from .prefilling import begin, prefilled
from .state import CHANCE, DECODE, IDLE, JOB, NUM_DUE, NUM_PLACED, PASS, PREFILL, SEQUENCE, Speeds

if TYPE_CHECKING:
    from .curves import Curves
    from .traffic import Seconds, Tokens

LOOK_AT_ALL = 64
"""Workers of one side; with more, two are drawn by chance."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """What became of each request, in order of arrival, and of the workers."""

    ttft_s: Seconds
    per_token_s: Seconds
    """From the first token to the last, divided by the tokens after the first; not a number for answers of one."""
    prefill_busy: float
    """Mean share of the time."""
    decode_busy: float
    batch: float
    """Mean number of sequences in a decode step."""
    span_s: float
    """From the first arrival to the last token."""


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
    jobs = np.zeros(len(at_s), JOB)
    jobs["at_s"], jobs["prompt"], jobs["answer"] = at_s, prompt_tokens, answer_tokens
    jobs["new"] = jobs["left"] = np.maximum(
        1, prompt_tokens if cached_tokens is None else prompt_tokens - cached_tokens
    )
    jobs["behind"], jobs["began_s"] = -1, np.nan
    prefills, decodes = np.zeros(num_prefill, PREFILL), np.zeros(num_decode, DECODE)
    for workers in (prefills, decodes):
        workers["head"] = workers["tail"] = -1
    decodes["room"] = curves.pool_tokens
    # Not a power of two: rows at such distances share few lines of the cache.
    sequences = np.zeros((num_decode, min(len(at_s), curves.max_running) + 5), SEQUENCE)
    counters = np.array([0, 0, seed], np.int64)
    speeds = Speeds(*(getattr(curves, name) for name in Speeds._fields))
    agenda = *make_agenda(num_prefill + num_decode), np.zeros(len(at_s), DUE)
    _play(speeds, jobs, prefills, decodes, sequences, *agenda, counters)
    with np.errstate(divide="ignore", invalid="ignore"):
        decoding_s = jobs["done_s"] - jobs["prefilled_s"]
        per_token_s = np.where(answer_tokens > 1, decoding_s / (answer_tokens - 1), np.nan)
    span_s = float(max(jobs["done_s"].max(), jobs["prefilled_s"].max()) - at_s[0])
    decode_s = float(decodes["busy_s"].sum())
    return Played(
        jobs["prefilled_s"] + curves.overhead_s - at_s,
        per_token_s,
        float(prefills["busy_s"].mean()) / span_s,
        decode_s / num_decode / span_s,
        float(decodes["sequence_s"].sum()) / decode_s if decode_s else 0.0,
        span_s,
    )


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
) -> None:
    """To the end of all requests."""
    num, num_prefill, arrived = len(jobs), len(prefills), 0
    while True:
        arrive_s = jobs[arrived].at_s if arrived < num else math.inf
        ready_s = due[0].at_s if counters[NUM_DUE] else math.inf
        worker = order[0].worker
        now_s, changed = order[0].at_s, -1
        if now_s <= arrive_s and now_s <= ready_s:
            if now_s == math.inf:
                return
            if worker < num_prefill:
                if prefills[worker].state == PASS:
                    for _ in range(prefills[worker].ending):
                        prefilled(speeds, jobs, prefills, decodes, due, counters, worker, now_s)
                took_s = begin(speeds, jobs, prefills, worker, now_s)
                set_worker(places, order, worker, now_s + took_s)
                continue
            changed = worker - num_prefill
            complete(speeds, jobs, prefills, decodes, sequences, due, counters, changed, now_s)
            set_worker(places, order, worker, end_s(speeds, decodes, sequences, changed))
        elif ready_s <= arrive_s:
            now_s = ready_s
            job = take_job(due, counters[NUM_DUE])
            counters[NUM_DUE] -= 1
            changed = jobs[job].decode
            if jobs[job].answer > 1:
                join(speeds, jobs, decodes, sequences, job, now_s)
                set_worker(places, order, num_prefill + changed, end_s(speeds, decodes, sequences, changed))
                continue
            jobs[job].done_s = jobs[job].prefilled_s
            leave(speeds, jobs, prefills, decodes, due, counters, job, now_s)
        else:
            now_s = arrive_s
            arrived += 1
            if counters[NUM_PLACED] < arrived - 1:
                continue  # nothing has changed for those before it
        while counters[NUM_PLACED] < arrived:
            prefill = _place(speeds, jobs, prefills, decodes, counters, changed)
            if prefill < 0:
                break
            if prefills[prefill].state == IDLE:
                took_s = begin(speeds, jobs, prefills, prefill, now_s)
                set_worker(places, order, prefill, now_s + took_s)


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
def _place(speeds: Speeds, jobs: Any, prefills: Any, decodes: Any, counters: Any, changed: int) -> int:
    """The prefill worker of the first one in line; -1 if no decode worker has room for it.

    changed: the one decode worker that has more room than before; -1 if that is unknown.
    """
    job = counters[NUM_PLACED]
    need = min(jobs[job].prompt + jobs[job].answer, speeds.pool_tokens)
    if changed >= 0 and len(decodes) > LOOK_AT_ALL:
        decode = changed if decodes[changed].room >= need else -1
    else:
        decode = _with_room(decodes, counters, need)
    if decode < 0:
        return -1
    counters[NUM_PLACED] += 1
    jobs[job].decode = decode
    decodes[decode].room -= need
    decodes[decode].load += jobs[job].prompt + jobs[job].answer
    if decodes[decode].slots < speeds.max_running:
        decodes[decode].slots += 1
        jobs[job].admitted = 1
    prefill = _least(prefills, counters)
    jobs[job].prefill = prefill
    prefills[prefill].load += jobs[job].new
    if prefills[prefill].tail < 0:
        prefills[prefill].head = job
    else:
        jobs[prefills[prefill].tail].behind = job
    prefills[prefill].tail = job
    return prefill
