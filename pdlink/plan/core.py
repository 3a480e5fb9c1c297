"""The workers of a fleet in virtual time, compiled: every pass and decode step of them, at a few events a request.

Prefill workers compute prompts in order of arrival, in passes of at most `max_batched_tokens` tokens: passes that
one prompt fills alone are one event. All sequences of a decode worker advance in step, and the steps between two
changes of its batch have a sum in closed form: a change costs one event, and newcomers join where a step ends. A
decode worker gives blocks and slots in order of arrival, for prompt and answer at once.

Who goes where is not decided here: `fluid.py` does it in compiled code, `fleet.py` with the proxy's own
policies, queue and breakers. Not modelled: memory of prefill workers, priorities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdlink.compiled import compiled

from .agenda import DUE, make_agenda, set_worker, take_job
from .decoding import admit, complete, end_s, join, leave, note
from .prefilling import begin, prefilled
from .state import DECODE, ENDED, IDLE, JOB, MOST_WORKERS, NUM_DUE, NUM_ENDED, PASS, PREFILL, SEQUENCE, Speeds

if TYPE_CHECKING:
    from .curves import Curves
    from .traffic import Seconds, Tokens

NOTHING = -2
"""Nothing happened in time. (`changed` of `happen`.)"""


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


class Arrays(NamedTuple):
    """In the order in which compiled functions take them."""

    jobs: Any
    prefills: Any
    decodes: Any
    sequences: Any
    places: Any
    order: Any
    due: Any
    counters: Any
    ended: Any
    """[0], or as many as legs of all jobs: then each end is noted."""


def make_arrays(
    curves: Curves, num_prefill: int, num_decode: int, prompt: Tokens, answer: Tokens, *, seed: int, notes: bool
) -> Arrays:
    """A fleet without a request. notes: the ends of legs."""
    if max(num_prefill, num_decode) > MOST_WORKERS:
        raise ValueError(f"workers: got {num_prefill} and {num_decode}; limit {MOST_WORKERS} of a side")
    jobs = np.zeros(len(prompt), JOB)
    jobs["prompt"], jobs["answer"] = prompt, answer
    jobs["behind"] = jobs["waits"] = -1
    jobs["began_s"] = jobs["prefilled_s"] = np.nan
    prefills, decodes = np.zeros(num_prefill, PREFILL), np.zeros(num_decode, DECODE)
    for workers in (prefills, decodes):
        workers["head"] = workers["tail"] = -1
        workers["slow"] = 1.0
    decodes["room"] = curves.pool_tokens
    # Not a power of two: rows at such distances share few lines of the cache.
    sequences = np.zeros((num_decode, min(len(jobs), curves.max_running) + 5), SEQUENCE)
    counters = np.array([0, 0, seed, 0], np.int64)
    ended = np.zeros(2 * len(jobs) if notes else 0, ENDED)
    agenda = make_agenda(num_prefill + num_decode)
    return Arrays(jobs, prefills, decodes, sequences, *agenda, np.zeros(len(jobs), DUE), counters, ended)


def speeds_of(curves: Curves) -> Speeds:
    return Speeds(*(getattr(curves, name) for name in Speeds._fields))


def outcome(curves: Curves, arrays: Arrays, at_s: Seconds) -> Played:
    """Once all requests have ended. at_s: when each came."""
    jobs, prefills, decodes = arrays.jobs, arrays.prefills, arrays.decodes
    answer, first_s = jobs["answer"], jobs["prefilled_s"]
    if curves.grace_s:  # an answer of one token is of prefill alone
        held_s = np.minimum(first_s + curves.grace_s, np.maximum(first_s, jobs["began_s"]))
        first_s = np.where(answer > 1, held_s, first_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_token_s = np.where(answer > 1, (jobs["done_s"] - first_s) / (answer - 1), np.nan)
    span_s = float(max(jobs["done_s"].max(), jobs["prefilled_s"].max()) - at_s[0])
    decode_s = float(decodes["busy_s"].sum())
    return Played(
        first_s + curves.overhead_s - at_s,
        per_token_s,
        float(prefills["busy_s"].mean()) / span_s,
        decode_s / len(decodes) / span_s,
        float(decodes["sequence_s"].sum()) / decode_s if decode_s else 0.0,
        span_s,
    )


class Core:
    """A fleet that somebody else places requests in, one at a time."""

    def __init__(self, curves: Curves, num_prefill: int, num_decode: int, prompt: Tokens, answer: Tokens) -> None:
        """prompt, answer: tokens of each job."""
        self.curves = curves
        self.arrays = make_arrays(curves, num_prefill, num_decode, prompt, answer, seed=1, notes=True)
        self._speeds = speeds_of(curves)

    def enter(self, job: int, prefill: int, decode: int, new: int, moved: int, now_s: float) -> None:
        """The job goes to these workers. new: tokens that prefill computes; moved: whose KV decode lacks. `advance`
        must have been to this time."""
        _enter(self._speeds, *self.arrays, job, prefill, decode, new, moved, now_s)

    def advance(self, until_s: float, *, first: bool) -> list[tuple[float, int, int]]:
        """To this time, inclusive; only to the first end of a leg if `first`. Returns the legs that have ended, in
        their order: when, job, leg (0 prefill, 1 decode)."""
        num = _advance(self._speeds, *self.arrays, until_s, first)
        return self.arrays.ended[:num].tolist() if num else []


@compiled
def enter(
    speeds: Speeds,
    jobs: Any,
    prefills: Any,
    decodes: Any,
    places: Any,
    order: Any,
    due: Any,
    counters: Any,
    job: int,
    prefill: int,
    decode: int,
    now_s: float,
) -> None:
    """The job, whose tokens are set, goes to these workers."""
    tokens = jobs[job].prompt + jobs[job].answer
    jobs[job].prefill, jobs[job].decode = prefill, decode
    jobs[job].left = jobs[job].new
    decodes[decode].room -= min(tokens, speeds.pool_tokens)
    decodes[decode].load += tokens
    decodes[decode].requests += 1
    if decodes[decode].head < 0:
        decodes[decode].head = job
    else:
        jobs[decodes[decode].tail].waits = job
    decodes[decode].tail = job
    if decodes[decode].head == job:
        admit(speeds, jobs, prefills, decodes, due, counters, decode, now_s)
    prefills[prefill].load += jobs[job].new
    prefills[prefill].requests += 1
    if prefills[prefill].tail < 0:
        prefills[prefill].head = job
    else:
        jobs[prefills[prefill].tail].behind = job
    prefills[prefill].tail = job
    if prefills[prefill].state == IDLE:
        set_worker(places, order, prefill, now_s + begin(speeds, jobs, prefills, prefill, now_s))


@compiled
def happen(
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
    until_s: float,
) -> tuple[float, int]:
    """The next thing that happens, if that is until `until_s`: when, and the decode worker that has more room now,
    -1 if there is none."""
    num_prefill, changed = len(prefills), -1
    ready_s = due[0].at_s if counters[NUM_DUE] else np.inf
    now_s = order[0].at_s
    if now_s <= until_s and now_s <= ready_s:
        if now_s == np.inf:
            return now_s, NOTHING
        worker = order[0].worker
        if worker < num_prefill:
            if prefills[worker].state == PASS:
                for _ in range(prefills[worker].ending):
                    job = prefilled(speeds, jobs, prefills, due, counters, worker, now_s)
                    if len(ended):
                        note(ended, counters, job, 0, now_s)
            set_worker(places, order, worker, now_s + begin(speeds, jobs, prefills, worker, now_s))
            return now_s, changed
        changed = worker - num_prefill
        complete(speeds, jobs, prefills, decodes, sequences, due, counters, ended, changed, now_s)
        set_worker(places, order, worker, end_s(speeds, decodes, sequences, changed))
        return now_s, changed
    if ready_s > until_s or ready_s == np.inf:
        return until_s, NOTHING
    job = take_job(due, counters[NUM_DUE])
    counters[NUM_DUE] -= 1
    worker = jobs[job].decode
    if jobs[job].answer > 1:
        join(speeds, jobs, decodes, sequences, job, ready_s)
        set_worker(places, order, num_prefill + worker, end_s(speeds, decodes, sequences, worker))
        return ready_s, changed
    jobs[job].done_s = jobs[job].prefilled_s
    leave(speeds, jobs, prefills, decodes, due, counters, ended, job, ready_s)
    return ready_s, worker


@compiled
def _enter(
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
    job: int,
    prefill: int,
    decode: int,
    new: int,
    moved: int,
    now_s: float,
) -> None:
    jobs[job].new, jobs[job].moved = new, moved
    enter(speeds, jobs, prefills, decodes, places, order, due, counters, job, prefill, decode, now_s)


@compiled
def _advance(
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
    until_s: float,
    first: bool,
) -> int:
    counters[NUM_ENDED] = 0
    while True:
        _, changed = happen(speeds, jobs, prefills, decodes, sequences, places, order, due, counters, ended, until_s)
        if changed == NOTHING or (first and counters[NUM_ENDED]):
            return counters[NUM_ENDED]  # type: ignore[no-any-return]
