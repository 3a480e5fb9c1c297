"""`Announcer`: tells proxies that this worker is there, and how it does, in beats of its health.

One DEALER socket for each address of each proxy. No call waits for a proxy, and none has an answer: a beat that finds
no connection is dropped, and the next one says the same. libzmq dials again by itself, after pauses that it draws by
chance, so that workers do not come back in step; but not after a handshake that failed, so then the socket is made
anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdlink import threads, zmq_context
from pdlink.api import presence
from pdlink.config.listen import is_every_address
from pdlink.errors import ConfigError, InvalidRequest
from pdlink.protocol.auth import ControlAddress, check_dial
from pdlink.serve import health

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdlink.config import WorkerConfig
    from pdlink.protocol.auth import Credentials
    from pdlink.serve.worker import Worker

log = logging.getLogger(__name__)

_QUEUED_BEATS = 2
"""Of a proxy that does not read: an old beat is worth nothing."""
_DIAL_MS, _LONGEST_DIAL_MS = 500, 2000
"""Pause before libzmq dials again; it adds up to `_DIAL_MS` by chance."""
_LOOK_UP_S = 10.0
"""Between two looks at the addresses of names."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""After a handshake that failed."""
_LEAVE_MS = 200
"""For the last beat to leave."""
_SHAKE = 0.1
"""Share of the interval by which beats are moved by chance."""
_MAX_REASON_CHARS = 300

_WHY = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not have our key on its allow_file",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "only one of the two sides uses keys",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up: its key is not the one in join.proxies, or only one "
    "of the two sides uses keys, or no proxy listens there",
}
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def url_of(config: WorkerConfig, bound: str) -> str:
    """What proxies reach a worker by that serves HTTP at `bound`. Raises ConfigError."""
    if config.join.url is not None:
        return config.join.url
    scheme, _, place = bound.partition("://")
    host, _, port = place.rpartition(":")
    if is_every_address(config.listen.host):
        if config.listen.advertise is None:
            raise ConfigError(
                f"listen: got {config.listen.host}, which no proxy of join.proxies can dial; set listen.advertise or "
                "join.url"
            )
        host = config.listen.advertise
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


@dataclass(slots=True)
class _Proxy:
    """One address."""

    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    fd: int = -1
    """Readable when the monitor has something to say."""
    pause_s: float = _FIRST_PAUSE_S
    again_s: float = 0.0
    """time.monotonic of the next try, while there is no socket."""
    told: str = ""
    """The failure that was logged."""


class Announcer:
    """Of one worker. All calls belong to one asyncio loop; `start` begins, `leave` ends."""

    def __init__(self, worker: Worker, credentials: Credentials | None) -> None:
        """Raises ConfigError for an address in `join.proxies` that this worker may not dial."""
        config = worker.config
        self._worker, self._join, self._credentials = worker, config.join, credentials
        self._targets: list[ControlAddress] = []
        for text in config.join.proxies:
            try:
                target = ControlAddress.parse(text)
                check_dial(target, credentials, insecure=config.security.insecure)
            except InvalidRequest as error:
                raise ConfigError(f"join.proxies: {error}".replace("the prefill worker", "the proxy")) from None
            self._targets.append(target)
        self._started_s = time.monotonic()
        self._url = ""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._proxies: dict[ControlAddress, _Proxy] = {}
        self._poke = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, url: str) -> None:
        """The worker serves HTTP at `url` now."""
        self._url = url_of(self._worker.config, url)
        self._context = zmq.Context()
        self._tasks = [asyncio.create_task(self._beat_on()), asyncio.create_task(self._look_up())]
        for task in self._tasks:
            task.add_done_callback(threads.tell_failure)

    def now(self) -> None:
        """Something has changed that proxies should know before the next beat is due."""
        self._poke.set()

    async def leave(self) -> None:
        """Say that this worker ends, and send nothing more. Safe to call twice, and without `start`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._context is not None:
            context, self._context = self._context, None
            self._send(self._proxies.values(), leaves=True)
            for proxy in self._proxies.values():
                _close(proxy, _LEAVE_MS)
            self._proxies.clear()
            await asyncio.to_thread(zmq_context.end, context, linger_ms=_LEAVE_MS)

    # -- the loop

    async def _beat_on(self) -> None:
        while True:
            self._poke.clear()
            now_s = time.monotonic()
            try:
                for target, proxy in self._proxies.items():
                    self._care(target, proxy, now_s)
                self._send(self._proxies.values())
            except Exception:  # a bug in what is reported: the probes of the proxies go on
                log.exception("the health of this worker could not be told")
            wait_s = self._join.beat_s * random.uniform(1 - _SHAKE, 1.0)
            if any(proxy.socket is None for proxy in self._proxies.values()):
                wait_s = min(wait_s, _FIRST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._poke.wait()

    def _send(self, proxies: Iterable[_Proxy], *, leaves: bool = False) -> None:
        sockets = [proxy.socket for proxy in proxies if proxy.socket is not None]
        if not sockets:
            return
        said = msgspec.to_builtins(health.health(self._worker))
        del said["peers"]  # long, and nothing that a router needs
        load = msgspec.convert(
            [said.pop(name) for name in presence.WorkerLoad.__struct_fields__], presence.WorkerLoad
        )
        beat = presence.Beat(
            presence.VERSION,
            self._url,
            msgspec.json.encode(said),
            self._join.beat_s,
            time.monotonic() - self._started_s,
            self._join.cell,
            leaves,
            load,
        )
        frame = presence.encode(beat)
        for each in sockets:
            each.getsockopt(zmq.EVENTS)  # libzmq takes note of a new connection; else once a millisecond
            with contextlib.suppress(zmq.Again):  # no connection, or a proxy that does not read
                each.send(frame, zmq.NOBLOCK)

    def _care(self, target: ControlAddress, proxy: _Proxy, now_s: float) -> None:
        """Make the socket anew if it is time."""
        if proxy.socket is None and now_s >= proxy.again_s:
            try:
                self._dial(target, proxy)
            except zmq.ZMQError as error:
                self._tell(target, proxy, str(error))
                proxy.again_s = now_s + _LONGEST_PAUSE_S

    def _look(self, target: ControlAddress, proxy: _Proxy) -> None:
        """Take in what has become of the connection."""
        why = ""
        for event in _events(proxy.monitor) if proxy.monitor is not None else ():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                proxy.pause_s = _FIRST_PAUSE_S
                self._tell(target, proxy, "connected")
                self.now()
            elif event == zmq.EVENT_DISCONNECTED:
                self._tell(target, proxy, "the connection ended")
            else:
                why = _WHY.get(event, "")
        if why:
            self._tell(target, proxy, why)
            _close(proxy, 0)
            proxy.again_s = time.monotonic() + proxy.pause_s * random.uniform(0.5, 1.0)
            proxy.pause_s = min(2 * proxy.pause_s, _LONGEST_PAUSE_S)

    def _tell(self, target: ControlAddress, proxy: _Proxy, what: str) -> None:
        if what != proxy.told:
            first, proxy.told = not proxy.told, what
            level = logging.INFO if what == "connected" and first else logging.WARNING
            log.log(level, "proxy at %s: %s", target.endpoint, what[:_MAX_REASON_CHARS])

    def _dial(self, target: ControlAddress, proxy: _Proxy) -> None:
        assert self._context is not None
        with contextlib.ExitStack() as made:
            dealer = self._context.socket(zmq.DEALER)
            made.callback(dealer.close)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDHWM, _QUEUED_BEATS)
            dealer.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing without a connection
            dealer.setsockopt(zmq.RECONNECT_IVL, _DIAL_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_DIAL_MS)
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
            if ":" in target.host:
                dealer.setsockopt(zmq.IPV6, 1)
            if self._credentials is not None:
                keys = self._credentials.keys
                dealer.setsockopt_string(zmq.CURVE_SERVERKEY, target.public_key)
                dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
                dealer.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
            monitor = dealer.get_monitor_socket(_EVENTS | zmq.Event(sum(_WHY)))
            made.callback(dealer.disable_monitor)
            dealer.connect(target.endpoint)
            made.pop_all()
        proxy.socket, proxy.monitor, proxy.fd = dealer, monitor, monitor.fileno()
        asyncio.get_running_loop().add_reader(proxy.fd, self._look, target, proxy)
        self._look(target, proxy)  # libzmq signals only to who has found nothing before

    async def _look_up(self) -> None:
        """Have a socket for each address that the names have now."""
        while True:
            found: dict[ControlAddress, None] = {}
            for target in self._targets:
                try:
                    found.update(dict.fromkeys(await _addresses(target)))
                except Exception as error:  # noqa: BLE001  a name server that is down, or no name at all
                    known = [
                        each
                        for each in self._proxies
                        if (each.port, each.public_key) == (target.port, target.public_key)
                    ]
                    found.update(dict.fromkeys(known))  # nobody is taken away
                    log.warning("join.proxies: %s: %s", target.host, getattr(error, "strerror", "") or repr(error))
            for target in self._proxies.keys() - found.keys():
                _close(self._proxies.pop(target), 0)
            new = found.keys() - self._proxies.keys()
            for target in new:
                self._proxies[target] = _Proxy()
            if new:
                self.now()
            await asyncio.sleep(_LOOK_UP_S * random.uniform(0.5, 1.0))


async def _addresses(target: ControlAddress) -> list[ControlAddress]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    return [ControlAddress(str(each[4][0]), target.port, target.public_key) for each in found]


def _events(monitor: zmq.Socket[bytes]) -> Iterable[zmq.Event]:
    while True:
        try:
            yield zmq.Event(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
        except zmq.Again:
            return


def _close(proxy: _Proxy, linger_ms: int) -> None:
    if proxy.socket is not None and proxy.monitor is not None:
        asyncio.get_running_loop().remove_reader(proxy.fd)
        proxy.socket.disable_monitor()
        proxy.monitor.close()
        proxy.socket.close(linger=linger_ms)
    proxy.socket = proxy.monitor = None
