"""A line of jobs: in order, and nobody waits for one that is not done any more."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from pdlink.store.line import Line

from .stubs import WAIT_S


def test_jobs_are_done_in_order_and_one_that_raises_costs_itself_only() -> None:
    line = Line("line")
    done: list[int] = []
    line.put(lambda: done.append(1))
    failed = line.submit(lambda: 1 // 0)
    line.put(lambda: done.append(2))
    assert line.submit(lambda: len(done)).result(WAIT_S) == 2
    assert isinstance(failed.exception(WAIT_S), ZeroDivisionError)
    line.close(WAIT_S)
    assert done == [1, 2]


def test_what_is_in_line_is_done_before_the_end_and_what_comes_later_is_refused() -> None:
    line, go_on = Line("line", 2), threading.Event()
    done: list[int] = []

    def job() -> None:
        go_on.wait(WAIT_S)
        done.append(1)

    for _ in range(4):
        line.put(job)
    line.end()
    late = line.submit(lambda: done.append(2))
    assert not line.put(lambda: done.append(3))
    with pytest.raises(CancelledError):
        late.result(WAIT_S)
    go_on.set()
    line.close(WAIT_S)
    assert done == [1] * 4
    line.close(0.0)


def test_waiting_for_a_line_that_has_ended_waits_for_what_was_in_it() -> None:
    line, go_on = Line("line"), threading.Event()
    done: list[int] = []

    def job() -> None:
        go_on.wait(WAIT_S)
        done.append(1)

    line.put(job)
    line.end()
    waiting = threading.Thread(target=line.wait)
    waiting.start()
    go_on.set()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert done == [1]


def test_what_a_closed_line_has_not_begun_in_time_is_not_done() -> None:
    """Else its thread would do it with what has been closed, while the process ends."""
    line, stuck, go_on, done = Line("line"), threading.Event(), threading.Event(), list[int]()

    def job() -> None:
        stuck.set()
        go_on.wait(WAIT_S)

    line.put(job)
    line.put(lambda: done.append(1))
    assert stuck.wait(WAIT_S)
    line.close(0.0)
    go_on.set()
    line.close(WAIT_S)
    assert not any(thread.is_alive() for thread in line._threads)
    assert done == []
