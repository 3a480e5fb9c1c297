"""A line of jobs: in order, by as many threads as make it faster; nobody waits for one that is not done any more."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import pytest

from pdlink.store.line import FIRST, MOST, Line, Width
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable


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


@pytest.mark.parametrize(("num_waiting", "woken"), [(1, 0), (3, 2), (9, 3)])
def test_no_more_threads_wake_than_jobs_wait(num_waiting: int, woken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ends a job takes the first of them."""
    line, begun, go_on = Line("line", 4), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    line.put(first, alone=True)
    assert begun.wait(WAIT_S)
    done = [line.submit(lambda: None) for _ in range(num_waiting)]
    told, right = list[int](), line._changed.notify

    def notify(n: int = 1) -> None:
        told.append(n)
        right(n)

    monkeypatch.setattr(line._changed, "notify", notify)
    go_on.set()
    for each in done:
        each.result(WAIT_S)
    line.close(WAIT_S)
    assert told[0] == woken


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


def settled(takes_s: Callable[[int], float], jobs: int = 2000, width: Width | None = None) -> list[int]:
    """The widths of a tier whose calls take so long where so many are under way, after each job."""
    width = width or Width(FIRST)
    widths, now_s = [], 0.0
    ends = [takes_s(width.now) for _ in range(width.now)]
    heapify(ends)
    for _ in range(jobs):
        now_s = heappop(ends)
        width.ended(now_s, waiting=100)
        widths.append(width.now)
        while len(ends) < width.now:
            heappush(ends, now_s + takes_s(width.now))
    return widths


def test_a_bucket_of_a_long_way_gets_all_threads_that_there_are() -> None:
    assert settled(lambda _: 0.03)[200:] == [MOST] * 1800


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_medium_that_does_so_many_at_once_gets_no_more_most_of_the_time(depth: int) -> None:
    widths = settled(lambda width: 0.001 * max(1.0, width / depth))
    most_often = max(set(widths), key=widths.count)
    assert most_often == max(FIRST, depth)
    assert widths.count(most_often) > 0.8 * len(widths)


def test_a_medium_that_becomes_slower_to_answer_gets_more_threads_later() -> None:
    width = Width(FIRST)
    assert settled(lambda one: 0.001 * max(1.0, one / FIRST), 1000, width)[-1] == FIRST
    assert settled(lambda _: 0.03, 2000, width)[-1] == MOST


def test_what_has_too_little_to_do_says_nothing() -> None:
    width = Width(FIRST)
    for number in range(1000):
        width.ended(float(number), waiting=0)
    assert width.now == FIRST


def test_a_line_has_as_many_threads_as_its_width() -> None:
    width, at_once = Width(FIRST), threading.Semaphore(0)
    line, go_on = Line("line", FIRST, width), threading.Event()

    def job() -> None:
        at_once.release()
        go_on.wait(WAIT_S)

    width.now = 8
    for _ in range(40):
        line.put(job)
    for _ in range(FIRST):
        assert at_once.acquire(timeout=WAIT_S)
    go_on.set()
    line.wait()
    assert FIRST < len(line._threads) <= MOST
    line.close(WAIT_S)
    assert not any(thread.is_alive() for thread in line._threads)


def test_a_job_that_is_done_alone_begins_after_all_before_it_and_ends_before_all_behind() -> None:
    width = Width(FIRST)
    width.now = 4
    line, done = Line("line", 4, width), list[str]()
    first, go_on = threading.Barrier(3), threading.Event()

    def before() -> None:
        first.wait(WAIT_S)
        done.append("before")

    line.put(before)
    line.put(before)
    line.put(lambda: done.append("alone"), alone=True)
    line.put(lambda: done.append("behind"))
    line.put(go_on.set)
    assert not done
    first.wait(WAIT_S)
    assert go_on.wait(WAIT_S)
    line.close(WAIT_S)
    assert done == ["before", "before", "alone", "behind"]
