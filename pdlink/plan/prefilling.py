"""Passes of the prefill workers of the compiled fleet (`fluid.py`), and the KV that leaves them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pdlink.compiled import compiled

from .agenda import add_job
from .state import IDLE, NUM_DUE, PASS, PASSES

if TYPE_CHECKING:
    from .state import Speeds


@compiled
def begin(speeds: Speeds, jobs: Any, prefills: Any, worker: int, now_s: float) -> Any:
    """Seconds of its next pass; or of the passes that its first prompt fills alone, but for the last. Infinite
    without any prompt."""
    job = prefills[worker].head
    if job < 0:
        prefills[worker].state = IDLE
        return math.inf
    budget = speeds.max_batched_tokens
    if jobs[job].left > budget:
        passes = (jobs[job].left - 1) // budget
        prefills[worker].state = PASSES
        took_s = speeds.prompt_s * passes + _take(speeds, jobs, job, passes * budget, now_s)
    else:
        prefills[worker].state = PASS
        prefills[worker].ending = 0
        took_s = speeds.prompt_s
        while job >= 0 and budget > 0:
            tokens = min(jobs[job].left, budget)
            took_s += _take(speeds, jobs, job, tokens, now_s)
            budget -= tokens
            if jobs[job].left == 0:
                prefills[worker].ending += 1
            job = jobs[job].behind
    took_s *= prefills[worker].slow
    prefills[worker].busy_s += took_s
    return took_s


@compiled
def _take(speeds: Speeds, jobs: Any, job: int, tokens: int, now_s: float) -> float:
    """Seconds for so many tokens of its prompt, which count as computed."""
    before = jobs[job].prompt - jobs[job].left
    jobs[job].left -= tokens
    if math.isnan(jobs[job].began_s):
        jobs[job].began_s = now_s
    seconds: float = speeds.token_s * tokens + speeds.attention_s * tokens * (before + tokens / 2)
    return seconds


@compiled
def prefilled(speeds: Speeds, jobs: Any, prefills: Any, due: Any, counters: Any, worker: int, now_s: float) -> int:
    """The first prompt of its line is computed: its KV leaves, or waits until decode has blocks. Returns its job."""
    job: int = prefills[worker].head
    prefills[worker].head = jobs[job].behind
    if jobs[job].behind < 0:
        prefills[worker].tail = -1
    prefills[worker].load -= jobs[job].new
    prefills[worker].requests -= 1
    jobs[job].prefilled_s = now_s
    if jobs[job].admitted:
        send(speeds, jobs, prefills, due, counters, job, now_s)
    return job


@compiled
def send(speeds: Speeds, jobs: Any, prefills: Any, due: Any, counters: Any, job: int, now_s: float) -> None:
    """It is computed, and decode has its blocks. Layers may have left while later ones were computed; the link sends
    one prompt's KV after the other's."""
    worker = jobs[job].prefill
    whole_s = speeds.transfer_s * jobs[job].moved
    begin_s = now_s
    if jobs[job].prefilled_s == now_s:
        begin_s = jobs[job].began_s + (now_s - jobs[job].began_s) / speeds.num_layers
    end_s = max(now_s + whole_s / speeds.num_layers, max(prefills[worker].link_s, begin_s) + whole_s)
    prefills[worker].link_s = end_s
    add_job(due, counters[NUM_DUE], job, end_s + speeds.handoff_s)
    counters[NUM_DUE] += 1
