"""`register:tcp://HOST:PORT`: workers dial this proxy, say that they are there, and send their health in beats.

Everything that has arrived is taken in before silence is judged, and time in which this process itself was suspended
does not count as silence. The end of a connection is no proof of anything, so it makes the proxy ask at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pdlink.api import presence
from pdlink.config import is_loopback
from pdlink.endpoint.channel import Channel, ClientRefused, Left, Received
from pdlink.endpoint.clock import AwakeClock
from pdlink.errors import ConfigError, InvalidRequest, ProtocolError
from pdlink.few_lines import FewLines
from pdlink.protocol.auth import ControlAddress, is_worker_name, name_problem

from ..dialects.own import read_health
from ..engines import is_base_url
from ..upstream import printable
from .base import ROLES, SourceDown
from .roll import Roll

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.api.health import Health
    from pdlink.api.presence import Beat, WorkerLoad
    from pdlink.protocol.auth import AllowList, Credentials

    from ..membership import Members
    from .roll import Life

log = logging.getLogger("pdlink.proxy")

TURN_S = 0.1
"""Between two looks at the sockets: what a thousand beats a second cost less than if each of them woke the loop."""
READ_S = 0.002
"""A turn reads for so long, then whatever else waits in the loop has its turn."""
EXPIRE_S = 0.2
"""Between two looks for silence."""
TELL_SHARE = 5.0
"""Between two lists, in the time that one takes: of thousands that join at once each turn would bring another."""
_LONGEST_GAP_S = 0.25
"""Of a turn, that counts as time in which this process was awake."""
_MAX_SHOWN = 8
_MAX_REASON_CHARS = 300


class Hearing(Protocol):
    """What beats do (`beats.Beats`)."""

    def heard(self, url: str, health: Health) -> None: ...
    def loaded(self, url: str, epoch: str, load: WorkerLoad) -> None: ...
    def heard_some(self) -> None: ...
    def silent(self, url: str, why: str) -> None: ...
    def suspect(self, url: str) -> None: ...
    def well(self, url: str) -> bool: ...
    def named(self, url: str) -> str: ...


@dataclass(frozen=True, slots=True)
class JoinRules:
    """Who may join."""

    hearing: Hearing
    credentials: Credentials | None = None
    """The keys of this proxy and of the workers that it lets in; None lets in everybody."""
    insecure: bool = False
    """Without keys, others than processes of this host may join."""
    offset: int = 0
    """Added to the port: the number of this process among those of one proxy."""


class _Line(NamedTuple):
    """A connection."""

    life: Life
    """Whose it is."""
    body: bytes
    """`Beat.health` of its last beat."""
    health: Health
    """The same, read."""


class RegisterSource:
    """Workers that have joined."""

    def __init__(self, text: str, door: JoinRules) -> None:
        """text: `tcp://HOST:PORT`. Raises ConfigError for another one, and without keys for one that others reach."""
        what = f"register:{text}"
        place, _, port = text.rpartition(":")
        host = place.removeprefix("tcp://")
        if not place.startswith("tcp://") or not host or not port.isdecimal() or int(port) + door.offset >= 2**16:
            raise ConfigError(
                f"discover: got {what}; expected register:tcp://HOST:PORT; write the address to listen at"
            )
        try:
            ControlAddress.parse(f"tcp://{host}:1")
        except InvalidRequest:
            raise ConfigError(f"discover: got {what}; expected an IP address or a name as HOST; correct it") from None
        if door.credentials is None and not door.insecure and not is_loopback(host.strip("[]")):
            raise ConfigError(
                f"discover: other hosts can reach {what}, and this proxy has no keys; make them with "
                "`pdlink keygen NAME` and set key_file and allow_file, or write out insecure: true"
            )
        self._host, self._port = host, int(port) and int(port) + door.offset
        self._hearing, self._credentials = door.hearing, door.credentials
        self.roll = Roll()
        self._clock = AwakeClock(_LONGEST_GAP_S)
        self._channel: Channel | None = None
        self._expire_s = 0.0
        self._lines: dict[int, _Line] = {}
        """By descriptor."""
        self._lines_of_refused = FewLines()
        self._refused: dict[str, None] = {}
        """Why beats were not taken in, the latest last; each is logged once."""
        self.address = ""
        """What workers name in `join.proxies`, for a host of this name; empty while nobody can join."""

    def allow(self, allowed: AllowList) -> None:
        """Replace the allow-list of the credentials; beats of other keys do not count from now on."""
        if self._credentials is not None:
            self._credentials = replace(self._credentials, allowed=allowed)
            if self._channel is not None:
                self._channel.credentials = self._credentials

    async def follow(self, tell: Callable[[Members], None]) -> None:
        channel = self._channel = Channel("pdlink-proxy", tells_who_left=True, calm=True)
        try:
            port = channel.bind(self._host, self._port, self._credentials)
        except ConfigError as error:
            raise SourceDown(str(error).replace("listen.control", "register")) from None
        key = self._credentials.keys.public if self._credentials is not None else ""
        self.address = str(ControlAddress(self._host.strip("[]"), port, key))
        try:
            told_s = time.monotonic()
            tell(self.roll.members())
            while True:
                await self._turn(channel)
                if self.roll.changed and time.monotonic() >= told_s:
                    self.roll.changed = False
                    began_s = time.monotonic()
                    tell(self.roll.members())
                    told_s = time.monotonic() + TELL_SHARE * (time.monotonic() - began_s)
                await asyncio.sleep(TURN_S)
        finally:
            self.address = ""
            self._lines.clear()
            channel.close()

    async def _turn(self, channel: Channel) -> None:
        self._clock.turn()
        now_s, awake_s = self._clock.now_s(), self._clock.awake_s()
        unread, heard = True, False
        while unread:
            arrivals, _ = channel.poll(0)
            until_s = time.monotonic() + READ_S
            unread = False
            for arrival in arrivals:
                match arrival:
                    case Received():
                        heard = True
                        self._on_frame(arrival, now_s, awake_s)
                    case Left(fd=fd):
                        self._on_left(fd)
                    case ClientRefused(reason=reason, host=host):
                        self._refuse(f"{host or 'somebody'}: {reason}")
                    case _:
                        pass
                if time.monotonic() > until_s:
                    unread = True
                    break
            if unread:
                await asyncio.sleep(0)
        if heard:
            self._hearing.heard_some()
        if now_s < self._expire_s:
            return
        self._expire_s = now_s + EXPIRE_S
        hearing = self._hearing
        for life in self.roll.expire(now_s=now_s, awake_s=awake_s, well=hearing.well, named=hearing.named):
            if self.roll.counts(life):
                log.warning("worker %s at %s sends no beats", life.name, life.url)
                missed_s = presence.MISSED_BEATS * life.beat_s
                self._hearing.silent(life.url, f"no beat within {missed_s:g} s")

    def _on_frame(self, arrival: Received, now_s: float, awake_s: float) -> None:
        """now_s, awake_s: when this turn began."""
        credentials = self._credentials
        if credentials is not None and arrival.public_key not in credentials.allowed:
            return  # not any more
        try:
            beat = presence.decode(arrival.frame)
        except ProtocolError as error:
            self._refuse(str(error))
            return
        line = self._lines.get(arrival.fd)
        same = line is not None and line.body == beat.health and line.life.url == beat.url
        if line is not None and same:
            health = line.health
        else:
            read = read_health(200, beat.health)
            if isinstance(read, str):
                self._refuse(read)
                return
            health, known = read, line.life if line is not None else None
            if known is None or (known.name, known.epoch, known.url) != (health.name, health.epoch, beat.url):
                problem = self._problem_of(beat, health, known, arrival.public_key, now_s)
                if problem is not None:
                    self._refuse(problem)
                    return
        key = arrival.public_key if credentials is not None else ""
        life = self.roll.beat(beat, health, now_s=now_s, awake_s=awake_s, key=key)
        if life is None:
            self._lines.pop(arrival.fd, None)
            return
        if line is None or not same or line.life is not life:
            self._lines[arrival.fd] = _Line(life, beat.health, health)
        if not self.roll.counts(life):
            return
        if beat.load is None:
            self._hearing.heard(life.url, health)
        elif same:
            self._hearing.loaded(life.url, life.epoch, beat.load)
        else:
            self._hearing.heard(life.url, health.with_load(beat.load))

    def _on_left(self, fd: int) -> None:
        line = self._lines.pop(fd, None)
        if line is not None and self.roll.counts(line.life):
            self._hearing.suspect(line.life.url)

    def _problem_of(
        self, beat: Beat, health: Health, known: Life | None, public_key: str, now_s: float
    ) -> str | None:
        """Why this worker may not join. known: the one that the connection spoke for."""
        if known is not None and known.name != health.name:
            return f"name: got {health.name!r} on the connection of {known.name}; a worker has one of its own"
        problem = _problem(beat, health, self._credentials, public_key)
        if problem is not None or beat.leaves:
            return problem
        key = public_key if self._credentials is not None else ""
        return self.roll.room(health.name, health.epoch, key, now_s) or None

    def _refuse(self, why: str) -> None:
        why = printable(why)[:_MAX_REASON_CHARS]
        if why not in self._refused and (more := self._lines_of_refused.admits(time.monotonic())) is not None:
            log.warning("register: a beat is not taken in: %s%s", why, more)
        self._refused.pop(why, None)
        self._refused[why] = None
        while len(self._refused) > _MAX_SHOWN:
            del self._refused[next(iter(self._refused))]

    def describe(self) -> dict[str, Any]:
        """For the proxy's GET /health."""
        left_out = [text for text, _ in zip(self.roll.left_out(), range(_MAX_SHOWN), strict=False)]
        return {"address": self.address, "left_out": left_out, "refused": list(self._refused)}


def _problem(beat: Beat, health: Health, credentials: Credentials | None, public_key: str) -> str | None:
    """Why this worker may not join."""
    if not is_worker_name(health.name) or not health.epoch:
        return f"name: got {health.name!r} of epoch {health.epoch!r}; expected a worker's name, and an epoch"
    if not is_base_url(beat.url):
        return f"{health.name}: url: got {beat.url!r}; expected http://HOST:PORT or https://HOST:PORT; set join.url"
    if health.role not in ROLES:
        return f"{health.name}: role: got {health.role!r}; expected {', '.join(ROLES)}"
    if (differs := name_problem(credentials, public_key, health.name)) is not None:
        return f"name: got {health.name!r} with the key of {differs[0]}; expected the name of its key"
    return None
