"""`Questions`: asks stores of other nodes, and answers them, in a thread that owns the sockets.

Nothing a peer sends is believed, and nothing waits for one but the thread that asks it, up to its deadline. A
connection that ends fails the questions that are under way on it; the next question dials again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from pdlink.endpoint.channel import Channel, Disconnected, QueueFull, Received
from pdlink.endpoint.inflow import LOOK_S
from pdlink.endpoint.work import Work
from pdlink.errors import PdlinkError, ProtocolError
from pdlink.events import MessageDropped, emit
from pdlink.peers.messages import VERSION, PeerAnswer, PeerAsk, Pull, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.peers.messages import Body
    from pdlink.protocol.auth import AllowList, Credentials

log = logging.getLogger(__name__)

_TURN_S = 0.005
"""For which a turn reads frames, then commands get theirs."""
_MAX_WAITING = 256
"""Frames that wait for room on one connection; further ones fail. Own ones are as many as threads of tiers; the
answers to a peer that asks and does not read take 1 MiB."""


class _Frame(NamedTuple):
    body: bytes
    failed: Callable[[str], None]
    """Told why it will not be sent, or not be answered."""


class Questions:
    """Thread-safe, but for `open` and `close`."""

    def __init__(self, identity: str, answer: Callable[[PeerAsk], PeerAnswer], pull: Callable[[Pull], None]) -> None:
        """identity: of this life of the process. answer, pull: called in the thread; they must not wait."""
        self._channel = Channel(identity)
        self._work = Work()
        self._answer, self._pull = answer, pull
        self._numbers = count(1)
        self._closed = True
        self._thread: threading.Thread | None = None
        # The thread's:
        self._routes: dict[str, str] = {}
        """Of dialed connections, by address."""
        self._pending: dict[int, tuple[str, Future[PeerAnswer]]] = {}
        """Route and answer of each question under way."""
        self._waiting: dict[str, deque[_Frame]] = {}
        """By route: frames that its connection had no room for, in order."""
        self._refused: set[str] = set()
        """Routes for which more frames came than may wait."""

    def open(self, host: str, port: int, credentials: Credentials | None) -> int:
        """Listen, and start the thread; returns the port. Raises ConfigError."""
        bound = self._channel.bind(host, port, credentials)
        self._work.open()
        self._channel.watch(self._work.wake_fd)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pdlink-peers", daemon=True)
        self._thread.start()
        return bound

    def close(self) -> None:
        """Fail all questions. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.call(self._end)
            thread.join()
            self._channel.close()
            self._work.close()

    def allow(self, allowed: AllowList) -> None:
        """Replace the allow-list; frames of other keys are dropped from now on."""

        def exchange() -> None:
            if self._channel.credentials is not None:
                self._channel.credentials = replace(self._channel.credentials, allowed=allowed)

        self._work.call(exchange)

    def ask(self, address: str, keys: Sequence[bytes], timeout_s: float) -> PeerAnswer:
        """What the store at this address says of these keys. Raises OSError if it says nothing right in time."""
        number, answer = next(self._numbers), Future[PeerAnswer]()
        self._work.call(partial(self._ask, address, PeerAsk(number, tuple(keys)), answer))
        try:
            given = answer.result(0.0 if self._closed else timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{address} did not answer within {timeout_s:.1f} s") from None
        finally:
            self._work.call(lambda: self._pending.pop(number, None) and None)
        if given.version != VERSION:
            raise ConnectionError(f"{address} speaks version {given.version}, this store {VERSION}")
        if len(given.held) != len(keys):
            raise ConnectionError(f"{address} answered {len(given.held)} of {len(keys)} keys")
        return given

    def tell(self, address: str, body: Pull, failed: Callable[[str], None]) -> None:
        """Send it. failed(why): told in the thread if it is not sent: the connection ends before, or `_MAX_WAITING`
        frames wait for it."""
        self._work.call(partial(self._send, address, body, failed))

    def hang_up(self, address: str) -> None:
        """Close the connection to this store, unless there is none, or something is asked on it."""
        self._work.call(partial(self._hang_up, address))

    # --- The thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            log.exception("no questions are asked or answered any more")
            self._end()

    def _loop(self) -> None:
        while not self._closed:
            with self._work.lock:
                self._work.asleep = not self._work.commands
                wait_s = LOOK_S if self._work.asleep else 0.0
            arrived, ready = self._channel.poll(wait_s)
            self._work.asleep = False
            if self._work.wake_fd in ready:
                os.eventfd_read(self._work.wake_fd)
            until_s = time.monotonic() + _TURN_S
            for item in arrived:
                match item:
                    case Received():
                        self._on_frame(item)
                    case Disconnected():
                        self._on_disconnected(item)
                if time.monotonic() >= until_s:
                    break
            while self._work.commands:
                self._work.commands.popleft()[0]()
            self._send_waiting()

    def _end(self) -> None:
        self._closed = True
        for _, answer in self._pending.values():
            _fail(answer, "this store is closed")
        for route in list(self._waiting):
            self._lose(route, "this store is closed")

    def _ask(self, address: str, body: PeerAsk, answer: Future[PeerAnswer]) -> None:
        self._send(address, body, lambda why: _fail(answer, f"{address}: {why}"))
        if not answer.done():
            self._pending[body.number] = self._routes[address], answer

    def _hang_up(self, address: str) -> None:
        route = self._routes.get(address)
        if route is not None and all(asked != route for asked, _ in self._pending.values()):
            self._on_disconnected(Disconnected(route, "closed here"))

    def _send(self, address: str, body: PeerAsk | Pull, failed: Callable[[str], None]) -> None:
        try:
            route = self._routes.get(address)
            if route is None:
                route = self._routes[address] = self._channel.dial(address)
        except PdlinkError as error:
            failed(str(error))
            return
        self._put(route, _Frame(encode(body), failed))

    def _put(self, route: str, frame: _Frame) -> None:
        """Send it now, or as soon as the connection has room."""
        waiting = self._waiting.get(route)
        if waiting is None:
            try:
                if not self._channel.send(route, frame.body):
                    frame.failed("the connection is gone")
            except QueueFull:
                self._waiting[route] = deque((frame,))
        elif len(waiting) < _MAX_WAITING:
            waiting.append(frame)
        else:
            if route not in self._refused:
                self._refused.add(route)
                log.warning("%s does not read: %d messages wait for it, others fail", self._who(route), len(waiting))
            frame.failed(f"it does not read: {len(waiting)} messages wait for it")

    def _who(self, route: str) -> str:
        """Of a connection, for operators."""
        addresses = [address for address, dialed in self._routes.items() if dialed == route]
        return addresses[0] if addresses else "a store that asked this one"

    def _send_waiting(self) -> None:
        for route, waiting in list(self._waiting.items()):
            with suppress(QueueFull):
                while waiting and self._channel.send(route, waiting[0].body):
                    waiting.popleft()
                self._lose(route, "the connection is gone")

    def _lose(self, route: str, why: str) -> None:
        """Nothing waits for the connection any more; what did fails."""
        self._refused.discard(route)
        for frame in self._waiting.pop(route, ()):
            frame.failed(why)

    def _on_frame(self, item: Received) -> None:
        credentials = self._channel.credentials
        if credentials is not None and item.public_key not in credentials.allowed:
            emit(MessageDropped(reason="key"))
            return
        try:
            body = decode(item.frame)
        except ProtocolError:
            emit(MessageDropped(reason="malformed"))
            return
        self._on_body(item.route, body)

    def _on_body(self, route: str, body: Body) -> None:
        match body:
            case PeerAsk():
                self._put(route, _Frame(encode(self._answer(body)), _ignore))
            case Pull():
                self._pull(body)
            case PeerAnswer(number=number):
                asked, answer = self._pending.get(number, ("", Future[PeerAnswer]()))
                if asked == route:  # nobody answers for another
                    with suppress(InvalidStateError):
                        answer.set_result(body)

    def _on_disconnected(self, item: Disconnected) -> None:
        self._channel.drop(item.route)
        why = f"the connection ended: {item.reason}" if item.reason else "the connection ended"
        self._lose(item.route, why)
        for address in [address for address, route in self._routes.items() if route == item.route]:
            del self._routes[address]
        for route, answer in self._pending.values():
            if route == item.route:
                _fail(answer, why)


def _ignore(_: str) -> None:
    """Who asked has its own deadline."""


def _fail(answer: Future[PeerAnswer], problem: str) -> None:
    with suppress(InvalidStateError):
        answer.set_exception(ConnectionError(problem))
