"""One worker: its last health, whether it may get requests, and how its legs fare.

A worker is known by its URL, and one of several engines behind it also by its number. A leg's refused or broken
connection removes it at once, until its next successful health check. So there is no list of banned workers to clear
by hand, and a client's mistake never counts against a worker. The same URL with another epoch is another incarnation.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdlink.api.legs import PrefillAddress
from pdlink.breaker import Breaker
from pdlink.events import PeerChanged, emit
from pdlink.few_lines import FewLines

from .engines import id_of
from .outliers import Outlier
from .table import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdlink.api.health import Health

    from .steps import Leg

log = logging.getLogger("pdlink.proxy")

_SILENCES_UNTIL_UNREACHABLE = 2
"""One late answer may be a busy host; one refused connection is enough."""

SILENT_S = 30.0
"""A worker that has answered no probe for so long has lost its legs: a stopped process closes no connection."""

QUIET_S = 10.0
"""No warning about a worker that cannot be reached for this long after it has reported that it drains."""

FAILURES = 5
"""Legs of a worker that fail in a row, before it is left alone."""

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


_NOWHERE = PrefillAddress("")


class Running(Protocol):
    """A leg that runs at its worker."""

    def gone(self, reason: str) -> None:
        """The worker is not there any more."""

    @property
    def passed_s(self) -> float:
        """When an event of its stream has passed to the client last; 0 if none has."""


@dataclass(slots=True, eq=False)
class Worker:
    """Everything known about one worker. Only the event loop's thread touches it."""

    url: str
    """Where it is sent to; engines of one server share it."""
    side: Leg
    label: str = ""
    """Its place in this proxy's list, "prefill-0"; clients see this, not the URL."""
    engine: int | None = None
    """Which of the data-parallel engines behind its URL it is; None of a server that is one worker."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """More headers of its legs."""
    control: tuple[str, ...] = ()
    """Configured control addresses, by rank, if its health does not report them."""
    listed_as_draining: bool = False
    """It gets no new requests."""
    state: State = State.UNKNOWN
    reason: str = "has not answered yet"
    health: Health | None = None
    """The last valid one, kept while the worker is away: it names its model."""
    address: PrefillAddress = _NOWHERE
    """Its name and control address for decode, once it is heard."""
    link: dict[str, Any] = field(default_factory=dict)
    """What its dialect must know to reach its KV: of its health."""
    heard_s: float | None = None
    """time.monotonic of the last answer."""
    spoke_s: float = -math.inf
    """The same of its legs, where the engine has answered well."""
    legs: set[Running] = field(default_factory=set)
    """That run, to be told that it is gone."""
    passing: int = 0
    """Requests that it serves without legs."""
    incarnations: int = 0
    faults: int = 0
    """Legs that found the worker gone."""
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it to ask for health now."""
    quiet_until_s: float = 0.0
    """Until then its absence is expected."""
    told: FewLines = field(default_factory=FewLines)
    """Lines about failures of its legs."""
    breaker: Breaker = field(default_factory=lambda: Breaker(math.inf, failures=FAILURES))
    """Of its legs: it may answer GET /health and fail all the same."""
    outlier: Outlier = field(default_factory=Outlier)
    """How they fare beside those of its peers."""
    on_trial: bool = False
    """Its breaker or its outlier may keep requests away."""
    changed: Callable[[], None] | None = None
    """Called when it is another question whether, or for which model, it may get requests."""
    cell: str = ""
    store: str = ""
    """Configured address of the store that it keeps KV in, if its health does not report that. It may be a process
    that stays while the worker is away."""
    plain: bool = False
    """It computes prompts and answers by itself, and exchanges no KV."""
    routes: frozenset[str] | None = None
    """Paths that this incarnation lists in its /openapi.json, empty if it lists none; None until it is asked."""
    lacks: set[str] = field(default_factory=set)
    """Paths that it does not have, as was found by asking."""
    work: WorkerState = field(default_factory=lambda: WorkerState(""))
    """What this incarnation has to do."""
    _silences: int = 0
    _silent_since_s: float | None = None
    """When the first probe left that it has not answered."""
    _warned_s: float | None = None
    """time.monotonic of the warning, until the worker is back."""

    @property
    def id(self) -> str:
        """Names it among the workers of its side: its URL, and its engine if that has several."""
        return id_of(self.url, self.engine)

    @property
    def key(self) -> str:
        """Names this incarnation: a restarted worker is another one."""
        return f"{self.id}#{self.health.epoch if self.health else ''}"

    @property
    def in_flight(self) -> int:
        """What it runs for us."""
        return len(self.legs) + self.passing

    @property
    def name(self) -> str:
        """For people: its reported name if that is printable, else its URL."""
        said = self.health.name if self.health else ""
        name = said if said.isprintable() and 0 < len(said) <= _MAX_NAME_CHARS else self.url
        return name if self.engine is None else f"{name}/dp{self.engine}"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its control addresses, without keys."""
        said = self.control or (self.health and self.health.control) or ()
        return tuple(address.partition("?")[0] for address in ((said,) if isinstance(said, str) else said))

    def controlled_at(self, control: tuple[str, ...]) -> None:
        """These are its control addresses, whatever its health reports."""
        self.control = control
        self._name_address()

    def _name_address(self) -> None:
        if (said := self.health) is not None:
            control = self.control or said.control or ""
            self.address = PrefillAddress(control[0] if len(control) == 1 else control, said.name, self.engine)

    def spoke_since(self, at_s: float) -> bool:
        """Whether a leg of its was answered well since then, or an event of its stream passed."""
        return self.spoke_s > at_s or any(leg.passed_s > at_s for leg in self.legs)

    def heard(self, health: Health | str, *, faults_when_asked: int) -> None:
        """Take in its health, or the text why its answer is invalid."""
        self.heard_s = time.monotonic()
        self._answered()
        if isinstance(health, str):
            self._become(State.INVALID, health)
            return
        if self.health is None or self.health.epoch != health.epoch:
            self.incarnations += 1
            if self.incarnations > 1:
                log.info("%s worker %s was restarted", self.side.value, self.id)
            self.breaker, self.outlier = Breaker(math.inf, failures=FAILURES), Outlier()
            self.routes, self.lacks = None, set()
            self.judged()
        known, self.health, self.link = self.health, health, health.link
        self._name_address()
        if known is None or (known.model, known.aliases) != (health.model, health.aliases):
            self._tell()
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

    def judged(self) -> None:
        """A leg of it has ended, and its breaker and its outlier have heard of that."""
        on_trial = self.outlier.out or self.breaker.keeps_away(0.0)
        if on_trial is not self.on_trial:
            self.on_trial = on_trial
            self._tell()

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed()

    def silent(self, asked_s: float) -> None:
        """It did not answer GET /health in time. asked_s: time.monotonic of the probe."""
        self._silences += 1
        since_s = self._silent_since_s = asked_s if self._silent_since_s is None else self._silent_since_s
        now = time.monotonic()
        what = f"no answer to GET /health within {now - asked_s:.3g} s"
        if self._silences >= _SILENCES_UNTIL_UNREACHABLE:
            self._become(State.UNREACHABLE, f"{what}, {self._silences} times")
        if self._silences >= _SILENCES_UNTIL_UNREACHABLE and now - since_s >= SILENT_S:
            for leg in tuple(self.legs):  # a stopped host ends no connection: nobody else would tell them
                leg.gone(f"no answer to probes for {now - since_s:.3g} s")

    def _answered(self) -> None:
        self._silences, self._silent_since_s = 0, None

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
        self._answered()
        self._become(State.BARRED, reason)

    def _become(self, state: State, reason: str) -> None:
        reason = reason[:_MAX_REASON_CHARS]
        changed = state is not self.state
        self.state, self.reason, self.work.away = state, reason, state is State.UNREACHABLE
        if changed:
            self._tell()
            emit(PeerChanged(peer=self.id, state=state.value, reason=reason))
        now, warned_s = time.monotonic(), self._warned_s
        if state is State.OK:
            self._warned_s = None
            if changed:  # at the level of its loss
                self._log(*((logging.INFO, "") if warned_s is None else (logging.WARNING, " again")))
            return
        quiet = state is State.UNREACHABLE and now < self.quiet_until_s
        expected = quiet or state is State.DRAINING
        if not expected and (changed or warned_s is None):
            self._warned_s = now if warned_s is None else warned_s
            self._log(logging.WARNING, f" ({reason})")
        elif changed:
            self._log(logging.INFO, f" ({reason})")

    def _log(self, level: int, more: str) -> None:
        log.log(level, "%s worker %s: %s%s", self.side.value, self.id, self.state.value, more)

    def describe(self) -> dict[str, Any]:
        """Its entry in the proxy's GET /health."""
        now = time.monotonic()
        health = msgspec.structs.asdict(self.health) if self.health else None
        if health is not None and self.control:
            health["control"] = self.control
        return {
            "label": self.label,
            "url": self.url,
            "data_parallel_rank": self.engine,
            "state": self.state.value if not self.listed_as_draining else State.DRAINING.value,
            "reason": self.reason,
            "heard_s_ago": None if self.heard_s is None else round(now - self.heard_s, 3),
            "in_flight": self.in_flight,
            "plain": self.plain,
            "cell": self.cell,
            "fails": self.breaker.keeps_away(now),
            "left_out": self.outlier.why,
            "no_kv_events": self.work.silence,
            "incarnations": self.incarnations,
            "health": health,
        }
