"""What the compiled fleet (`fluid.py`) keeps of requests and workers: rows of arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

IDLE, PASS, PASSES = 0, 1, 2

JOB = np.dtype(
    [
        ("began_s", "f8"),  # of its first pass, then of its first decode step; not a number before
        ("prefilled_s", "f8"),  # not a number before it
        ("done_s", "f8"),
        ("prompt", "i4"),
        ("answer", "i4"),
        ("new", "i4"),  # tokens that prefill computes
        ("left", "i4"),  # of those, not yet
        ("moved", "i4"),  # tokens whose KV goes to decode
        ("behind", "i4"),  # the next one in prefill's line, or -1
        ("waits", "i4"),  # the next one in decode's line, or -1
        ("prefill", "u2"),
        ("decode", "u2"),
        ("admitted", "i8"),  # decode has its blocks
    ]
)
"""One line of the processor's cache: with a million of them in flight memory is what takes time."""
MOST_WORKERS = 2**16 - 1
"""Of a side: `prefill` and `decode` of a job."""
PREFILL = np.dtype(
    [
        ("head", "i8"),  # of its line
        ("tail", "i8"),
        ("state", "i8"),
        ("ending", "i8"),  # prompts that the running pass completes
        ("load", "i8"),  # tokens
        ("requests", "i8"),
        ("link_s", "f8"),  # when its link is free
        ("busy_s", "f8"),
        ("slow", "f8"),  # times the curves
    ]
)
DECODE = np.dtype(
    [
        ("room", "i8"),  # tokens; below 0 where a router did not know
        ("load", "i8"),  # tokens of prompts and answers
        ("requests", "i8"),
        ("held", "i8"),  # tokens of the requests that have blocks
        ("slots", "i8"),  # these requests
        ("head", "i8"),  # of the requests that wait for blocks or a slot, in order of arrival
        ("tail", "i8"),
        ("num", "i8"),  # sequences that run
        ("tokens", "i8"),  # of KV that a step reads
        ("clock_s", "f8"),  # end of the last step that counts in `steps` and `tokens`
        ("steps", "i8"),
        ("busy_s", "f8"),
        ("sequence_s", "f8"),  # seconds of all its sequences
        ("slow", "f8"),  # times the curves
    ]
)
SEQUENCE = np.dtype([("end", "i8"), ("job", "i8")])
"""Of a decode worker a heap, by the step after which a sequence ends."""
ENDED = np.dtype([("at_s", "f8"), ("job", "i4"), ("leg", "i4")])
"""A leg that has ended: 0 prefill, 1 decode."""
NUM_PLACED, NUM_DUE, CHANCE, NUM_ENDED = 0, 1, 2, 3
"""Counters: requests that have left the line, jobs that are due, state of the generator, legs in the list of ends."""


class Speeds(NamedTuple):
    prompt_s: float
    token_s: float
    attention_s: float
    step_s: float
    sequence_s: float
    context_s: float
    transfer_s: float
    handoff_s: float
    num_layers: int
    pool_tokens: int
    max_batched_tokens: int
    max_running: int
