"""Listens to the KV events of workers and of stores that several workers have, and asks again for missed ones.

A publisher numbers its batches from 0 (vLLM's `ZmqEventPublisher`): frames are topic, number (8 bytes, big-endian),
batch. Where it has a second socket for it, old batches can be asked for by number; it sends each with its number, and
ends with -1. What cannot be had again makes all older knowledge of the publisher worthless, so it is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from pdlink._index import Events
from pdlink.errors import ConfigError
from pdlink.zmq_context import take_ipv6

from .kv_index import KVIndex
from .upstream import printable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from pdlink._index import HeldKV

    from .fleet import PlacementRequest
    from .table import WorkerState

log = logging.getLogger("pdlink.proxy")

MAX_BATCH_NBYTES = 64 << 20
MAX_WAITING = 1000
"""Batches that wait to be read; further ones are missed, and asked for again."""
REPLAY_S = 5.0
"""Longest silence of a publisher that was asked for old batches."""
SILENT_S = 10.0
"""A worker that computes prompts and publishes nothing for so long is told of."""
TURN_S = 0.002
"""Events are read for so long, then whatever else waits in the loop has its turn."""
_END = (-1).to_bytes(8, "big", signed=True)


class EventSource(NamedTuple):
    """Where events are published."""

    endpoint: str
    """Its PUB socket, as tcp://HOST:PORT."""
    replay: str | None
    """Its ROUTER socket, that sends old batches again."""
    scope: str = ""
    """Of a publisher that has KV of several models: what it calls the worker's; if empty, the model's name tells."""


def source(text: str, url: str) -> EventSource:
    """From a setting, or what a worker says: ENDPOINT, ENDPOINT,REPLAY or ENDPOINT,REPLAY,SCOPE. url: the worker's,
    whose host is taken for one that binds all addresses. Raises ConfigError."""
    endpoint, replay, scope, *more = (part.strip() for part in f"{text},,".split(",", 3))
    if "".join(more).strip(","):
        raise ConfigError(f"kv_events: got {printable(text)!r} for {url}; expected ENDPOINT,REPLAY,SCOPE; cut it")
    return EventSource(_reached(endpoint, url), _reached(replay, url) if replay else None, scope)


def _reached(endpoint: str, url: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and 0 < int(port) < 2**16:
        if host in ("*", "0.0.0.0", "[::]"):
            host = re.sub(r":\d*$", "", urlsplit(url).netloc)
        return f"tcp://{host}:{port}"
    if scheme == "ipc" and rest:
        return endpoint
    raise ConfigError(
        f"kv_events: got {printable(endpoint)!r} for {url}; expected tcp://HOST:PORT or ipc://PATH; write one of them"
    )


@dataclass(slots=True)
class _Told:
    """Where one worker says that its KV is told."""

    works: list[WorkerState]
    """Of this incarnation: one, or one of each side."""
    said: tuple[str, ...]
    listeners: tuple[tuple[EventSource, str], ...]
    """Of `KVEvents._listening`."""
    owes_s: float | None = None
    """When it was sent the first prompt after its last batch."""
    silence: str = ""
    """`WorkerState.silence`."""


class _Listening(NamedTuple):
    """To one publisher, about one model."""

    listener: EventListener
    task: asyncio.Task[None]
    workers: set[str]
    """URLs of those whose KV it is."""


class KVEvents:
    """What is known of the KV of all workers of one proxy, by their events."""

    def __init__(self) -> None:
        self.index = KVIndex()
        self.sources: Mapping[str, Sequence[str]] = {}
        """By id of a worker, where its events are published, as `source` reads it, if it does not say so."""
        self._told: dict[str, _Told] = {}
        """By URL."""
        self._listening: dict[tuple[EventSource, str], _Listening] = {}
        """By source and model."""
        self._numbers = itertools.count(1)
        """Of publishers, never given twice: one that begins anew knows nothing."""

    def heard(self, url: str, work: WorkerState, model: str, said: Sequence[str]) -> None:
        """A worker is well; listen to this incarnation from now on. said: where it says that it publishes."""
        said = tuple(self.sources.get(url) or said)
        told = self._told.get(url)
        if told is not None and told.works[0].key != work.key:  # what its former life had counts no more
            self._end(url)
            told = None
        if told is None or told.said != said:
            works = told.works if told is not None else [work]
            told = _Told(works, said, _listeners(url, model, said))
            self._end(url, but=told.listeners)
            for each in told.listeners:
                self._begin(*each).workers.add(url)
            self._told[url] = told
            self._assign(told.listeners)
        if work not in told.works:
            told.works = [*(each for each in told.works if each.row >= 0), work]
            self._assign(told.listeners)
        work.silence = told.silence
        work.publishes = not told.silence and any(self._listening[each].listener.speaks for each in told.listeners)

    def sent(self, url: str, now_s: float) -> None:
        """The worker computes KV from now on that it has to tell."""
        told = self._told.get(url)
        if told is not None and told.listeners and told.owes_s is None:
            told.owes_s = now_s

    def look(self, now_s: float) -> None:
        """Tell of workers that publish nothing although they should."""
        for url, told in self._told.items():
            late = told.owes_s is not None and now_s - told.owes_s >= SILENT_S
            if not late or told.silence or any(work.requests for work in told.works):
                continue
            places = ", ".join(where.endpoint for where, _ in told.listeners)
            told.silence = f"it computed prompts, and no KV events came from {places}"
            for work in told.works:
                work.silence, work.publishes = told.silence, False
            for each in told.listeners:
                if len(self._listening[each].workers) == 1:
                    self._listening[each].listener.begin_anew()
            log.warning("%s: %s; its KV is guessed from the prompts that it was sent", url, told.silence)

    def _spoke(self, listening: _Listening) -> None:
        """A batch has come."""
        for url in listening.workers:
            told = self._told[url]
            told.owes_s = None
            for work in told.works:
                work.silence, work.publishes = "", True
            if told.silence:
                told.silence = ""
                log.warning("%s: its KV events come", url)

    def _begin(self, where: EventSource, model: str) -> _Listening:
        listening = self._listening.get((where, model))
        if listening is None:
            listener = EventListener(self.index, next(self._numbers), where)
            listening = _Listening(listener, asyncio.create_task(listener.listen(model)), set())
            listener.spoke = partial(self._spoke, listening)
            self._listening[where, model] = listening
        return listening

    def held(self, request: PlacementRequest, model: str) -> HeldKV | None:
        """What the workers say that they have of the prompt; None if its tokens are not known. model: the workers',
        of which `request.model` may be a LoRA or another name."""
        ids = request.known_ids if request.ids is None else request.ids
        if ids is None:
            return None
        salt = (request.salt,) if request.salt else ()
        if request.model != model and (found := self.index.held(model, (request.model, *salt), ids)):
            return found
        return self.index.held(model, salt, ids)

    def _assign(self, listeners: Collection[tuple[EventSource, str]]) -> None:
        """Tell the index whose KV these publish."""
        for each in listeners:
            listening = self._listening[each]
            works = itertools.chain.from_iterable(self._told[url].works for url in listening.workers)
            numbers, shared = [work.number for work in works], len(listening.workers) > 1
            self.index.assign(listening.listener.publisher, numbers, shared=shared)

    def follow(self, sources: Mapping[str, Sequence[str]]) -> None:
        """These are the workers: `sources`."""
        self.sources = sources
        for url in self._told.keys() - sources.keys():
            self._end(url)

    def close(self) -> None:
        """Listen no more."""
        self.follow({})

    def _end(self, url: str, but: Collection[tuple[EventSource, str]] = ()) -> None:
        """Listen for this worker to those only."""
        told = self._told.pop(url, None)
        for each in told.listeners if told is not None else ():
            if each in but:
                continue
            listening = self._listening[each]
            listening.workers.discard(url)
            self._assign([each])
            if not listening.workers:
                del self._listening[each]
                listening.task.cancel()


def _listeners(url: str, model: str, said: Sequence[str]) -> tuple[tuple[EventSource, str], ...]:
    try:
        return tuple(dict.fromkeys((source(text, url), model) for text in said))
    except ConfigError as error:
        log.warning("%s", error)
        return ()


class EventListener:
    """One publisher's events, in order, into the index."""

    def __init__(self, index: KVIndex, publisher: int, where: EventSource) -> None:
        self._index, self.publisher, self._where = index, publisher, where
        self._next = 0
        """Number of the batch that is to come."""
        self.gaps = 0
        """Times that batches were missed for good."""
        self.speaks = False
        """Batches have come."""
        self.spoke: Callable[[], None] = lambda: None
        """Called with each."""
        self._malformed = False
        """The last batch was."""
        self._turn_s = 0.0
        """When this turn began."""

    async def listen(self, model: str) -> None:
        """Until cancelled. Then nothing is known of the publisher any more."""
        try:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(zmq.asyncio.Context.instance())
            with context.socket(zmq.SUB) as socket, _Awaited(socket) as awaited:
                socket.set_hwm(MAX_WAITING)
                socket.linger = 0
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_NBYTES)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                take_ipv6(socket, self._where.endpoint)
                socket.connect(self._where.endpoint)
                await self._ask_again(model)  # what was published before anybody listened
                while True:
                    frames = await awaited.frames()
                    await self._give_way()
                    if len(frames) == 3 and len(frames[1]) == 8:
                        await self._heard(model, int.from_bytes(frames[1], "big"), frames[2])
        except zmq.ZMQError as error:  # an endpoint that it cannot dial, or no more sockets
            log.warning("kv_events: cannot listen to %s: %s", self._where.endpoint, error)
        except Exception:  # this publisher is not heard any more, and the others are
            log.exception("kv_events: what %s says is not heard any more", self._where.endpoint)
        finally:
            self._index.forget(self.publisher)

    async def _heard(self, model: str, number: int, batch: bytes) -> None:
        if number < self._next:
            if number != 0:
                return  # heard before, by `_ask_again`
            self._forget("it began anew")
        elif number > self._next:
            await self._ask_again(model)
            if number < self._next:
                return
            if number > self._next:
                self._forget(f"batches {self._next} to {number - 1} were missed")
        await self._apply(model, number, batch)

    async def _ask_again(self, model: str) -> None:
        """Have all batches from the next one on that the publisher still keeps."""
        if self._where.replay is None:
            return
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_NBYTES)
        try:
            take_ipv6(socket, self._where.replay)
            socket.connect(self._where.replay)
            await socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            async for number, batch in _replies(socket):
                await self._give_way()
                if number > self._next:
                    self._forget(f"it does not keep batches {self._next} to {number - 1} any more")
                if number >= self._next:
                    await self._apply(model, number, batch)
        finally:
            socket.close(linger=0)

    def begin_anew(self) -> None:
        """What is known of the publisher is not true any more."""
        self._next, self.speaks = 0, False
        self._index.forget(self.publisher)

    async def _apply(self, model: str, number: int, batch: bytes) -> None:
        self._next = number + 1
        try:
            events = Events(batch)
            while self._index.apply(self.publisher, model, events, self._where.scope):
                await self._give_way()
        except ValueError as error:
            level, self._malformed = logging.INFO if self._malformed else logging.WARNING, True
            self._forget(f"batch {number} is not one: {error}", level)
            return
        self._malformed, self.speaks = False, True
        self.spoke()

    async def _give_way(self) -> None:
        """ZeroMQ's `recv` does not wait, and so lets nobody else run, where there is a message."""
        if time.monotonic() - self._turn_s > TURN_S:
            await asyncio.sleep(0)
            self._turn_s = time.monotonic()

    def _forget(self, why: str, level: int = logging.INFO) -> None:
        if self._next:
            self.gaps += 1
            log.log(level, "KV events from %s: %s; what was known is dropped", self._where.endpoint, why)
        self._index.forget(self.publisher)


class _Awaited:
    """The messages of a socket. pyzmq's own takes a future and some thirty calls for each that is there already."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self._fd = socket, socket.FD
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()

    def __enter__(self) -> _Awaited:
        self._loop.add_reader(self._fd, self._told)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._fd)

    def _told(self) -> None:
        self._socket.getsockopt(zmq.EVENTS)  # the descriptor stays readable until somebody has asked
        self._news.set()

    async def frames(self) -> list[bytes]:
        """The next message; does not wait, and so lets nobody else run, where there is one."""
        while True:
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:  # the descriptor tells of what comes from now on
                self._news.clear()
                await self._news.wait()


async def _replies(socket: zmq.asyncio.Socket) -> AsyncIterator[tuple[int, bytes]]:
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(REPLAY_S):
                frames = await socket.recv_multipart()
            number, batch = (
                frames[-2:] if len(frames) > 2 else (_END, b"")
            )  # vLLM sends the topic, too, SGLang does not
            if len(number) != 8 or number == _END:
                return
            yield int.from_bytes(number, "big"), batch
