"""What the compiled fleet (`fluid.py`) keeps of requests and workers: rows of arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

IDLE, PASS, PASSES = 0, 1, 2

JOB = np.dtype(
    [
        ("at_s", "f8"),
        ("began_s", "f8"),  # of its first pass
        ("prefilled_s", "f8"),
        ("done_s", "f8"),
        ("prompt", "i4"),
        ("answer", "i4"),
        ("new", "i4"),  # tokens that prefill computes
        ("left", "i4"),  # of those, not yet
        ("behind", "i4"),  # the next one in a line, or -1
        ("prefill", "i4"),
        ("decode", "i4"),
        ("admitted", "i4"),  # decode has its blocks
    ]
)
"""One line of the processor's cache: with a million of them in flight memory is what takes time."""
PREFILL = np.dtype(
    [
        ("head", "i8"),  # of its line
        ("tail", "i8"),
        ("state", "i8"),
        ("ending", "i8"),  # prompts that the running pass completes
        ("load", "i8"),  # tokens
        ("link_s", "f8"),  # when its link is free
        ("busy_s", "f8"),
    ]
)
DECODE = np.dtype(
    [
        ("room", "i8"),  # tokens
        ("load", "i8"),  # tokens of prompts and answers
        ("slots", "i8"),  # requests that have blocks
        ("head", "i8"),  # of the requests that wait for a slot
        ("tail", "i8"),
        ("num", "i8"),  # sequences that run
        ("tokens", "i8"),  # of KV that a step reads
        ("clock_s", "f8"),  # end of the last step that counts in `steps` and `tokens`
        ("steps", "i8"),
        ("busy_s", "f8"),
        ("sequence_s", "f8"),  # seconds of all its sequences
    ]
)
SEQUENCE = np.dtype([("end", "i8"), ("job", "i8")])
"""Of a decode worker a heap, by the step after which a sequence ends."""
NUM_PLACED, NUM_DUE, CHANCE = 0, 1, 2
"""Counters: requests that have left the line, jobs that are due, state of the generator."""


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
