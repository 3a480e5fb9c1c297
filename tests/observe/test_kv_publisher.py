"""Subscribers over real sockets: what they miss is replayed, and a new life of the publisher is one to them, too."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from pdlink.config import KVEventsConfig
from pdlink.errors import ConfigError
from pdlink.kv.hashing import Preimage
from pdlink.observe import kv_publisher
from pdlink.observe.kv_ledger import BlockPlace
from pdlink.observe.kv_publisher import KVPublisher

from .subscriber import WAIT_MS, AllBlocksCleared, BlockRemoved, BlockStored, Subscriber

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE = BlockPlace(2, "CPU")


@contextmanager
def published(buffer_steps: int = 100, endpoint: str = "tcp://127.0.0.1:*") -> Iterator[KVPublisher]:
    publisher = KVPublisher(endpoint, "tcp://127.0.0.1:*", topic="kv", buffer_steps=buffer_steps, incarnation="life")
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(publisher: KVPublisher) -> Iterator[Subscriber]:
    """Certainly: what is told from now on arrives."""
    subscriber = Subscriber(publisher.address, "kv")
    try:
        number = 0
        while not subscriber.sub.poll(20):
            number += 1
            publisher.stored(BlockPlace(1, "GPU"), b"%d" % number)
        yield subscriber
    finally:
        subscriber.close()


def keys(count: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(count)]


def cpu(subscriber: Subscriber) -> set[bytes | int]:
    return {block for medium, block in subscriber.known if medium == "CPU"}


def tell(publisher: KVPublisher, key: bytes) -> None:
    """In a batch of its own."""
    last = publisher._sequence
    publisher.stored(PLACE, key)
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while publisher._sequence == last:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_vllms_structs_read_what_is_published() -> None:
    first, second = keys(2)
    with published() as publisher, subscribed(publisher) as subscriber:
        publisher.stored(PLACE, first, Preimage(None, (5, 6)))
        publisher.stored(PLACE, second, Preimage(first, (7, 8)))
        stored: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        while sum(len(event.block_hashes) for event in stored if isinstance(event, BlockStored)) < 2:
            stored += [event for event in subscriber.hear().events if getattr(event, "medium", None) == "CPU"]
        assert stored[0] == BlockStored([first, second], None, [5, 6, 7, 8], 2, None, "CPU", None)
        publisher.removed(PLACE, second)
        batch = subscriber.hear()
        assert batch.events == [BlockRemoved([second], "CPU")]
        assert abs(batch.ts - time.time()) < 60
        assert batch.data_parallel_rank == 0


@pytest.mark.parametrize("buffer_steps", [100, 2], ids=["in the ring", "out of the ring"])
def test_a_subscriber_that_missed_some_is_told_what_is_there(buffer_steps: int) -> None:
    with published(buffer_steps) as publisher, subscribed(publisher) as subscriber:
        here = keys(8)
        tell(publisher, here[0])
        while here[0] not in cpu(subscriber):
            subscriber.hear()
        endpoint = publisher.endpoint
        subscriber.sub.disconnect(endpoint)
        publisher.removed(PLACE, here[0])
        for key in here[1:]:
            tell(publisher, key)
        before = subscriber.replays
        subscriber.sub.connect(endpoint)
        number = 0
        while not subscriber.sub.poll(20):
            number += 1
            publisher.stored(BlockPlace(1, "GPU"), b"again %d" % number)
        subscriber.hear()
        assert subscriber.replays == before + 1
        assert cpu(subscriber) == set(here[1:])


def test_a_restart_is_seen_by_who_stays_and_what_was_before_is_forgotten() -> None:
    with published() as publisher, subscribed(publisher) as subscriber:
        tell(publisher, keys(1)[0])
        while keys(1)[0] not in cpu(subscriber):
            subscriber.hear()
        endpoint, replay_endpoint = publisher.address.split(",")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_publisher.KVPublisher, "_publish", lambda *_: None)  # it is killed: no farewell
            publisher.close()
        again = KVPublisher(endpoint, replay_endpoint, topic="kv", buffer_steps=9, incarnation="next")
        try:
            number = 0
            while b"new 1" not in cpu(subscriber):
                number += 1
                again.stored(PLACE, b"new %d" % number)
                if subscriber.sub.poll(20):
                    subscriber.hear()
            again.stored(PLACE, b"last")
            while b"last" not in cpu(subscriber):
                subscriber.hear()
            assert cpu(subscriber) == {b"last", *(b"new %d" % one for one in range(1, number + 1))}
        finally:
            again.close()


def test_the_end_clears_everything() -> None:
    with published() as publisher, subscribed(publisher) as subscriber:
        tell(publisher, keys(1)[0])
        publisher.close()
        assert subscriber.hears(set())


def test_what_is_no_request_is_passed_over() -> None:
    with published() as publisher, subscribed(publisher) as subscriber:
        for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""], [bytes(8)]):
            subscriber.replay.send_multipart(frames)
        tell(publisher, keys(1)[0])
        subscriber.last = 0
        subscriber.ask()
        assert cpu(subscriber) == {keys(1)[0]}


def test_an_endpoint_that_is_taken_is_a_setting_that_is_wrong() -> None:
    with published() as publisher, pytest.raises(ConfigError, match=r"kv_events\.endpoint: got 'tcp.*in use"):
        KVPublisher(publisher.endpoint, None, topic="", buffer_steps=1, incarnation="")


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.1:5557", "tcp://[::]:5557"])
def test_token_ids_leave_the_host_only_where_that_is_written_out(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"kv_events\.endpoint: other hosts can reach"):
        KVEventsConfig(endpoint=endpoint)
    assert KVEventsConfig(endpoint=endpoint, insecure=True).endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["", "5557", "udp://h:1", "tcp://h", "tcp://:5", "tcp://h:x", "ipc://"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"expected tcp://HOST:PORT or ipc://PATH"):
        KVEventsConfig(endpoint=endpoint)
