"""What all requests of one proxy share: workers, connections, queue, books."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink import threads

from .alarms import Alarms
from .decisions import ToldLately
from .flow import Limits
from .retries import RetryBudget

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from pdlink._http import SocketPoller
    from pdlink.config import ProxyConfig

    from .decision_log import DecisionLog
    from .dialects import Dialect
    from .http_client import HttpClient
    from .metrics import Metrics
    from .pools import Pools
    from .queue import Queue
    from .records import Records
    from .sessions import KnownSessions
    from .spans import Tracer
    from .steps import Leg
    from .tokenizing import Tokenizing


@dataclass(slots=True, eq=False)
class Shared:
    """Shared by all requests of one proxy."""

    config: ProxyConfig
    dialect: Dialect
    pools: Pools
    metrics: Metrics
    clients: dict[Leg, HttpClient]
    """One for each leg: if connections are bounded, decode legs that wait for KV must not hold the connections of
    their prefill legs."""
    poller: SocketPoller
    """Reads the connections of clients and workers."""
    control: HttpClient
    """For health and stop, which must get through when all connections of the legs are in use."""
    records: Records
    queue: Queue
    """Requests that wait for workers; `Waiting.item` is the `Request`."""
    sessions: KnownSessions
    decision_log: DecisionLog | None = None
    tracer: Tracer | None = None
    tokenizing: Tokenizing | None = None
    """Where texts may be tokenised for placement."""
    told: ToldLately = field(default_factory=ToldLately)
    retries: RetryBudget = field(default_factory=RetryBudget)
    alarms: Alarms = field(default_factory=Alarms)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """Asking asyncio for it takes a system call in CPython 3.11."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Health watchers, and stop calls."""
    limits: Limits = field(init=False)
    max_body_nbytes: int = field(init=False)
    """Of a request, and of an answer in one piece. As the next three a setting that each request asks for: a field of
    `config` takes ten times as long to read."""
    decision_share: float = field(init=False)
    recover_streams: int = field(init=False)
    may_decode_alone: bool = field(init=False)
    """Decode may compute the prompt of a request that has no prefill leg, or has lost it."""
    _serving: bool = False

    def __post_init__(self) -> None:
        self.adopt(self.config)

    def adopt(self, config: ProxyConfig) -> None:
        """These are the settings from now on."""
        self.config = config
        self.max_body_nbytes, self.decision_share = config.max_body_nbytes, config.decision_share
        self.recover_streams = config.recover_streams
        self.queue.size, self.queue.weights = config.queue_size, config.shares
        self.pools.limit_prefill(config.prefill_queue_tokens)
        self.may_decode_alone = config.on_no_prefill == "decode_only" and self.dialect.decode_computes
        self.limits = Limits(
            retries=config.retries,
            first_byte_s=config.first_byte_timeout_s,
            idle_s=config.idle_timeout_s,
            request_s=config.request_timeout_s,
            decode_alone=self.may_decode_alone,
        )

    def serve_queue(self) -> None:
        """Something has changed for those who wait: place them soon."""
        if self.queue.num and not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve_queue)

    def _serve_queue(self) -> None:
        self._serving = False
        while self.queue.serve(lambda waiting: waiting.item.place_now(), self.loop.time()):
            pass

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this in the background; cancelled when the proxy ends."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        threads.tell_failure(task)
