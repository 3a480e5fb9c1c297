"""The workers, what they said last, and whether they may get requests.

A worker is known by its URL and judged by what it says of itself, asked all the time, and by the legs sent to it: a
refused or broken connection takes it out at once, the next good answer to a question asked *after* that takes it
back. So there is no list of banned workers to be cleared by hand, and what a client does wrong never counts against a
worker. The same URL with another epoch is another incarnation.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from pdlink.errors import ConfigError
from pdlink.events import PeerChanged, emit

from .dialects import Health, Known, PrefillAddress
from .policies import POLICIES, Candidate, choose_pair
from .steps import Leg
from .upstream import Asking, describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from .dialects import Dialect

log = logging.getLogger("pdlink.proxy")

_SILENCES_UNTIL_UNREACHABLE = 2
"""One late answer is a busy host; a refused connection needs no second one."""


class State(enum.Enum):
    UNKNOWN = "unknown"
    """Has not answered yet."""
    OK = "ok"
    DRAINING = "draining"
    """Finishes what it has, by its own word."""
    FAILED = "failed"
    """Cannot serve, by its own word."""
    UNREACHABLE = "unreachable"
    WRONG_ROLE = "wrong role"
    INVALID = "invalid"
    """Something answers there that is not a worker."""


@dataclass(slots=True, eq=False)
class Worker:
    """Everything known about one worker. Only the event loop's thread touches it."""

    url: str
    side: Leg
    control: tuple[str, ...] = ()
    """Where its control plane listens, rank by rank, if it has to be configured."""
    state: State = State.UNKNOWN
    reason: str = "has not answered yet"
    health: Health | None = None
    """The last valid one, kept while the worker is away: it says which model would be back."""
    heard_s: float | None = None
    """time.monotonic of the last answer."""
    in_flight: int = 0
    """Legs of ours that have not ended."""
    incarnations: int = 0
    faults: int = 0
    """Grows whenever a leg finds the worker gone."""
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to ask for its health now."""
    _silences: int = 0

    @property
    def key(self) -> str:
        """Names this incarnation: a restarted worker is not the one to be avoided."""
        return f"{self.url}#{self.health.epoch if self.health else ''}"

    @property
    def address(self) -> PrefillAddress:
        """Where decode finds it. It must have been heard."""
        if self.health is None:
            raise RuntimeError(f"{self.url} has not been heard")
        control = self.control or self.health.control
        return PrefillAddress(self.health.name, control[0] if len(control) == 1 else control)

    def heard(self, health: Health | str, *, faults_when_asked: int) -> None:
        """Take in what it says of itself; a text says why that is nothing that a worker says."""
        self.heard_s = time.monotonic()
        self._silences = 0
        if isinstance(health, str):
            self._become(State.INVALID, health)
            return
        if self.health is None or self.health.epoch != health.epoch:
            self.incarnations += 1
            if self.incarnations > 1:
                log.info("%s worker %s was restarted", self.side.value, self.url)
        self.health = health
        if health.role not in (self.side.value, "both"):
            self._become(State.WRONG_ROLE, f"listed as a {self.side.value} worker, but its role is {health.role!r}")
        elif health.status == "draining":
            self._become(State.DRAINING, "is draining")
        elif health.status != "ok":
            self._become(State.FAILED, f"reports status {health.status!r}")
        elif self.faults == faults_when_asked:
            self._become(State.OK, "")

    def silent(self, timeout_s: float) -> None:
        """It did not answer GET /health in time."""
        self._silences += 1
        if self._silences >= _SILENCES_UNTIL_UNREACHABLE:
            self._become(
                State.UNREACHABLE, f"no answer to GET /health within {timeout_s:g} s, {self._silences} times"
            )

    def unreachable(self, reason: str) -> None:
        """GET /health did not get through."""
        self._become(State.UNREACHABLE, reason)

    def fault(self, reason: str) -> None:
        """A leg found it gone. Asked for its health at once."""
        self.faults += 1
        self._become(State.UNREACHABLE, reason)
        self.poke.set()

    def _become(self, state: State, reason: str) -> None:
        if state is not self.state:
            back = (
                state is State.OK and self.state is not State.UNKNOWN
            )  # who read that it went reads that it is back
            log.log(
                logging.INFO if state is State.OK and not back else logging.WARNING,
                "%s worker %s: %s%s%s",
                self.side.value,
                self.url,
                state.value,
                " again" if back else "",
                f" ({reason})" if reason else "",
            )
            emit(PeerChanged(peer=self.url, state=state.value, reason=reason))
        self.state, self.reason = state, reason

    def describe(self) -> dict[str, Any]:
        """What GET /health of the proxy says about it."""
        now = time.monotonic()
        return {
            "url": self.url,
            "state": self.state.value,
            "reason": self.reason,
            "heard_s_ago": None if self.heard_s is None else round(now - self.heard_s, 3),
            "in_flight": self.in_flight,
            "incarnations": self.incarnations,
            "health": self.health,
        }


class Pools:
    """The prefill and the decode workers of one proxy."""

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        policy: str,
        control: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """control: by URL of the prefill worker.

        Raises ConfigError for what is not a base URL, or is listed twice on one side, and for control addresses of
        others.
        """
        where = {url.rstrip("/"): addresses for url, addresses in (control or {}).items()}
        self.workers = {
            Leg.PREFILL: [Worker(url, Leg.PREFILL, where.pop(url, ())) for url in _base_urls("prefill", prefill)],
            Leg.DECODE: [Worker(url, Leg.DECODE) for url in _base_urls("decode", decode)],
        }
        if where:
            raise ConfigError(f"control: {', '.join(where)} is not listed under prefill")
        self._policy = POLICIES[policy]
        self._turn = 0

    @property
    def all(self) -> list[Worker]:
        return self.workers[Leg.PREFILL] + self.workers[Leg.DECODE]

    def usable(self, side: Leg, model: str | None = None) -> list[Worker]:
        """Workers that may get requests, for one model or any."""
        return [
            worker
            for worker in self.workers[side]
            if worker.state is State.OK and worker.health and worker.health.serves(model)
        ]

    def models(self) -> list[str]:
        """Models that some decode worker holds or, if it is away, held when it was last heard."""
        found = [
            worker.health
            for worker in self.workers[Leg.DECODE]
            if worker.health and worker.state is not State.WRONG_ROLE
        ]
        return sorted({name for health in found for name in (health.model, *health.aliases)})

    def choose(self, model: str, avoid: Set[str]) -> tuple[Worker | None, Worker | None]:
        """A (prefill, decode) pair for a request, None where no worker of that model may get it."""
        prefill, decode = self.usable(Leg.PREFILL, model), self.usable(Leg.DECODE, model)
        turn, self._turn = self._turn, self._turn + 1
        chosen = choose_pair(
            self._policy,
            [_candidate(worker) for worker in prefill],
            [_candidate(worker) for worker in decode],
            avoid=avoid,
            turn=turn,
        )
        return _of(chosen[0], prefill), _of(chosen[1], decode)


def _candidate(worker: Worker) -> Candidate:
    said = worker.health
    return Candidate(worker.key, worker.in_flight + (said.running + said.waiting if said else 0))


def _of(candidate: Candidate | None, workers: list[Worker]) -> Worker | None:
    return next((worker for worker in workers if candidate and worker.key == candidate.key), None)


def _base_urls(side: str, urls: Iterable[str]) -> list[str]:
    found: list[str] = []
    for text in urls:
        url = text.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{side}: {text!r} is not a base URL; write http://{text}")
        if url in found:
            raise ConfigError(f"{side}: {url} is listed twice")
        found.append(url)
    return found


async def watch(
    worker: Worker, session: aiohttp.ClientSession, dialect: Dialect, *, interval_s: float, timeout_s: float
) -> None:
    """Ask a worker for its health, every interval and when poked, until cancelled."""
    asking = Asking(session, worker.url, timeout_s)
    while True:
        worker.poke.clear()
        faults = worker.faults
        try:
            health = await dialect.look(asking, Known(worker.health, worker.state is State.OK))
            worker.heard(health, faults_when_asked=faults)
        except TimeoutError:
            worker.silent(timeout_s)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            worker.unreachable(f"GET /health: {describe(error)}")
        try:
            async with asyncio.timeout(interval_s):
                await worker.poke.wait()
        except TimeoutError:
            continue
