"""What happens next in a simulated fleet: one time for each worker, and one for each transfer under way.

Two heaps of plain arrays, for compiled code. A worker's time may change; it stays where it is in `order`, so that
nothing outdated is ever in the heap. Functions take arrays one by one: compiled code counts references to each
array of a tuple anew in every call, which took ten times as long as the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pdlink.compiled import compiled

NEXT = np.dtype([("at_s", "f8"), ("worker", "i8")])
"""When a worker is next; infinite for never."""
DUE = np.dtype([("at_s", "f8"), ("job", "i8")])
"""A heap, as far as jobs are due."""


def make_agenda(num_workers: int) -> tuple[Any, Any]:
    """Where each worker is in the order, int64 [worker], and the order, a heap of `NEXT`: nobody is ever next."""
    order = np.zeros(num_workers, NEXT)
    order["at_s"], order["worker"] = np.inf, np.arange(num_workers)
    return np.arange(num_workers), order


@compiled
def set_worker(places: Any, order: Any, worker: int, at_s: float) -> None:
    """It is next at this time."""
    at = places[worker]
    while at > 0:
        above = (at - 1) // 2
        if order[above].at_s <= at_s:
            break
        order[at].at_s, order[at].worker = order[above].at_s, order[above].worker
        places[order[at].worker] = at
        at = above
    num = len(order)
    while True:
        below = 2 * at + 1
        if below >= num:
            break
        if below + 1 < num and order[below + 1].at_s < order[below].at_s:
            below += 1
        if order[below].at_s >= at_s:
            break
        order[at].at_s, order[at].worker = order[below].at_s, order[below].worker
        places[order[at].worker] = at
        at = below
    order[at].at_s, order[at].worker = at_s, worker
    places[worker] = at


@compiled
def add_job(due: Any, num: int, job: int, at_s: float) -> None:
    """num: of those in the heap so far."""
    at = num
    while at > 0:
        above = (at - 1) // 2
        if due[above].at_s <= at_s:
            break
        due[at].at_s, due[at].job = due[above].at_s, due[above].job
        at = above
    due[at].at_s, due[at].job = at_s, job


@compiled
def take_job(due: Any, num: int) -> int:
    """The first one, of at least one. num: of those in the heap so far."""
    first: int = due[0].job
    key, job = due[num - 1].at_s, due[num - 1].job
    at = 0
    while True:
        below = 2 * at + 1
        if below >= num - 1:
            break
        if below + 1 < num - 1 and due[below + 1].at_s < due[below].at_s:
            below += 1
        if due[below].at_s >= key:
            break
        due[at].at_s, due[at].job = due[below].at_s, due[below].job
        at = below
    due[at].at_s, due[at].job = key, job
    return first
