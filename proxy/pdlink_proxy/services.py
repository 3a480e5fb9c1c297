"""What the routes of one proxy share: its workers, its books, who may enter, and what runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import platform
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdlink.api.health import UNTOLD
from pdlink.config import ProxyConfig
from pdlink.extras import needed
from pdlink.observe.otlp import SpanSender

from .access import worker_headers
from .decision_log import DecisionLog
from .decisions import decision
from .dialects import DIALECTS
from .discovery.joined import Discovery
from .entry import Entry
from .membership import Membership, from_settings
from .metrics import Metrics
from .page.memory import PageMemory
from .placement import Alone, Placer
from .pools import Pools
from .records import MAX_RECORDS, Records
from .sessions import KnownSessions
from .siblings import Doing
from .steps import Leg
from .upstream import Asking
from .watching import watch
from .worker import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .decisions import Decided, Decision
    from .page.reports import WorkerReports
    from .records import RequestRecord
    from .shared import Shared
    from .siblings import Answer, Siblings
    from .worker import Worker


class Endable(Protocol):
    """A running request."""

    request_id: str

    @property
    def decided(self) -> Sequence[Decided]:
        """What was decided about it so far."""
        ...

    def shut_down(self) -> None:
        """End it now."""
        ...


class Services:
    """Of one proxy, from before it serves until its end."""

    def __init__(self, config: ProxyConfig, siblings: Siblings | None = None) -> None:
        """siblings: the other processes of this proxy. Raises ConfigError for an invalid worker URL, and for a key
        file without keys."""
        self.config, self.siblings = config, siblings
        self.dialect = DIALECTS[config.dialect]
        alone = Alone(config.decode_alone_tokens, config.decode_alone_idle_tokens)
        placer = Placer(
            config.policy_of("prefill"),
            config.policy_of("decode"),
            alone,
            routers=config.routers,
            salt=int.from_bytes(os.urandom(8)) if config.routers > 1 else 0,
        )
        self.pools = Pools(placer, most_left_out=config.eject_share)
        members = from_settings(config, self.dialect)
        self.pools.replace(members)
        self.membership = Membership(self.pools, self._watch, self.dialect, members=members)
        self.membership.found_by = ", ".join(config.discover)
        self.discovery = Discovery.of(config.discover, self.dialect, self.membership.replace, members)
        self.worker_headers = worker_headers(config, bearer=self.dialect.key_as_bearer)
        keyed = "Authorization" in self.worker_headers
        self.entry = Entry(config, self.pools, keyed=keyed, unserved=self.dialect.unserved)
        self.metrics = Metrics()
        self.metrics.before_reading(self._take_stock)
        self.decision_log = DecisionLog(config.decision_log) if config.decision_log is not None else None
        self.records = Records()
        self.sessions = KnownSessions()
        self.memory = PageMemory()
        self.spans: SpanSender | None = None
        """To the collector, if there is one."""
        if config.tracing.endpoint is not None:
            with needed():
                self.spans = SpanSender(config.tracing, "pdlink-proxy", f"{platform.node()}-{os.getpid()}")
        self.started = int(time.time())
        self._shared: Shared | None = None
        self.reports: WorkerReports
        """Of the workers, once the app runs."""
        self.requests: set[Endable] = set()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def shared(self) -> Shared:
        """What all requests share, once the app runs."""
        if self._shared is None:
            raise RuntimeError("used before the app was started")
        return self._shared

    def opened(self, shared: Shared, reports: WorkerReports) -> None:
        """The app runs."""
        self._shared, self.reports = shared, reports

    def adopt(self, config: ProxyConfig, *, limits_anew: bool) -> None:
        """These are the settings from now on."""
        self.config = config
        if self._shared is not None:
            self._shared.adopt(config)
        self.entry.adopt(config, anew=limits_anew)

    def _watch(self, workers: Sequence[Worker]) -> asyncio.Task[None]:
        shared, config = self.shared, self.config
        asking = Asking(shared.control, workers[0].url, config.connect_timeout_s)
        return shared.spawn(
            watch(self.pools, workers, asking, self.dialect, config.health_interval_s, shared.serve_queue)
        )

    async def members_changed(self) -> None:
        """An operator has changed the workers: the other processes read it, too."""
        if self.siblings is not None:
            self.membership.save()
            await self.siblings.ask_all("members")

    @contextlib.contextmanager
    def running(self, request: Endable) -> Iterator[None]:
        """A request runs: the end of the proxy waits for it, and ends it if it takes too long."""
        self.requests.add(request)
        self.idle.clear()
        try:
            yield
        finally:
            self._no_more(request)

    def _no_more(self, request: Endable) -> None:
        self.requests.discard(request)
        if not self.requests:
            self.idle.set()

    @property
    def num_running(self) -> int:
        return len(self.requests)

    @property
    def num_queued(self) -> int:
        return len(self._shared.queue) if self._shared else 0

    def standing(self) -> tuple[str, str]:
        """The status, and the reason if it is not plainly ok."""
        if self.entry.draining:
            return "draining", "the proxy is shutting down"
        missing = [side for side in Leg if not self.pools.usable(side)]
        if missing == [Leg.PREFILL] and self.pools.has_plain():
            return "ok", "no healthy prefill worker: plain servers serve all"
        alone = missing == [Leg.PREFILL] and self.config.on_no_prefill == "decode_only"
        if alone and any(worker.state is State.UNKNOWN for worker in self.pools.workers[Leg.PREFILL]):
            alone = False  # not known yet
        if missing and not alone:
            reason = f"no healthy {' and no healthy '.join(side.value for side in missing)} worker"
            if any(self.pools.barred(side) for side in missing):
                reason += ": its workers refuse this proxy's key, see worker_key_file"
            return "unavailable", reason
        if len(self.pools.refusals):
            return "degraded", f"degraded: {'; '.join(map(str, itertools.islice(self.pools.refusals, 8)))}"
        never = [each for each in self.pools.all if each.state is State.UNREACHABLE and each.health is None]
        if never:
            words = [f"{each.side.value} worker {each.id} has never answered: {each.reason}" for each in never[:8]]
            return "degraded", f"degraded: {'; '.join(words)}"
        if stranded := [each for each in self.pools.mismatches if each.stranded]:
            return "degraded", f"degraded: {'; '.join(map(str, stranded[:8]))}"
        return "ok", "no healthy prefill worker: decode computes prompts itself" if alone else ""

    @property
    def record_share(self) -> int:
        """Records of one process, where those of all are to be as many as one process keeps."""
        return MAX_RECORDS // (self.siblings.processes if self.siblings is not None else 1)

    async def beside(self, num_records: int = 0) -> dict[int, Doing]:
        """By number, what the other processes of this proxy do now that answer, each with its newest records."""
        if self.siblings is None:
            return {}
        found = await self.siblings.ask_all("doing", num_records)
        return {number: msgspec.convert(each, Doing) for number, each in found.items()}

    def num_doing(self, beside: Mapping[int, Doing]) -> tuple[int, int]:
        """How many requests run, and wait, in all processes."""
        running = self.num_running + sum(each.running for each in beside.values())
        return running, self.num_queued + sum(each.queued for each in beside.values())

    def recorded(
        self, beside: Mapping[int, Doing], since_s: float = -math.inf, least: int = 0
    ) -> Sequence[RequestRecord]:
        """The last requests of all processes, oldest first. beside: with records. since_s, least: older ones than
        these are not needed (`Records.since`)."""
        here = [each.record() for each in self.records.since(since_s, least)]
        found = [*here, *(record for each in beside.values() for record in each.records)]
        return sorted(found, key=lambda record: record.at_s) if beside else here

    def decisions_of(self, request_id: str | None = None, only: str | None = None) -> list[Decision]:
        """Those here of one request, or of all; oldest first. only: a key that sees its own requests alone."""
        ended = self.records.newest() if request_id is None else self.records.of(request_id)
        found = [said for each in ended for said in each.decisions()]
        running = [each for each in self.requests if request_id in (None, each.request_id)]
        found += [decision(each.request_id, said) for each in running for said in each.decided]
        found.sort(key=lambda each: each.at_s)
        return found if only is None else [each for each in found if self.entry.owns(only, each.request_id)]

    async def owns(self, key: str, request_id: str) -> bool:
        """Whether the request of this id came with this key, and with no other one, to any process of this proxy."""
        found = {self.entry.owns(key, request_id)}
        if self.siblings is not None:  # an answer of None is left out
            found |= set((await self.siblings.ask_all("owns", [key, request_id])).values())
        return True in found and False not in found

    def described(self, side: Leg, beside: Mapping[int, Doing], *, in_full: bool = True) -> list[dict[str, Any]]:
        """The workers of one side, with the legs of all processes. in_full: with why their tiers fail, which may name
        paths and hosts."""
        found = []
        for worker in self.pools.workers[side]:
            said = worker.describe()
            if not in_full and said["health"] is not None:
                said["health"]["problems"] = dict.fromkeys(said["health"]["problems"], UNTOLD)
            said["in_flight"] += sum(each.in_flight.get(f"{side.value} {worker.id}", 0) for each in beside.values())
            found.append(said)
        return found

    def _take_stock(self) -> None:
        """Bring the gauges up to date."""
        legs = {(worker.id, worker.side.value): worker for worker in self.pools.all}
        self.metrics.healthy.replace({leg: worker.state is State.OK for leg, worker in legs.items()})
        self.metrics.in_flight.replace({leg: worker.in_flight for leg, worker in legs.items()})
        self.metrics.left_out.replace({leg: worker.outlier.out for leg, worker in legs.items()})
        self.metrics.without_events.replace({leg: bool(worker.work.silence) for leg, worker in legs.items()})
        self.metrics.queued.set(self.num_queued)
        if self.decision_log is not None:
            self.metrics.log_dropped.set(self.decision_log.num_dropped)
        if self.spans is not None:
            self.metrics.spans_dropped.set(self.spans.num_dropped)
        self.metrics.known_blocks.set(len(self.pools.kv_events.index))
        self.metrics.known_nbytes.set(self.pools.kv_events.index.nbytes)

    # ---- for the other processes of this proxy

    def answers(self, adopt: Callable[[ProxyConfig], None]) -> dict[str, Answer]:
        """By question, what answers it. adopt: takes new settings."""

        def doing(num_records: Any) -> object:
            in_flight = {f"{worker.side.value} {worker.id}": worker.in_flight for worker in self.pools.all}
            kept = [each.record() for each in self.records.newest(num_records)]
            return Doing(
                self.num_running, self.num_queued, in_flight=in_flight, records=kept, num_ended=self.records.num_ended
            )

        def members(_: Any) -> object:
            self.membership.read_kept()
            return True

        def adopted(said: Any) -> object:
            adopt(ProxyConfig.model_validate(said))
            return True

        return {
            "numbers": lambda _: self.metrics.numbers(),
            "doing": doing,
            "members": members,
            "adopt": adopted,
            "decisions": lambda asked: self.decisions_of(*asked),
            "owns": lambda asked: self.entry.owns(*asked),
            "end_session": lambda asked: self.sessions.end(*asked),
            "told": lambda request_id: self.shared.told.of(request_id),
        }
