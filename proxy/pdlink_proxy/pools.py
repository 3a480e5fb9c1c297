"""The workers, their last health, and whether they may get requests.

A worker is known by its URL. Its health is polled all the time; a leg's refused or broken connection takes it out at
once, and the next good health, asked for *after* that, takes it back. So there is no list of banned workers to clear
by hand, and a client's mistake never counts against a worker. The same URL with another epoch is another incarnation.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec

from pdlink.errors import ConfigError, WorkerKeyRefused
from pdlink.events import PeerChanged, emit

from .dialects import Health, Known, PrefillAddress
from .fleet import Fleet, PlacementRequest, WorkerState, compare
from .placement import Placed, Placer, Queued, Refused
from .refusals import Refusals
from .steps import Leg
from .upstream import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .dialects import Dialect
    from .refusals import RefusedPair
    from .upstream import Asking

log = logging.getLogger("pdlink.proxy")

_SILENCES_UNTIL_UNREACHABLE = 2
"""One late answer may be a busy host; one refused connection is enough."""

QUIET_S = 10.0
"""No warning about unreachable workers for this long after the proxy's start (workers may still load their models),
and after a worker reports that it drains."""

_COMPARE_S = 0.5
"""Between two comparisons of the workers' speeds."""

_MAX_REASON_CHARS = 400
_MAX_NAME_CHARS = 256


class State(enum.Enum):
    UNKNOWN = "unknown"
    """Has not answered yet."""
    OK = "ok"
    DRAINING = "draining"
    """Reports that it finishes its requests and takes no others."""
    FAILED = "failed"
    """Reports that it cannot serve."""
    UNREACHABLE = "unreachable"
    WRONG_ROLE = "wrong role"
    INVALID = "invalid"
    """Its answer is not a worker's."""
    BARRED = "refuses our key"


@dataclass(slots=True, eq=False)
class Worker:
    """Everything known about one worker. Only the event loop's thread touches it."""

    url: str
    side: Leg
    label: str = ""
    """Its place in this proxy's list, "prefill-0"; clients see this, not the URL."""
    control: tuple[str, ...] = ()
    """Configured control addresses, by rank, if its health does not report them."""
    state: State = State.UNKNOWN
    reason: str = "has not answered yet"
    health: Health | None = None
    """The last valid one, kept while the worker is away: it names its model."""
    heard_s: float | None = None
    """time.monotonic of the last answer."""
    in_flight: int = 0
    """Our running legs."""
    incarnations: int = 0
    faults: int = 0
    """Legs that found the worker gone."""
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it to ask for health now."""
    quiet_until_s: float = field(default_factory=lambda: time.monotonic() + QUIET_S)
    """Until then its absence is expected."""
    work: WorkerState = field(default_factory=lambda: WorkerState(""))
    """What this incarnation has to do."""
    _silences: int = 0
    _warned_s: float | None = None
    """time.monotonic of the warning, until the worker is back."""

    @property
    def key(self) -> str:
        """Names this incarnation: a restarted worker is another one."""
        return f"{self.url}#{self.health.epoch if self.health else ''}"

    @property
    def name(self) -> str:
        """For people: its reported name if that is printable, else its URL."""
        said = self.health.name if self.health else ""
        return said if said.isprintable() and 0 < len(said) <= _MAX_NAME_CHARS else self.url

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its control addresses, without keys."""
        said = self.control or (self.health and self.health.control) or ()
        return tuple(address.partition("?")[0] for address in ((said,) if isinstance(said, str) else said))

    @property
    def address(self) -> PrefillAddress:
        """Its name and control address for decode. Its health must be known."""
        if self.health is None:
            raise RuntimeError(f"{self.url} has not been heard")
        control = self.control or self.health.control or ""
        return PrefillAddress(self.health.name, control[0] if len(control) == 1 else control)

    def heard(self, health: Health | str, *, faults_when_asked: int) -> None:
        """Take in its health, or the text why its answer is invalid."""
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
        if health.role not in (self.side.value, "both", None):
            self._become(State.WRONG_ROLE, f"listed as a {self.side.value} worker, but its role is {health.role!r}")
        elif health.status == "draining":
            self.quiet_until_s = max(self.quiet_until_s, self.heard_s + QUIET_S)
            self._become(State.DRAINING, "is draining")
        elif health.status != "ok":
            self._become(State.FAILED, f"reports status {health.status!r}")
        elif self.faults == faults_when_asked:
            self.quiet_until_s = min(self.quiet_until_s, self.heard_s)
            self._become(State.OK, "")

    def silent(self, timeout_s: float) -> None:
        """It did not answer GET /health in time."""
        self._silences += 1
        if self._silences >= _SILENCES_UNTIL_UNREACHABLE:
            self._become(
                State.UNREACHABLE, f"no answer to GET /health within {timeout_s:g} s, {self._silences} times"
            )

    def unreachable(self, reason: str) -> None:
        """GET /health failed."""
        self._become(State.UNREACHABLE, reason)

    def fault(self, reason: str) -> None:
        """A leg found it gone: ask for its health at once."""
        self.faults += 1
        self._become(State.UNREACHABLE, reason)
        self.poke.set()

    def barred(self, reason: str) -> None:
        """It refuses this proxy's key, until the next health that it answers."""
        self.heard_s = time.monotonic()
        self._silences = 0
        self._become(State.BARRED, reason)

    def _become(self, state: State, reason: str) -> None:
        reason = reason[:_MAX_REASON_CHARS]
        changed = state is not self.state
        self.state, self.reason = state, reason
        if changed:
            emit(PeerChanged(peer=self.url, state=state.value, reason=reason))
        now, warned_s = time.monotonic(), self._warned_s
        if state is State.OK:
            self._warned_s = None
            if changed:  # at the level of its loss
                self._log(*((logging.INFO, "") if warned_s is None else (logging.WARNING, " again")))
            return
        expected = state is State.DRAINING or (state is State.UNREACHABLE and now < self.quiet_until_s)
        if not expected and (changed or warned_s is None):
            self._warned_s = now if warned_s is None else warned_s
            self._log(logging.WARNING, f" ({reason})")
        elif changed:
            self._log(logging.INFO, f" ({reason})")

    def _log(self, level: int, more: str) -> None:
        log.log(level, "%s worker %s: %s%s", self.side.value, self.url, self.state.value, more)

    def describe(self) -> dict[str, Any]:
        """Its entry in the proxy's GET /health."""
        now = time.monotonic()
        health = msgspec.structs.asdict(self.health) if self.health else None
        if health is not None and self.control:
            health["control"] = self.control
        return {
            "label": self.label,
            "url": self.url,
            "state": self.state.value,
            "reason": self.reason,
            "heard_s_ago": None if self.heard_s is None else round(now - self.heard_s, 3),
            "in_flight": self.in_flight,
            "incarnations": self.incarnations,
            "health": health,
        }


class Pools:
    """The prefill and the decode workers of one proxy."""

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        placer: Placer,
        control: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """control: addresses by URL of the prefill worker.

        Raises ConfigError for an invalid or repeated base URL, and for control addresses of unknown workers.
        """
        where = {url.rstrip("/"): addresses for url, addresses in (control or {}).items()}
        self.workers = {
            side: [
                Worker(url, side, f"{side.value}-{index}", where.pop(url, ()))
                for index, url in enumerate(_base_urls(side.value, urls))
            ]
            for side, urls in ((Leg.PREFILL, prefill), (Leg.DECODE, decode))
        }
        if where:
            raise ConfigError(f"control: {', '.join(where)} is not listed under prefill")
        self._placer = placer
        self._compared_s = 0.0
        self.refusals = Refusals()
        self._alone: RefusedPair | None = None
        """Why decode works alone although prefill is healthy; logged once."""

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
        """Models of the decode workers; of an absent worker, its last known ones."""
        found = [
            worker.health
            for worker in self.workers[Leg.DECODE]
            if worker.health and worker.state is not State.WRONG_ROLE
        ]
        return sorted({name for health in found for name in (health.model, *health.aliases)})

    def heard(self, worker: Worker) -> None:
        """A worker's health has been updated."""
        other = Leg.DECODE if worker.side is Leg.PREFILL else Leg.PREFILL
        self.refusals.heard(worker, self.workers[other])
        self._update(worker)
        if self._alone is not None and self.refusals.known(self._alone.prefill, self._alone.decode) is None:
            self._tell_alone(None)

    def barred(self, side: Leg) -> bool:
        """Whether some worker refuses this proxy's key."""
        return any(worker.state is State.BARRED for worker in self.workers[side])

    def leaving(self) -> None:
        """The proxy ends, and usually its workers with it: expect their absence."""
        for worker in self.all:
            worker.quiet_until_s = float("inf")

    def _update(self, worker: Worker) -> None:
        """What a worker has said of its load."""
        work, said = worker.work, worker.health
        if work.key != worker.key:
            self._placer.forget(work.key)
            worker.work = work = WorkerState(worker.key)
        if said is None:
            return
        free = said.free_blocks * said.block_tokens if said.free_blocks is not None and said.block_tokens else None
        work.pool_tokens = said.num_blocks * said.block_tokens if said.num_blocks and said.block_tokens else None
        work.heard(work.requests if said.running is None else said.running + (said.waiting or 0), free)
        if time.monotonic() - self._compared_s > _COMPARE_S:
            self._compared_s = time.monotonic()
            for side in Leg:
                compare([each.work for each in self.workers[side]])

    def choose(self, request: PlacementRequest, *, needs_prefill: bool, full: bool) -> Choice | Queued | Refused:
        """A pair for a request. full: see `Placer.place`."""
        prefill, decode = self.usable(Leg.PREFILL, request.model), self.usable(Leg.DECODE, request.model)
        fleet = Fleet(
            [worker.work for worker in prefill],
            [worker.work for worker in decode],
            self.refusals.now() if len(self.refusals) else frozenset(),
            frozenset() if prefill and decode else frozenset(side.value for side in Leg if self.barred(side)),
            needs_prefill,
        )
        placed = self._placer.place(request, fleet, full=full)
        if not isinstance(placed, Placed):
            return placed
        to = next(worker for worker in decode if worker.work is placed.decode)
        if placed.prefill is not None:
            one = next(worker for worker in prefill if worker.work is placed.prefill)
            if not self.refusals.try_again(one, to):
                self._tell_alone(None)
            return Choice(one, to, placed.cached_tokens)
        refused = self.refusals.known(prefill[0], to) if placed.misfit else None
        if placed.misfit:
            self._tell_alone(refused)
        return Choice(None, to, refused=refused)

    def sent(self, request: PlacementRequest, worker: Worker, tokens: int, now: float) -> WorkerState:
        """A leg with so many tokens to do leaves for the worker; the caller says when it is `finished`."""
        self._placer.sent(request, worker.side.value, worker.work)
        worker.work.sent(tokens, now)
        return worker.work

    def _tell_alone(self, refused: RefusedPair | None) -> None:
        if refused is not None and self._alone is None:
            log.warning("no pair of workers fits together, so decode computes prompts itself: %s", refused)
        elif refused is None and self._alone is not None:
            log.warning("a pair of workers fits together again, so prefill computes prompts")
        self._alone = refused


class Choice(NamedTuple):
    """Workers for a request."""

    prefill: Worker | None
    decode: Worker
    cached_tokens: int = 0
    """Of the prompt, expected at the prefill worker."""
    refused: RefusedPair | None = None
    """Why there is no prefill although a prefill worker is healthy."""


def _base_urls(side: str, urls: Iterable[str]) -> list[str]:
    found: list[str] = []
    for text in urls:
        url = text.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{side}: got {text!r}; a base URL begins with http:// or https://; write http://{text}"
            )
        if url in found:
            raise ConfigError(f"{side}: {url} is listed twice")
        found.append(url)
    return found


async def watch(
    pools: Pools, worker: Worker, asking: Asking, dialect: Dialect, interval_s: float, heard: Callable[[], None]
) -> None:
    """Poll a worker's health, every interval and when poked, until cancelled; call `heard` after each look."""
    while True:
        worker.poke.clear()
        faults = worker.faults
        try:
            health = await dialect.look(asking, Known(worker.health, worker.state is State.OK))
            worker.heard(health, faults_when_asked=faults)
            pools.heard(worker)
        except WorkerKeyRefused as error:
            worker.barred(str(error))
        except TimeoutError:
            worker.silent(asking.timeout_s)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            worker.unreachable(f"GET /health: {describe(error)}")
        heard()
        try:
            async with asyncio.timeout(interval_s):
                await worker.poke.wait()
        except TimeoutError:
            continue
