"""The loop as it is used: in a thread of its own, woken from others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from pdlink.engine import engine
from pdlink.errors import EngineFailure, Overloaded, RequestAborted
from tests.engine.small import BLOCK, Rig, oracle, prompt_of, rig
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Ends:
    """Counts ends and lets a test wait for them."""

    def __init__(self, worker: Rig) -> None:
        self._changed = threading.Condition()
        self._num = 0
        worker.heard.on_ended = self._on_ended

    def _on_ended(self, request_id: str) -> None:
        with self._changed:
            self._num += 1
            self._changed.notify_all()

    def wait(self, num: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num >= num, WAIT_S), f"{self._num} of {num} ended"


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rig, _Ends, threading.Thread]]:
    monkeypatch.setattr(engine, "_IDLE_WAIT_S", 3 * WAIT_S)  # only a wake-up makes the loop look again
    worker = rig(share_prefixes=True)
    ends = _Ends(worker)
    thread = threading.Thread(target=worker.engine.run)
    thread.start()
    yield worker, ends, thread
    worker.engine.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_requests_from_many_threads_are_answered(running: tuple[Rig, _Ends, threading.Thread]) -> None:
    worker, ends, _ = running

    def client(number: int) -> None:
        for turn in range(3):
            worker.submit(f"{number}.{turn}", prompt_of(10 + number), 5)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(WAIT_S)
    ends.wait(12)
    for number in range(4):
        for turn in range(3):
            assert worker.heard.tokens(f"{number}.{turn}") == oracle(prompt_of(10 + number), 5)
    assert worker.pool.num_held == 0


def test_waking_lets_a_blocked_request_in(
    running: tuple[Rig, _Ends, threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, ends, _ = running
    others = worker.pool.take(worker.pool.num_blocks)
    attempts = threading.Semaphore(0)
    take = worker.pool.take

    def counted(n: int) -> list[int]:
        attempts.release()
        return take(n)

    monkeypatch.setattr(worker.pool, "take", counted)
    worker.submit("r", prompt_of(BLOCK), 2)
    # One attempt in the step that takes the request in, one in the step that finds nothing to do, and a third if the
    # loop was awake when submit woke it. Then it sleeps, and nothing but `wake` can help.
    for _ in range(2):
        assert attempts.acquire(timeout=WAIT_S)
    attempts.acquire(timeout=0.2)
    worker.pool.give_back(others)
    worker.engine.wake()
    ends.wait(1)
    assert worker.heard.tokens("r") == oracle(prompt_of(BLOCK), 2)


def test_stopping_ends_what_is_left_and_refuses_what_comes(running: tuple[Rig, _Ends, threading.Thread]) -> None:
    worker, ends, thread = running
    worker.submit("waits for ever", prompt_of(9), 5, external=9)
    worker.engine.stop()
    thread.join(WAIT_S)
    assert isinstance(worker.heard.errors["waits for ever"], RequestAborted)
    assert worker.pool.num_held == 0
    with pytest.raises(Overloaded, match="stopping"):
        worker.submit("late", prompt_of(3))


def test_a_loop_that_dies_leaves_no_client_waiting() -> None:
    worker = rig()

    def output(_: object) -> None:
        raise KeyError("a mistake of ours")

    worker.heard.output = output  # type: ignore[method-assign,assignment]
    for name in "ab":
        worker.submit(name, prompt_of(4))
    with pytest.raises(KeyError):
        worker.engine.run()
    assert {type(error) for error in worker.heard.errors.values()} == {EngineFailure}
    assert worker.heard.errors.keys() == {"a", "b"}


def test_threads_of_torch_are_set_in_the_loops_thread_only() -> None:
    worker = rig(threads=3)
    seen: list[int] = []

    def on_ended(_: str) -> None:
        seen.append(torch.get_num_threads())
        worker.engine.stop()

    worker.heard.on_ended = on_ended
    worker.submit("r", prompt_of(3), 1)
    thread = threading.Thread(target=worker.engine.run)
    thread.start()
    thread.join(WAIT_S)
    assert (seen, torch.get_num_threads()) == ([3], 1)
