"""`KVPublisher`: tells subscribers over ZeroMQ which blocks are kept where, as vLLM's engines do.

PUB: (topic, sequence, batch). ROUTER: a subscriber that missed some sends the first sequence it lacks and gets
(topic, sequence, batch) for each from there on, then sequence -1. What is no longer in the ring is answered by one
batch that clears everything and says what is there, under the sequence of the last batch. Sequences are 8 bytes, big
endian.

A life of the publisher begins its sequence at the microseconds of the clock, with `AllBlocksCleared`: a subscriber
that outlives it sees a gap, asks, and is told what there is now. It publishes less than a batch per microsecond, so
the next life begins higher.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdlink import threads, zmq_context
from pdlink.errors import ConfigError
from pdlink.observe.kv_ledger import AllBlocksCleared, Event, EventBatch, Ledger, events_of
from pdlink.zmq_context import take_ipv6

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.hashing import Preimage
    from pdlink.observe.kv_ledger import BlockPlace

log = logging.getLogger(__name__)

SEQUENCE_NBYTES = 8
END = (-1).to_bytes(SEQUENCE_NBYTES, "big", signed=True)
"""Instead of a sequence: nothing more is replayed."""

BUFFER_STEPS = 10_000
"""Batches that can be replayed, as of vLLM."""
_HWM = 100_000
"""Batches that may wait for one subscriber, as of vLLM; one that reads more slowly misses some."""
_LINGER_S = 0.005
"""From the first change until a batch leaves: what changes meanwhile goes with it, and the engine is left alone."""
_MAX_BLOCKS = 1000
"""In one batch, about 100 KiB."""
_CLOSE_MS = 200
"""For what subscribers have not read at the end."""
_MAX_REQUEST_NBYTES = 1024
"""Of a replay request or a subscription."""


class KVPublisher:
    """`stored` and `removed` cost a lock and two dictionary entries, in any thread; the rest is done in its own."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        topic: str,
        incarnation: str,
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        """Bind and begin. buffer_steps: batches that can be replayed.

        Raises ConfigError for an endpoint that cannot be bound.
        """
        self._topic, self._incarnation = topic.encode(), incarnation
        self._lock = threading.Lock()
        self._ledger = Ledger()
        """Guarded by `_lock`."""
        self._rung = False
        """Whether the thread knows of changes; `_lock` guards it."""
        self._closing = threading.Event()
        self._sequence = time.time_ns() // 1000
        """Of the next batch."""
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, _HWM)
            self.endpoint = _bind(self._pub, "endpoint", endpoint)
            self._replay = self._socket(zmq.ROUTER, buffer_steps + 1)
            self.replay_endpoint = (
                _bind(self._replay, "replay_endpoint", replay_endpoint) if replay_endpoint else None
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threads.guarded("pdlink-kv-events", self._run, self._died)
        self._thread.start()

    def stored(self, place: BlockPlace, key: bytes, preimage: Preimage | None = None) -> None:
        with self._lock:
            self._ledger.stored(place, key, preimage)
            self._ring_bell()

    def removed(self, place: BlockPlace, key: bytes) -> None:
        with self._lock:
            self._ledger.removed(place, key)
            self._ring_bell()

    @property
    def address(self) -> str:
        """ENDPOINT or ENDPOINT,REPLAY, as the proxy reads it."""
        return ",".join(filter(None, (self.endpoint, self.replay_endpoint)))

    @property
    def num_blocks(self) -> int:
        """Blocks that are there, over all places."""
        with self._lock:
            return len(self._ledger)

    def close(self) -> None:
        """Say that nothing is kept any more, and end. What is stored or removed afterwards is told to nobody.

        Safe to call twice.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        zmq_context.end(self._context, linger_ms=_CLOSE_MS)
        with self._lock:
            self._rung = True  # nobody writes to it again
            os.close(self._bell)

    def _socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.sndhwm = hwm
        socket.maxmsgsize = _MAX_REQUEST_NBYTES
        return socket

    def _ring_bell(self) -> None:
        if self._ledger.has_news and not self._rung:
            self._rung = True
            os.eventfd_write(self._bell, 1)

    # --- The thread

    def _run(self) -> None:
        cleared = AllBlocksCleared(self._incarnation)
        self._publish([cleared])
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if self._replay in ready:
                self._answer()
            if self._bell in ready:
                self._closing.wait(_LINGER_S)
                self._publish_news()
        self._publish([cleared])

    def _died(self, why: str) -> None:
        """Subscribers lose their connections instead of hearing nothing."""
        with self._lock:
            self._rung = True  # nobody reads what is written to the bell
        for socket in (self._pub, self._replay):
            socket.close(linger=0)
        log.error("kv_events: %s; nothing is published any more; start this process again", why)

    def _publish_news(self) -> None:
        os.eventfd_read(self._bell)
        while True:
            with self._lock:
                news = self._ledger.take(_MAX_BLOCKS)
                self._rung = bool(news)
            if not news:
                return
            self._publish(events_of(news))

    def _publish(self, events: Sequence[Event]) -> None:
        batch = _encoded(events)
        self._ring.append((self._sequence, batch))
        self._pub.send_multipart((self._topic, self._sequence.to_bytes(SEQUENCE_NBYTES, "big"), batch))
        self._sequence += 1

    def _answer(self) -> None:
        """Replay to one subscriber. What is no request is passed over; one that reads too slowly loses the rest."""
        client, *frames = self._replay.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_NBYTES:
            log.debug("kv_events.replay_endpoint: %d frames are no request", len(frames))
            return
        first = int.from_bytes(frames[1], "big")
        if first < self._ring[0][0]:
            with self._lock:
                told = self._ledger.told()
            replayed = [(self._ring[-1][0], _encoded([AllBlocksCleared(self._incarnation), *events_of(told)]))]
        else:
            replayed = [(sequence, batch) for sequence, batch in self._ring if sequence >= first]
        for sequence, batch in replayed:
            self._replay.send_multipart((client, b"", self._topic, sequence.to_bytes(SEQUENCE_NBYTES, "big"), batch))
        self._replay.send_multipart((client, b"", b"", END, b""))


def _bind(socket: zmq.Socket[bytes], setting: str, endpoint: str) -> str:
    """Where it is bound in the end: a port for `*` or 0."""
    take_ipv6(socket, endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events.{setting}: got {endpoint!r}, which cannot be bound ({error}); expected tcp://HOST:PORT or "
            "ipc://PATH that is free; name another one"
        ) from None
    bound = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")


def _encoded(events: Sequence[Event]) -> bytes:
    return msgspec.msgpack.encode(EventBatch(time.time(), list(events)))
