"""The proxy's own code in virtual time: queue, admission, placement, breakers, flow, membership and health watchers
run as they do in a proxy. Only the workers' HTTP and the clients' connections are played.

Time jumps to the next timer when nothing else is left to do, so that minutes take milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import re
import selectors
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import msgspec

from pdlink._http import Headers, SocketPoller
from pdlink.api.health import Health
from pdlink.api.openai import COMPLETIONS, parse
from pdlink.config import ProxyConfig
from pdlink_proxy import (
    admission,
    attempt,
    leg,
    pools,
    refusals,
    request,
    watching,
)
from pdlink_proxy import worker as of_worker
from pdlink_proxy.client_answer import ClientAnswer
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.http_connection import NoConnection, WorkerGone
from pdlink_proxy.members import ListedWorker, Members
from pdlink_proxy.membership import Membership
from pdlink_proxy.metrics import Metrics
from pdlink_proxy.placement import Placer
from pdlink_proxy.queue import Queue
from pdlink_proxy.records import Records
from pdlink_proxy.request import Request
from pdlink_proxy.sessions import KnownSessions
from pdlink_proxy.shared import Shared
from pdlink_proxy.steps import Leg
from pdlink_proxy.upstream import Asking

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pdlink_proxy.dialects import KnownHealth
    from pdlink_proxy.http_client import HttpClient
    from pdlink_proxy.http_connection import AnswerListener

BLOCK_TOKENS = 16
CHARS_PER_TOKEN = 4
ANSWER = msgspec.json.encode({"choices": [{"text": "x"}]})
_JSON = Headers([(b"content-type", b"application/json")])
_HOUR_S = 3600.0


class _Jumps(selectors.SelectSelector):
    """Nobody sends anything: a wait is over at once, and the clock says that it took its time."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everybody waits for somebody else"
            self.now_s += timeout
            assert self.now_s < _HOUR_S, "something goes on without end"
        return found


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s


def in_virtual_time(play: Callable[[], Awaitable[None]]) -> None:
    """Run it to its end."""
    loop = _VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time)
    with ExitStack() as stack:
        for module in (
            admission,
            attempt,
            leg,
            pools,
            refusals,
            request,
            of_worker,
        ):
            stack.enter_context(patch.object(module, "time", clock))
        runner = stack.enter_context(asyncio.Runner(loop_factory=lambda: loop))
        runner.run(cast("Any", play()))


@dataclass(slots=True, eq=False)
class VirtualWorker:
    """What a worker does with a leg, by how it feels when the leg comes."""

    url: str
    side: Leg
    world: World
    pool_tokens: int = 20_000
    up: bool = True
    sick: bool = False
    """It answers GET /health, and 500 to every leg."""
    drains: bool = False
    """By its own account."""
    epoch: int = 1
    took: dict[_Answer, int] = field(default_factory=dict)
    """Tokens of the legs it works on."""
    num_taken: int = 0

    @property
    def free_tokens(self) -> int:
        return self.pool_tokens - sum(self.took.values())

    def health(self) -> Health:
        return Health(
            "draining" if self.drains else "ok",
            *(self.url, f"e{self.epoch}", self.side.value, "m", "tcp://h:1"),
            running=len(self.took),
            waiting=0,
            free_blocks=self.free_tokens // BLOCK_TOKENS,
            num_blocks=self.pool_tokens // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
        )

    def die(self) -> None:
        self.up = False
        for taken in list(self.took):
            taken.lose()

    def come_back(self) -> None:
        """As another incarnation."""
        self.up, self.sick, self.drains, self.epoch = True, False, False, self.epoch + 1


class _Answer:
    """One leg at its worker. A stand-in for `http_client.Request`."""

    def __init__(self, worker: VirtualWorker, listener: AnswerListener, tokens: int) -> None:
        self._worker, self._listener = worker, listener
        world, loop = worker.world, asyncio.get_running_loop()
        if not worker.up:
            self._timer = loop.call_later(0.001, lambda: self._listener.on_lost(NoConnection("refused")))
        elif worker.sick:
            self._timer = loop.call_later(0.01, self._end, 500, b"{}")
        else:
            worker.took[self] = tokens
            worker.num_taken += 1
            self._timer = loop.call_later(world.service_s(tokens), self._end, 200, ANSWER)

    def _end(self, status: int, body: bytes) -> None:
        self._worker.took.pop(self, None)
        self._listener.on_whole(status, _JSON, body)

    def lose(self) -> None:
        self.leave()
        error = WorkerGone(None, reused=False, answered=False)
        asyncio.get_running_loop().call_soon(self._listener.on_lost, error)

    def leave(self) -> None:
        self._timer.cancel()
        self._worker.took.pop(self, None)

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class Client:
    """One client and what it was told. A stand-in for its connection."""

    tenant: str
    tokens: int
    priority: int
    came_s: float
    said: bytes = b""
    left: bool = False
    placed_s: list[float] = field(default_factory=list)
    """When each of its decode legs left."""
    ended_s: float | None = None
    task: asyncio.Task[Any] | None = None
    writing_paused: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tenant}"}

    async def drain(self) -> None:
        pass

    @property
    def transport(self) -> Any:
        return SimpleNamespace(is_closing=lambda: self.left)

    @property
    def native(self) -> None:
        return None

    def write(self, head: bytes, body: bytes = b"") -> None:
        self.said += head + body

    def abort(self) -> None:
        pass

    @property
    def status(self) -> int:
        return int(self.said.split(b" ", 2)[1])

    @property
    def retry_after_s(self) -> int | None:
        found = re.search(rb"\r\nRetry-After: (\S+)\r\n", self.said)
        return int(found[1]) if found else None

    @property
    def message(self) -> str:
        return str(msgspec.json.decode(self.said.partition(b"\r\n\r\n")[2])["error"]["message"])


class World:
    """One proxy, its workers and its clients. An operator changes the workers by `list`."""

    def __init__(self, seed: int, num_prefill: int, num_decode: int, *, pool_tokens: int = 20_000, **config: Any):
        self.rng = random.Random(seed)
        sides = ((Leg.PREFILL, num_prefill), (Leg.DECODE, num_decode))
        urls = [(f"http://{side.value}-{number}", side) for side, num in sides for number in range(num)]
        self.workers = {url: VirtualWorker(url, side, self, pool_tokens) for url, side in urls}
        self.listed = dict.fromkeys(self.workers, False)
        """By URL of each worker that the operator lists, whether as draining."""
        self.heard_draining: set[str] = set()
        """The proxy has read that they drain."""
        self.config = ProxyConfig(**config)
        self.dialect = dataclasses.replace(DIALECTS["pdlink"], look=self._look)
        self.pools = pools.Pools(Placer(self.config.policy_of("prefill"), self.config.policy_of("decode")))
        self.clients: list[Client] = []
        self.placed: list[Client] = []
        """In the order in which they first got workers."""
        self.served_tokens: Counter[str] = Counter()
        """Of those, by tenant."""
        self.token_s = 1e-3
        """A worker's seconds for a token."""
        client = cast("HttpClient", self)
        clients = {Leg.PREFILL: client, Leg.DECODE: client}
        queue = Queue(self.config.queue_size, self.config.shares)
        self.shared = Shared(
            self.config,
            self.dialect,
            self.pools,
            Metrics(),
            clients,
            SocketPoller(),
            client,
            Records(),
            queue,
            KnownSessions(),
        )
        self.membership = Membership(self.pools, self._watch, self.dialect, changed=self.shared.serve_queue)
        self._by_id: dict[str, Client] = {}

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def service_s(self, tokens: int) -> float:
        return tokens * self.token_s

    def list(self) -> None:
        """Tell the proxy which workers there are."""
        found = {
            side: tuple(
                ListedWorker(url, drain=drain) for url, drain in self.listed.items() if self.workers[url].side is side
            )
            for side in Leg
        }
        self.membership.replace(Members(found[Leg.PREFILL], found[Leg.DECODE]))

    def ask(self, tenant: str = "t", *, tokens: int = 100, answer: int = 100, priority: int = 0) -> Client:
        """A client comes."""
        client = Client(tenant, tokens + answer, priority, self.now_s)
        self.clients.append(client)
        prompt = "x" * (CHARS_PER_TOKEN * (tokens - 1) - 2)
        body = {"model": "m", "prompt": prompt, "max_tokens": answer, "priority": priority}
        call = parse(COMPLETIONS, msgspec.json.encode(body))
        request_id = f"r{len(self.clients)}"
        self._by_id[request_id] = client
        over, headers = asyncio.Event(), {"X-Request-Id": request_id}
        running = Request(self.shared, ClientAnswer(client), call, headers, client.headers, over.set)

        async def run() -> None:
            try:
                running.begin()
                await over.wait()
            finally:
                running.leave()
                client.ended_s = self.now_s

        client.task = asyncio.create_task(run())
        return client

    def leave(self, client: Client) -> None:
        """The client closes its connection."""
        assert client.task is not None
        if not client.task.done():
            client.left = True
            client.task.cancel()

    async def end(self) -> None:
        """Every client has its answer; nothing is left of them anywhere."""
        for client in self.clients:
            assert client.task is not None
            with contextlib.suppress(asyncio.CancelledError):
                await client.task
        await asyncio.sleep(2 * leg.LET_GO_S)
        for client in self.clients:
            assert client.left or client.said, "it got no answer"
            if not client.left and client.status != 200:
                assert client.message
        assert len(self.shared.queue) == 0
        for worker in self.pools.all:
            assert (worker.in_flight, worker.work.requests, worker.work.tokens) == (0, 0, 0), worker.url
        for played in self.workers.values():
            assert not played.took
        for task in self.shared.tasks:
            task.cancel()
        await asyncio.gather(*self.shared.tasks, return_exceptions=True)

    # ---- a stand-in for HttpClient

    def start(self, _method: str, url: str, listener: Any, _body: bytes = b"", _lines: bytes = b"") -> Any:
        base = url.removesuffix(COMPLETIONS)
        worker = self.workers.get(base)
        if worker is None or not isinstance(listener, leg.WorkerLeg):
            return _Nobody(listener)  # a stop call
        assert base in self.listed, f"{base} was removed and gets a request"
        assert not self.listed[base], f"{base} is listed as draining and gets a request"
        assert base not in self.heard_draining, f"{base} says that it drains and gets a request"
        client = self._by_id[cast("Request", listener.hears).request_id]
        if worker.side is Leg.DECODE:
            if not client.placed_s:
                self.placed.append(client)
                self.served_tokens[client.tenant] += client.tokens
            client.placed_s.append(self.now_s)
        return _Answer(worker, listener, client.tokens)

    send = start

    def _watch(self, workers: Sequence[of_worker.Worker]) -> asyncio.Task[None]:
        asking = Asking(cast("HttpClient", self), workers[0].url, self.config.connect_timeout_s)
        heard, interval_s = self.shared.serve_queue, self.config.health_interval_s
        return self.shared.spawn(watching.watch(self.pools, workers, asking, self.dialect, interval_s, heard))

    async def _look(self, asking: Asking, _known: KnownHealth) -> Health | str:
        worker = self.workers[asking.url]
        await asyncio.sleep(0.001)
        if not worker.up:
            raise ConnectionRefusedError("refused")
        health = worker.health()
        (self.heard_draining.add if worker.drains else self.heard_draining.discard)(worker.url)
        return health


class _Nobody:
    def __init__(self, listener: AnswerListener) -> None:
        asyncio.get_running_loop().call_soon(listener.on_lost, NoConnection("nobody listens"))

    def leave(self) -> None:
        pass
