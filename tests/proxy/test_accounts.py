"""Fair shares where each process of a proxy has a queue of its own: virtual time, tables in real shared memory."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from pdlink_proxy.accounts import POLL_S, SILENT_S, SharedAccounts
from pdlink_proxy.family import Family, Place, make_tables
from pdlink_proxy.load_table import LoadTable, make
from pdlink_proxy.queue import Queue, Waiting
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from aiohttp import web

    from tests.proxy.fakes import Received

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}


@contextmanager
def queues(path: Path, number: int) -> Iterator[list[Queue]]:
    """Of so many processes."""
    make(path / "shares", number)
    with ExitStack() as stack:
        found = []
        for each in range(number):
            table = LoadTable(path / "shares", each, number)
            stack.callback(table.close)
            found.append(Queue(10_000, WEIGHTS, SharedAccounts(table)))
        yield found


class Fleet:
    """Workers with room for so many requests. A process looks for room when one of its requests ends, and every
    `POLL_S`; each takes 0.1 s on the average, and its client sends the next one when it ends."""

    def __init__(self, queues: Sequence[Queue], room: int, seed: int) -> None:
        self.queues, self.room, self.rng = queues, room, random.Random(seed)
        self.got: Counter[str] = Counter()
        """Tokens, by tenant."""
        self._running: list[tuple[float, int, int, str]] = []
        self._now = 0.0

    def comes(self, process: int, tenant: str) -> None:
        waiting = Waiting(tenant, "m", self.rng.randint(1, 2000), self._now)
        if self.queues[process].passes("m", self._now) and self.room:
            self._starts(process, waiting)
        else:
            assert self.queues[process].put(waiting)

    def runs(self, seconds: float) -> None:
        end_s, polls = self._now + seconds, self._now
        while self._now < end_s:
            if self._running and self._running[0][0] < polls:
                self._now, _, process, tenant = heapq.heappop(self._running)
                self.room += 1
                self.comes(process, tenant)
                self._look(process)  # who ends a request looks first
            else:
                self._now = polls = polls + POLL_S
                for process in self.rng.sample(range(len(self.queues)), len(self.queues)):
                    self._look(process)

    def _look(self, process: int) -> None:
        def take(waiting: Waiting) -> bool:
            if self.room:
                self._starts(process, waiting)
                return True
            return False

        while self.queues[process].serve(take, self._now):
            pass

    def _starts(self, process: int, waiting: Waiting) -> None:
        self.room -= 1
        self.got[waiting.tenant] += waiting.tokens
        took_s = self.rng.uniform(0.05, 0.15)
        heapq.heappush(self._running, (self._now + took_s, self.rng.randrange(2**40), process, waiting.tenant))


@pytest.mark.parametrize("seed", range(2))
def test_shares_are_fair_within_five_percent_over_all_processes(seed: int, tmp_path: Path) -> None:
    """Although one process has all requests of one tenant, and another one most of its own."""
    rng = random.Random(seed)
    with queues(tmp_path, 4) as processes:
        fleet = Fleet(processes, 24, seed)
        for _ in range(40):
            fleet.comes(0, "a")  # its requests end here, and others' only here and there
            fleet.comes(rng.randrange(1, 3), "b")
            fleet.comes(rng.choice((0, 1, 3)), "c")
        fleet.runs(2.0)
        fleet.got.clear()
        fleet.runs(8.0)
    for tenant, weight in WEIGHTS.items():
        due = weight / sum(WEIGHTS.values())
        assert fleet.got[tenant] / fleet.got.total() == pytest.approx(due, rel=0.05), f"seed {seed}: {fleet.got}"


def test_who_comes_waits_behind_those_of_other_processes(tmp_path: Path) -> None:
    with queues(tmp_path, 2) as (one, other):
        assert other.passes("m", 0.0)
        one.put(Waiting("a", "m", 100, 0.0))
        one.serve(lambda _: False, 1.0)
        assert not other.passes("m", 1.0)
        assert other.passes("another", 1.0)
        assert one.serve(lambda _: True, 1.1)
        assert other.passes("m", 1.2)


def test_a_process_that_says_nothing_more_is_not_waited_for(tmp_path: Path) -> None:
    with queues(tmp_path, 2) as (one, other):
        one.put(Waiting("a", "m", 100, 0.0))
        one.serve(lambda _: False, 1.0)
        for _ in range(50):
            other.put(Waiting("c", "m", 1000, 0.0))
        served = 0
        while other.serve(lambda _: True, 1.0):
            served += 1
        assert 0 < served < 10
        assert not other.serve(lambda _: True, 1.0 + SILENT_S)
        assert other.serve(lambda _: True, 1.1 + SILENT_S)


def test_a_process_that_begins_again_takes_over_no_accounts(tmp_path: Path) -> None:
    with queues(tmp_path, 2) as (one, other):
        one.put(Waiting("a", "m", 100, 0.0))
        one.serve(lambda _: False, 1.0)
        assert not other.passes("m", 1.0)
        again = LoadTable(tmp_path / "shares", 0, 2)
        assert other.passes("m", 1.1)
        again.close()


class Narrow(FakeWorker):
    """Has room for two requests at a time."""

    def __init__(self) -> None:
        super().__init__("decode")
        self.running = 0
        self.served: list[str] = []

    def health(self) -> dict[str, Any]:
        return {**super().health(), "free_blocks": 16 * (2 - self.running)}

    async def answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        self.running += 1
        try:
            await asyncio.sleep(0.005)
            self.served.append(received.headers["Authorization"])
            return await super().answer(request, received)
        finally:
            self.running -= 1


async def test_two_processes_share_a_full_worker_by_weights(prefill: FakeWorker, tmp_path: Path) -> None:
    """Each tenant reaches another process; whose request ends does not keep the room for its own."""
    num = 100

    async def keeps_asking(proxy: Proxy, tenant: str) -> None:
        body = {"model": "m", "prompt": "hello", "max_tokens": 200}
        while len(decode.served) < num:
            headers = {"Authorization": tenant}
            async with proxy.client.post(proxy.url + "/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                await response.read()

    decode = Narrow()
    await decode.start()
    make_tables(tmp_path, 2)
    more: dict[str, Any] = {"shares": {"a": 1, "b": 3}, "queue_timeout_s": 600, "no_worker_timeout_s": 600}
    families = [Family(Place(str(tmp_path), number, 2)) for number in range(2)]
    async with (
        proxy_of([prefill], [decode], family=families[0], **more) as one,
        proxy_of([prefill], [decode], family=families[1], **more) as other,
    ):
        asking = [(one, "Bearer a")] * 10 + [(other, "Bearer b")] * 10
        await asyncio.gather(*(keeps_asking(*each) for each in asking))
    await decode.stop()
    counted = Counter(decode.served[20:num])
    assert counted["Bearer b"] / counted.total() == pytest.approx(0.75, rel=0.15), counted
