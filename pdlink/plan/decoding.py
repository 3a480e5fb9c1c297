"""Steps of the decode workers of the compiled fleet (`fluid.py`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pdlink.compiled import compiled

from .prefilling import send
from .state import NUM_ENDED

if TYPE_CHECKING:
    from .state import Speeds


@compiled
def _steps_s(speeds: Speeds, decodes: Any, worker: int, num: int) -> float:
    """Its next steps, without a change of its batch."""
    running = decodes[worker].num
    first_s = speeds.step_s + speeds.sequence_s * running + speeds.context_s * decodes[worker].tokens
    seconds: float = num * first_s + speeds.context_s * running * num * (num - 1) / 2
    return seconds * decodes[worker].slow  # type: ignore[no-any-return]


@compiled
def _step(decodes: Any, worker: int, num: int, took_s: float) -> None:
    decodes[worker].clock_s += took_s
    decodes[worker].steps += num
    decodes[worker].tokens += num * decodes[worker].num
    decodes[worker].busy_s += took_s
    decodes[worker].sequence_s += took_s * decodes[worker].num


@compiled
def end_s(speeds: Speeds, decodes: Any, sequences: Any, worker: int) -> float:
    """When its next sequence ends."""
    if decodes[worker].num == 0:
        return math.inf
    left = sequences[worker, 0].end - decodes[worker].steps
    end_s: float = decodes[worker].clock_s + _steps_s(speeds, decodes, worker, left)
    return end_s


@compiled
def _advance(speeds: Speeds, decodes: Any, sequences: Any, worker: int, now_s: float) -> None:
    """To the end of the step that runs now."""
    left_s = now_s - decodes[worker].clock_s
    if left_s <= 0:
        return
    if decodes[worker].num == 0:
        decodes[worker].clock_s = now_s
        return
    half_s = speeds.context_s * decodes[worker].num / 2 * decodes[worker].slow
    slope_s = _steps_s(speeds, decodes, worker, 1) - half_s
    root = 2 * left_s / (slope_s + math.sqrt(slope_s * slope_s + 4 * half_s * left_s))
    num = min(int(math.ceil(root - 1e-9)), sequences[worker, 0].end - decodes[worker].steps)
    _step(decodes, worker, num, _steps_s(speeds, decodes, worker, num))


@compiled
def join(speeds: Speeds, jobs: Any, decodes: Any, sequences: Any, job: int, now_s: float) -> None:
    """Its KV is there. The first token is prefill's."""
    worker = jobs[job].decode
    _advance(speeds, decodes, sequences, worker, now_s)
    jobs[job].began_s = max(now_s, decodes[worker].clock_s)
    at = decodes[worker].num
    decodes[worker].num += 1
    decodes[worker].tokens += jobs[job].prompt + 1
    end = decodes[worker].steps + jobs[job].answer - 1
    while at > 0:
        above = (at - 1) // 2
        if sequences[worker, above].end <= end:
            break
        sequences[worker, at].end = sequences[worker, above].end
        sequences[worker, at].job = sequences[worker, above].job
        at = above
    sequences[worker, at].end = end
    sequences[worker, at].job = job


@compiled
def complete(
    speeds: Speeds,
    jobs: Any,
    prefills: Any,
    decodes: Any,
    sequences: Any,
    due: Any,
    counters: Any,
    ended: Any,
    worker: int,
    now_s: float,
) -> None:
    """The step ends after which sequences leave."""
    left = sequences[worker, 0].end - decodes[worker].steps
    _step(decodes, worker, left, now_s - decodes[worker].clock_s)
    decodes[worker].clock_s = now_s
    while decodes[worker].num and sequences[worker, 0].end == decodes[worker].steps:
        job = sequences[worker, 0].job
        _pop(decodes, sequences, worker)
        jobs[job].done_s = now_s
        decodes[worker].tokens -= jobs[job].prompt + jobs[job].answer
        leave(speeds, jobs, prefills, decodes, due, counters, ended, job, now_s)


@compiled
def _pop(decodes: Any, sequences: Any, worker: int) -> None:
    num = decodes[worker].num - 1
    decodes[worker].num = num
    end, job, at = sequences[worker, num].end, sequences[worker, num].job, 0
    while True:
        below = 2 * at + 1
        if below >= num:
            break
        if below + 1 < num and sequences[worker, below + 1].end < sequences[worker, below].end:
            below += 1
        if sequences[worker, below].end >= end:
            break
        sequences[worker, at].end = sequences[worker, below].end
        sequences[worker, at].job = sequences[worker, below].job
        at = below
    sequences[worker, at].end = end
    sequences[worker, at].job = job


@compiled
def leave(
    speeds: Speeds,
    jobs: Any,
    prefills: Any,
    decodes: Any,
    due: Any,
    counters: Any,
    ended: Any,
    job: int,
    now_s: float,
) -> None:
    """It gives its blocks and its slot back."""
    worker = jobs[job].decode
    tokens = jobs[job].prompt + jobs[job].answer
    need = min(tokens, speeds.pool_tokens)
    decodes[worker].room += need
    decodes[worker].held -= need
    decodes[worker].load -= tokens
    decodes[worker].requests -= 1
    decodes[worker].slots -= 1
    if len(ended):
        note(ended, counters, job, 1, now_s)
    if decodes[worker].head >= 0:
        admit(speeds, jobs, prefills, decodes, due, counters, worker, now_s)


@compiled
def admit(
    speeds: Speeds, jobs: Any, prefills: Any, decodes: Any, due: Any, counters: Any, worker: int, now_s: float
) -> None:
    """Blocks and slots to the first ones of its line, in order of arrival. KV that is computed leaves for them."""
    while decodes[worker].head >= 0 and decodes[worker].slots < speeds.max_running:
        job = decodes[worker].head
        need = min(jobs[job].prompt + jobs[job].answer, speeds.pool_tokens)
        if decodes[worker].held + need > speeds.pool_tokens:
            return
        decodes[worker].head = jobs[job].waits
        decodes[worker].held += need
        decodes[worker].slots += 1
        jobs[job].admitted = 1
        if not math.isnan(jobs[job].prefilled_s):
            send(speeds, jobs, prefills, due, counters, job, now_s)


@compiled
def note(ended: Any, counters: Any, job: int, leg: int, now_s: float) -> None:
    """A leg has ended."""
    at = counters[NUM_ENDED]
    ended[at].at_s, ended[at].job, ended[at].leg = now_s, job, leg
    counters[NUM_ENDED] += 1
