"""Questions between two stores in this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial

import pytest

from pdlink.peers.messages import MAX_KEYS, PeerAnswer, PeerAsk, Pull
from pdlink.peers.questions import Questions
from tests.waiting import WAIT_S

NUM_ASKS, NUM_PULLS = 120, 120
"""16 MiB of keys: more than the sockets of a connection on loopback take."""
KEYS = tuple(b"%032d" % number for number in range(MAX_KEYS))


class Busy:
    """A store whose thread does not read until it is let go."""

    def __init__(self) -> None:
        self.go_on, self.pulled = threading.Event(), threading.Semaphore(0)
        self.pulls: list[str] = []

    def answer(self, ask: PeerAsk) -> PeerAnswer:
        assert self.go_on.wait(WAIT_S)
        return PeerAnswer(ask.number, bytes(len(ask.keys)), 1)

    def pull(self, pull: Pull) -> None:
        self.pulls.append(pull.transfer_id)
        self.pulled.release()


def test_all_that_a_busy_store_is_asked_reaches_it_in_order(ends: ExitStack) -> None:
    busy = Busy()
    asked = Questions("asked", busy.answer, busy.pull)
    asks = Questions("asks", busy.answer, busy.pull)
    for questions in (asked, asks):
        ends.callback(questions.close)
    address = f"tcp://127.0.0.1:{asked.open('127.0.0.1', 0, None)}"
    asks.open("127.0.0.1", 0, None)
    pool = ends.enter_context(ThreadPoolExecutor(NUM_ASKS))
    answers = [pool.submit(asks.ask, address, KEYS, WAIT_S) for _ in range(NUM_ASKS)]
    ends.callback(busy.go_on.set)
    names = [f"record-{number}" for number in range(NUM_PULLS)]
    for name in names:
        asks.tell(address, Pull(KEYS[0], name, 1), fail)
    busy.go_on.set()
    assert [len(answer.result(WAIT_S).held) for answer in answers] == [MAX_KEYS] * NUM_ASKS
    for _ in names:
        assert busy.pulled.acquire(timeout=WAIT_S), f"{len(busy.pulls)} of {len(names)} pulls came"
    assert busy.pulls == names


def fail(why: str) -> None:
    raise AssertionError(why)


def filled(ends: ExitStack, busy: Busy) -> tuple[Questions, str, list[Future[PeerAnswer]]]:
    """Who has asked a store that does not read more than the connection takes; its address, and the answers."""
    asked, asks = Questions("asked", busy.answer, busy.pull), Questions("asks", busy.answer, busy.pull)
    for questions in (asked, asks):
        ends.callback(questions.close)
    ends.callback(busy.go_on.set)
    address = f"tcp://127.0.0.1:{asked.open('127.0.0.1', 0, None)}"
    asks.open("127.0.0.1", 0, None)
    answers = [Future[PeerAnswer]() for _ in range(NUM_ASKS)]
    for number, answer in enumerate(answers):
        asks._work.call(partial(asks._ask, address, PeerAsk(number, KEYS), answer))
    return asks, address, answers


def test_what_a_store_that_does_not_read_does_not_take_fails_at_once_and_is_told(
    ends: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink.peers.questions._MAX_WAITING", 8)
    asks, address, answers = filled(ends, Busy())
    failures, passed, why = list[str](), threading.Semaphore(0), "it does not read: 8 messages wait for it"
    failed = next(as_completed(answers, WAIT_S))
    assert str(failed.exception()) == f"{address}: {why}"
    for number in range(NUM_ASKS, 2000):  # the sockets of the connection take what waits, up to some MiB
        asks._work.call(partial(asks._ask, address, PeerAsk(number, KEYS), Future[PeerAnswer]()))
        asks.tell(address, Pull(KEYS[0], f"record-{number}", 1), failures.append)
        asks._work.call(passed.release)
        assert passed.acquire(timeout=WAIT_S)
        if len(failures) == 20:
            break
    assert failures == [why] * 20
    told = [record.getMessage() for record in caplog.records if record.name == "pdlink.peers.questions"]
    assert set(told) == {f"{address} does not read: 8 messages wait for it, others fail"}
    assert len(told) < len(failures), "once, and again only when all that waited was taken meanwhile"


def test_frames_that_wait_fail_with_their_connection(ends: ExitStack) -> None:
    asks, address, _ = filled(ends, Busy())
    failures = list[str]()
    asks.tell(address, Pull(KEYS[0], "waits", 1), failures.append)
    asks.close()
    assert failures == ["this store is closed"]
