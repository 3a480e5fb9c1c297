"""Listening to a worker's KV events over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import zmq
import zmq.asyncio

from pdlink.kv.hashing import Preimage
from pdlink.observe.kv_ledger import BlockPlace
from pdlink.observe.kv_publisher import KVPublisher
from pdlink_proxy.fleet import PlacementRequest
from pdlink_proxy.kv_events import SILENT_S, KVEvents, _Awaited
from pdlink_proxy.kv_index import LOADING
from pdlink_proxy.table import WorkerState
from tests.proxy.fakes import until
from tests.proxy.test_kv_index import apply, batch, stored
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_END = (-1).to_bytes(8, "big", signed=True)


class FakePublisher:
    """As vLLM 0.32 publishes; `keeps` batches for those who ask again. A lost batch is one that is not `sent`."""

    def __init__(self) -> None:
        context = zmq.asyncio.Context.instance()
        self._pub, self._router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self.keeps: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.topic = True

    async def subscribed(self) -> None:
        assert (await self._pub.recv())[:1] == b"\x01"

    async def publish(self, number: int, data: bytes, *, sent: bool = True) -> None:
        self.keeps.append((number, data))
        if sent:
            await self._pub.send_multipart((b"kv", number.to_bytes(8, "big"), data))

    async def answer(self) -> None:
        while True:
            name, _, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            topic = (b"kv",) if self.topic else ()
            for number, data in self.keeps:
                if number >= self.asked[-1]:
                    await self._router.send_multipart((name, b"", *topic, number.to_bytes(8, "big"), data))
            await self._router.send_multipart((name, b"", *topic, _END, b""))

    def close(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[FakePublisher]:
    made = FakePublisher()
    answering = asyncio.create_task(made.answer())
    yield made
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answering
    made.close()


def shares(events: KVEvents, request: PlacementRequest) -> list[tuple[int, int, float]]:
    """By number of a worker, tokens and what they cost."""
    held = events.held(request, "m")
    return held.shares if held is not None else []


async def has(events: KVEvents, tokens: int) -> None:
    """Wait until the worker is known to have so much of the prompt 1 2 3 4."""
    request, index, changed = PlacementRequest("m", 4, prompt=b"[1,2,3,4]"), events.index, asyncio.Event()

    def then_set(change: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*args: object) -> object:
            found = change(*args)
            changed.set()
            return found

        return changing

    with mock.patch.multiple(index, apply=then_set(index.apply), forget=then_set(index.forget)):
        async with asyncio.timeout(WAIT_S):
            while sum(held for _, held, _ in shares(events, request)) != tokens:
                changed.clear()
                await changed.wait()


FIRST, SECOND = batch(stored([1], None, [1, 2])), batch(stored([2], 1, [3, 4]))


@pytest.mark.parametrize("topic", [True, False])
async def test_what_was_published_before_anybody_listened_is_asked_for(publisher: FakePublisher, topic: bool) -> None:
    publisher.topic = topic
    await publisher.publish(0, FIRST)
    await publisher.publish(1, SECOND)
    events, work = KVEvents(), WorkerState("http://w#1")
    events.heard("http://w", work, "m", [f"{publisher.endpoint},{publisher.replay}"])
    assert not work.publishes, "nothing has come"
    await has(events, 4)
    await until(lambda: work.publishes)
    events.close()


async def test_nothing_is_asked_for_again_while_no_batch_is_missed(publisher: FakePublisher) -> None:
    events = KVEvents()
    events.heard("http://w", WorkerState("http://w#1"), "m", [f"{publisher.endpoint}, {publisher.replay}"])
    await publisher.subscribed()
    for number, data in enumerate((FIRST, SECOND)):
        await publisher.publish(number, data)
        await has(events, 2 + 2 * number)
    assert publisher.asked == [0], "what was published before anybody listened"
    events.close()


async def test_missed_batches_are_asked_for_again(publisher: FakePublisher) -> None:
    events = KVEvents()
    events.heard("http://w", WorkerState("http://w#1"), "m", [f"{publisher.endpoint}, {publisher.replay}"])
    await publisher.subscribed()
    await publisher.publish(0, FIRST, sent=False)
    await publisher.publish(1, SECOND)
    await has(events, 4)
    assert publisher.asked[-1] == 0
    events.close()


async def test_what_is_known_is_dropped_when_missed_batches_are_gone(publisher: FakePublisher) -> None:
    events = KVEvents()
    events.heard("http://w", WorkerState("http://w#1"), "m", [publisher.endpoint])
    await publisher.subscribed()
    await publisher.publish(0, FIRST)
    await has(events, 2)
    await publisher.publish(2, batch(stored([9], None, [9, 9])))
    await has(events, 0)
    await publisher.publish(3, FIRST)
    await has(events, 2)
    await publisher.publish(4, b"nonsense")
    await has(events, 0)
    events.close()


async def test_a_publisher_that_begins_anew_has_nothing(publisher: FakePublisher) -> None:
    events = KVEvents()
    events.heard("http://w", WorkerState("http://w#1"), "m", [publisher.endpoint])
    await publisher.subscribed()
    await publisher.publish(0, FIRST)
    await publisher.publish(1, SECOND)
    await has(events, 4)
    await publisher.publish(0, FIRST)
    await has(events, 2)
    events.close()


async def test_what_a_former_incarnation_had_is_forgotten(publisher: FakePublisher) -> None:
    await publisher.publish(0, FIRST)
    events = KVEvents()
    events.follow({"http://w": [f"{publisher.endpoint},{publisher.replay}"]})
    events.heard("http://w", WorkerState("http://w#1"), "m", [])
    await has(events, 2)
    publisher.keeps.clear()
    events.heard("http://w", WorkerState("http://w#2"), "m", [])
    await has(events, 0)
    await publisher.subscribed()
    events.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_what_our_own_workers_publish_is_understood(host: str) -> None:
    ours = KVPublisher(f"tcp://{host}:0", f"tcp://{host}:0", topic="", buffer_steps=2, incarnation="1")
    try:
        place, events = BlockPlace(2, "CPU"), KVEvents()
        ours.stored(place, b"a" * 32, Preimage(None, (1, 2)))
        events.heard("http://w", WorkerState("http://w#1"), "m", [ours.address])
        await has(events, 2)
        ours.stored(place, b"b" * 32, Preimage(b"a" * 32, (3, 4)))
        await has(events, 4)
        ours.removed(place, b"b" * 32)
        await has(events, 2)
        events.close()
    finally:
        ours.close()


@pytest.mark.parametrize(("host", "every"), [("127.0.0.9", "0.0.0.0"), ("127.0.0.9", "*"), ("[::1]", "[::]")])
async def test_events_of_a_worker_on_all_addresses_come_from_its_host(host: str, every: str) -> None:
    ours = KVPublisher(f"tcp://{host}:0", f"tcp://{host}:0", topic="", buffer_steps=2, incarnation="1")
    try:
        events = KVEvents()
        ours.stored(BlockPlace(2, "CPU"), b"a" * 32, Preimage(None, (1, 2)))
        said = ours.address.replace(host, every)
        events.heard(f"http://{host}:80", WorkerState(f"http://{host}:80#1"), "m", [said])
        await has(events, 2)
        events.close()
    finally:
        ours.close()


async def test_a_worker_on_both_sides_is_listened_to_once(publisher: FakePublisher) -> None:
    await publisher.publish(0, FIRST)
    events, said = KVEvents(), [f"{publisher.endpoint},{publisher.replay}"]
    prefill, decode = WorkerState("http://w#1"), WorkerState("http://w#1")
    events.heard("http://w", prefill, "m", said)
    await has(events, 2)
    for _ in range(3):
        events.heard("http://w", decode, "m", said)
        events.heard("http://w", prefill, "m", said)
    await asyncio.sleep(0)
    assert (prefill.publishes, decode.publishes, len(events.index)) == (True, True, 1)
    assert publisher.asked == [0]
    events.close()


async def test_a_worker_that_publishes_elsewhere_from_now_on_is_listened_to_there(publisher: FakePublisher) -> None:
    await publisher.publish(0, FIRST)
    events, work = KVEvents(), WorkerState("http://w#1")
    events.heard("http://w", work, "m", ["tcp://127.0.0.1:1"])
    events.heard("http://w", work, "m", [f"{publisher.endpoint},{publisher.replay}"])
    await has(events, 2)
    events.heard("http://w", work, "m", [])
    await has(events, 0)
    assert not work.publishes
    events.close()


async def test_a_worker_whose_events_never_come_is_told_of_until_they_do(
    publisher: FakePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    events, work = KVEvents(), WorkerState("http://w#1")
    events.heard("http://w", work, "m", [publisher.endpoint])
    events.look(1e6)
    events.sent("http://w", 1e6)
    events.sent("http://w", 1e6 + SILENT_S - 1)
    events.look(1e6 + SILENT_S - 1)
    work.sent(1, 0.0)
    events.look(1e6 + SILENT_S)
    assert not caplog.records, "it still computes"
    work.finished(1, 1.0, served=True)
    for _ in range(3):
        events.look(1e6 + SILENT_S)
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert publisher.endpoint in told.getMessage()
    assert publisher.endpoint in work.silence
    assert not work.publishes, "so all that is sent to it is noted"
    await publisher.subscribed()
    await publisher.publish(0, FIRST)
    await has(events, 2)
    await until(lambda: work.publishes)
    assert work.silence == ""
    assert caplog.records[-1].levelname == "WARNING"
    events.close()


async def test_a_worker_whose_events_stop_is_told_of_and_believed_no_more(
    publisher: FakePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    events, work = KVEvents(), WorkerState("http://w#1")
    events.heard("http://w", work, "m", [publisher.endpoint])
    await publisher.subscribed()
    await publisher.publish(0, FIRST)
    await until(lambda: work.publishes)
    events.sent("http://w", 1e6)
    events.look(1e6 + SILENT_S)
    assert not work.publishes
    assert len(events.index) == 0
    events.heard("http://w", work, "m", [publisher.endpoint])
    assert (work.publishes, bool(work.silence)) == (False, True)
    assert "WARNING" in [record.levelname for record in caplog.records]
    events.close()


async def test_events_that_are_malformed_are_told_of_once(
    publisher: FakePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    events, work = KVEvents(), WorkerState("http://w#1")
    events.heard("http://w", work, "m", [publisher.endpoint])
    await publisher.subscribed()
    for number in range(3):
        await publisher.publish(number, b"\xc1")
    await publisher.publish(3, FIRST)
    await has(events, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    events.close()


async def test_kv_below_the_device_costs_what_bringing_it_up_does(publisher: FakePublisher) -> None:
    """A worker's own, and that of a store which others use, too."""
    events, prompt = KVEvents(), PlacementRequest("m", 8, prompt=b"[1,2,3,4,5,6,7,8]")
    own, other = WorkerState("http://w#1"), WorkerState("http://v#1")
    events.heard("http://w", own, "m", [publisher.endpoint, "tcp://127.0.0.1:1"])
    events.heard("http://v", other, "m", ["tcp://127.0.0.1:1"])
    of_own, of_store = (each.listener.publisher for each in events._listening.values())
    index = events.index
    chain = stored([1], None, [1, 2]), stored([2], 1, [3, 4], medium="CPU"), stored([3], 2, [5, 6], medium="STORAGE")
    apply(index, of_own, "m", batch(*chain))
    device, host, disk, shared = LOADING
    assert device < host < shared < disk < 1
    ((number, tokens, loading),) = shares(events, prompt)
    assert (number, tokens) == (own.number, 6)
    assert loading == pytest.approx(2 * host + 2 * disk)
    whole = stored([1, 2, 3, 4], None, [1, 2, 3, 4, 5, 6, 7, 8], medium="CPU")
    apply(index, of_store, "m", batch(whole))
    of_both = shares(events, prompt)
    assert [(number, tokens) for number, tokens, _ in of_both] == [(own.number, 8), (other.number, 8)]
    assert [loading for *_, loading in of_both] == pytest.approx([2 * host + 2 * disk + 2 * shared, 8 * shared])
    events.close()


@pytest.mark.parametrize("said", ["nonsense", "tcp://nowhere", "tcp://127.0.0.1:1,tcp://", "inproc://x,", "", "\0"])
async def test_a_place_where_nobody_can_publish_is_told_once_and_not_believed(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    events, work = KVEvents(), WorkerState("http://w#1")
    for _ in range(3):
        events.heard("http://w", work, "m", [said])
        await asyncio.sleep(0)
    assert not work.publishes
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "kv_events" in caplog.text
    events.close()


async def test_an_endpoint_that_zeromq_refuses_is_told(caplog: pytest.LogCaptureFixture) -> None:
    events = KVEvents()
    events.heard("http://w", WorkerState("http://w#1"), "m", ["ipc:///" + "x" * 200])
    ((_, task, _),) = events._listening.values()
    await asyncio.wait_for(task, WAIT_S)
    assert ["kv_events" in record.getMessage() for record in caplog.records] == [True]
    events.close()


async def test_other_requests_go_on_while_many_events_are_read() -> None:
    ours = KVPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="", buffer_steps=2, incarnation="1")
    try:
        events, applied, most = KVEvents(), 0, 0
        for number in range(1, 60_001):  # each of a prompt of its own: an event each, all in one batch
            ours.stored(BlockPlace(2, "CPU"), number.to_bytes(32, "big"), Preimage(None, (number, number)))
        await until(lambda: not ours._ledger.has_news, "all to be told")
        events.heard("http://w", WorkerState("http://w#1"), "m", [ours.address])
        async with asyncio.timeout(WAIT_S):
            while applied < 60_000:
                await asyncio.sleep(0)
                most, applied = max(most, len(events.index) - applied), len(events.index)
        assert most < 30_000
        events.close()
    finally:
        ours.close()


async def test_news_for_a_listener_that_is_elsewhere_wakes_the_loop_once() -> None:
    """It asks for missed batches, say, which takes seconds where nobody answers."""
    context = zmq.Context()
    with context.socket(zmq.PUSH) as far, context.socket(zmq.PULL) as near, _Awaited(near) as awaited:
        far.connect(f"tcp://127.0.0.1:{near.bind_to_random_port('tcp://127.0.0.1')}")
        far.send(b"first")
        assert await awaited.frames() == [b"first"]
        with pytest.raises(zmq.Again):
            near.recv(zmq.NOBLOCK)
        with mock.patch.object(awaited, "_news", mock.Mock(wraps=awaited._news)) as news:
            far.send(b"second")
            await until(lambda: news.set.called, "it is told")
            for _ in range(1000):
                await asyncio.sleep(0)
            assert news.set.call_count < 100
        assert await awaited.frames() == [b"second"]
    context.term()
