"""Processes of this host that end are started again, later after each failure, and never at another one's cost."""

from __future__ import annotations

import logging
from typing import ClassVar

import pytest

from pdlink.fleet.child import ChildFailed, how_it_ended
from pdlink.fleet.post import MAX_DELAY_S, STEADY_S, Post, delay_s

START_S = 120.0


class Process:
    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


class Child:
    """A child whose starts end as `starts` says: ready, failed, pending, or no process at all."""

    label, role, doing = "decode-0", "decode", "loading"
    warnings: tuple[str, ...] = ()
    facts: ClassVar[dict[str, str]] = {"url": "http://a"}

    def __init__(self) -> None:
        self.process = Process()
        self.starts: list[str] = []
        self.began_s: list[float] = []
        self.now_s = 0.0
        self.killed = 0

    def again(self) -> None:
        self.began_s.append(self.now_s)
        self.process = Process()
        if self.starts and self.starts[0] == "no process":
            self.starts.pop(0)
            raise BlockingIOError(11, "Resource temporarily unavailable")

    def look(self) -> bool:
        if not self.starts:
            return True
        match self.starts[0]:
            case "pending":
                return False
            case "failed":
                self.starts.pop(0)
                raise ChildFailed("decode-0: port: cannot bind")
            case _:
                return True

    def kill(self) -> None:
        self.killed += 1

    def close(self) -> None:
        pass

    def dies(self, status: int = -9) -> None:
        self.process.returncode = status


def kept(child: Child, max_failures: int | None = None) -> Post:
    """It is ready."""
    post = Post(
        "decode-0",
        "decode",
        lambda: child,  # type: ignore[arg-type, return-value]
        start_timeout_s=START_S,
        max_failures=max_failures,
        clock=lambda: child.now_s,
    )
    starts, child.starts = child.starts, []
    for _ in range(2):
        post.look()
    assert post.ready
    child.starts = starts
    return post


def run(child: Child, keeper: Post, seconds: float) -> None:
    """Look after it four times a second."""
    until_s = child.now_s + seconds
    while child.now_s < until_s:
        child.now_s += 0.25
        keeper.look()


def test_a_process_that_served_for_long_is_started_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    child = Child()
    keeper = kept(child)
    run(child, keeper, STEADY_S)
    child.dies()
    run(child, keeper, 1)
    assert child.began_s == [STEADY_S + 0.5]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2, "its return is told as its loss"
    assert "decode-0 was killed by SIGKILL; starting it again on the same ports now" in caplog.text
    assert "decode-0 is back after " in caplog.text


def test_a_process_that_cannot_start_is_tried_again_later_and_later(caplog: pytest.LogCaptureFixture) -> None:
    child = Child()
    child.starts = ["failed", "no process", *["failed"] * 8]
    keeper = kept(child)
    run(child, keeper, STEADY_S)
    child.dies(1)
    run(child, keeper, 300)
    gaps = [later - sooner for sooner, later in zip(child.began_s, child.began_s[1:], strict=False)]
    assert len(child.began_s) == 11, "it came up in the end"
    assert gaps == sorted(gaps)
    assert gaps[0] <= 1.0
    assert max(gaps) <= MAX_DELAY_S + 1
    assert child.killed == 10
    assert "could not be started again (decode-0: port: cannot bind); starting it again" in caplog.text
    assert caplog.text.count("is back after") == 1


def test_failures_in_a_row_make_pauses_that_grow_and_a_steady_process_ends_them() -> None:
    child = Child()
    keeper = kept(child)
    pauses_s = []
    for _ in range(4):
        child.dies()
        run(child, keeper, 0.25)
        lost_s, lives = child.now_s, len(child.began_s)
        while len(child.began_s) == lives:
            run(child, keeper, 0.25)
        pauses_s.append(child.began_s[-1] - lost_s)
        run(child, keeper, 0.25)
        assert keeper.ready
    assert pauses_s == [0.5, 1.0, 2.0, 4.0]
    run(child, keeper, STEADY_S)
    assert keeper.num_failures == 0


def test_a_start_that_takes_for_ever_is_a_failure() -> None:
    child = Child()
    child.starts = ["pending"]
    keeper = kept(child)
    run(child, keeper, STEADY_S)
    child.dies()
    run(child, keeper, START_S)
    assert len(child.began_s) == 1
    killed = child.killed
    run(child, keeper, 3)
    assert child.killed == killed + 1
    assert len(child.began_s) == 2


def test_only_who_is_told_so_gives_up() -> None:
    child = Child()
    child.starts = ["failed"] * 3
    keeper = kept(child, max_failures=3)
    run(child, keeper, STEADY_S)
    child.dies()
    with pytest.raises(ChildFailed, match=r"decode-0 could not be started again .*: failure 3 in a row"):
        run(child, keeper, 60)


def test_delays_grow_to_a_bound_and_ends_are_said_in_words() -> None:
    assert [delay_s(n) for n in (0, 1, 2, 3)] == [0.0, 0.5, 1.0, 2.0]
    assert delay_s(10_000) == MAX_DELAY_S
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-250) == "was killed by signal 250"
    assert how_it_ended(3) == "ended with status 3"
