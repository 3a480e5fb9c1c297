"""Workers that dial the proxy, over real sockets: who gets in, who counts, and what silence means."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.api.presence import WorkerLoad
from pdlink.config import ProxyConfig
from pdlink.errors import ConfigError
from pdlink.serve.process import raise_descriptor_limit
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.discovery.joined import source_of
from pdlink_proxy.discovery.register import JoinRules, RegisterSource
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import State
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until
from tests.proxy.joiner import Joiners, joiners, knows, made

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdlink.api.health import Health
    from pdlink.protocol.auth import Credentials
    from pdlink_proxy.membership import Members

STORM_S = 100.0
"""A handshake takes 1 ms of CPU at both ends together, of which a busy machine gives few."""
HERE = "register:tcp://127.0.0.1:0"
PROXY, PREFILL, DECODE, OTHER = made("proxy"), made("prefill-a"), made("decode-a"), made("other")


def source(proxy: Proxy) -> dict[str, Any]:
    found: dict[str, Any] = proxy.router.services.discovery.describe()[HERE]
    return found


def usable(proxy: Proxy) -> list[str]:
    return [worker.url for side in Leg for worker in proxy.router.services.pools.usable(side)]


@contextlib.asynccontextmanager
async def joined(credentials: Credentials | None = None, **more: Any) -> AsyncIterator[tuple[Proxy, Joiners]]:
    """A proxy that knows no worker, and the means to join it."""
    async with proxy_of([], [], settled=False, discover=[HERE], credentials=credentials, **more) as proxy:
        await until(lambda: source(proxy)["address"] != "", "the open door")
        with joiners() as hall:
            hall.address = source(proxy)["address"]
            yield proxy, hall


async def test_workers_that_join_are_asked_once_and_then_known_by_their_beats(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with joined(health_interval_s=0.01) as (proxy, hall):
        first, second = hall.new(), hall.new()
        first.beat(prefill, cell="rack1")
        second.beat(decode)
        await until(lambda: len(usable(proxy)) == 2, "both workers")
        await proxy.stream()
        assert [len(worker.received) for worker in (prefill, decode)] == [1, 1]
        assert proxy.router.services.pools.workers[Leg.PREFILL][0].cell == "rack1"
        first.beat(prefill)  # the first one brought it in, and the probe in
        second.beat(decode)
        workers = proxy.router.services.pools.all
        await until(lambda: all(worker.beats for worker in workers), "the beats")
        asked = prefill.probed + decode.probed
        for running in range(1, 4):
            prefill.running = running
            first.beat(prefill)
            await until(lambda n=running: workers[0].health.running == n, "the load")  # type: ignore[misc, union-attr]
        assert prefill.probed + decode.probed <= asked + 2  # two may have been under way


async def test_a_beat_with_the_same_body_changes_the_load_and_one_with_another_body_all(prefill: FakeWorker) -> None:
    def load(busy: int) -> WorkerLoad:
        return WorkerLoad(busy, 2, 3, 4, 5, 6, 7.0, 8.0)

    async with joined(health_interval_s=60) as (proxy, hall):
        joiner = hall.new()
        joiner.beat(prefill, load=load(1))
        await until(lambda: len(usable(proxy)) == 1, "the worker")
        (worker,) = proxy.router.services.pools.all
        for busy in (7, 8):
            joiner.beat(prefill, load=load(busy))
            await until(lambda n=busy: worker.health.running == n, "the load")  # type: ignore[misc, union-attr]
        said = worker.health
        assert said is not None
        assert (said.queue_tokens, said.kv_used_tokens, said.prefill_s, said.decode_s) == (5, 6, 7.0, 8.0)
        assert worker.work.foreign == 10
        prefill.status = "draining"
        joiner.beat(prefill, load=load(9))
        await until(lambda: worker.state is State.DRAINING, "the drain")
        assert worker.health is not None
        assert worker.health.running == 9


async def test_keys_decide_who_joins_and_under_which_name(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with joined(knows(PROXY, PREFILL, DECODE)) as (proxy, hall):
        prefill.name, decode.name = "prefill-a/0", "prefill-a"
        hall.new(PREFILL).beat(prefill)
        hall.new(DECODE).beat(decode)
        hall.new(OTHER).beat(decode)
        hall.new().beat(decode)  # without keys
        await until(lambda: usable(proxy) == [prefill.url], "the one whose name is its key's")
        wanted = ("name: got 'prefill-a' with the key of decode-a", f"key {OTHER.public} is not on the allow-list")
        await until(lambda: all(text in " ".join(source(proxy)["refused"]) for text in wanted), "both refusals")
        assert [worker.url for worker in proxy.router.services.pools.all] == [prefill.url]


async def test_a_key_that_is_taken_off_the_list_beats_in_vain(prefill: FakeWorker) -> None:
    async with joined(knows(PROXY, PREFILL)) as (proxy, hall):
        prefill.name = "prefill-a"
        joiner = hall.new(PREFILL)
        joiner.beat(prefill, beat_s=0.05)
        await until(lambda: usable(proxy) == [prefill.url], "the worker")
        proxy.router.services.discovery.allow(knows(PROXY, DECODE).allowed)
        await prefill.stop()
        while proxy.router.services.pools.all[0].state is not State.UNREACHABLE:
            joiner.beat(prefill, beat_s=0.05)
            await asyncio.sleep(0.01)


async def test_the_end_of_a_connection_makes_the_proxy_ask_at_once(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with joined(health_interval_s=60) as (proxy, hall):
        first, second = hall.new(), hall.new()
        for _ in range(2):
            first.beat(prefill)
            second.beat(decode)
        await until(lambda: len(usable(proxy)) == 2, "both workers")
        await prefill.stop()
        first.close()
        await until(lambda: usable(proxy) == [decode.url], "the loss, long before a beat is due")
        second.close()  # a worker that is well
        asked = decode.probed
        await until(lambda: decode.probed > asked, "the question")
        assert usable(proxy) == [decode.url]


async def test_silence_alone_costs_a_worker_nothing_that_answers_a_probe(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of the beats may be broken. And no clock that somebody sets is looked at."""
    async with joined(health_interval_s=0.01) as (proxy, hall):
        first, second = hall.new(), hall.new()
        first.beat(prefill, beat_s=0.05)
        second.beat(decode)
        await until(lambda: len(usable(proxy)) == 2, "both workers")
        register = proxy.router.services.discovery.sources[HERE].source
        assert isinstance(register, RegisterSource)
        await until(lambda: any(life.silent_since_s is not None for life in register.roll), "the silence")
        for stepped_s in (0.0, 4e9):
            monkeypatch.setattr(time, "time", lambda stepped_s=stepped_s: stepped_s)
            asked = prefill.probed
            await until(lambda asked=asked: prefill.probed >= asked + 3, "probes")  # type: ignore[misc]
        await until(lambda: usable(proxy) == [prefill.url, decode.url], "the probe that succeeded")
        await prefill.stop()
        await until(lambda: usable(proxy) == [decode.url], "the failed probe")
        await prefill.start()
        first.beat(prefill, beat_s=60)
        await until(lambda: usable(proxy) == [prefill.url, decode.url], "its return")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_in_hand_at_a_host_that_hangs_go_elsewhere_after_three_beats_and_a_probe(role: str) -> None:
    """And not after `first_byte_timeout_s`, which is ten minutes: its connections stay open."""
    hung, well = [await FakeWorker(role).start() for _ in range(2)]
    other = await FakeWorker("decode" if role == "prefill" else "prefill").start()
    other.gate = gate = asyncio.Event()  # decode, which waits for prefill's KV
    async with contextlib.AsyncExitStack() as stack:
        for worker in (hung, well, other):
            stack.push_async_callback(worker.stop)
        proxy, hall = await stack.enter_async_context(
            joined(health_interval_s=60, connect_timeout_s=0.5, policy="round_robin")
        )
        first, second, third = hall.new(), hall.new(), hall.new()
        for _ in range(2):
            first.beat(hung, beat_s=0.1)
            third.beat(other)
        await until(lambda: len(usable(proxy)) == 2, "a pair")
        hung.hung = True
        asking = asyncio.create_task(proxy.stream())
        await until(lambda: len(hung.received) == 1, "the request there")
        second.beat(well)
        (gone,) = proxy.router.services.pools.at(hung.url)
        await until(lambda: (gone.in_flight, gone.legs) == (0, set()), "the loss")
        gate.set()
        assert b"two" in await asyncio.wait_for(asking, 60)
        assert len(well.received) == (role == "decode"), "decode goes on without prefill"
        assert gone.state is State.UNREACHABLE


async def test_a_stopped_host_that_wakes_beside_its_successor_stays_out(decodes: list[FakeWorker]) -> None:
    old, new = decodes
    old.name = new.name = "decode-a"
    old.epoch, new.epoch = "e-old", "e-new"
    async with joined() as (proxy, hall):
        first, second = hall.new(), hall.new()
        first.beat(old, age_s=500)
        await until(lambda: usable(proxy) == [old.url], "the first")
        second.beat(new, age_s=1)
        await until(lambda: usable(proxy) == [new.url], "its successor")
        first.beat(old, age_s=501)
        await until(lambda: source(proxy)["left_out"] != [], "the word")
        assert usable(proxy) == [new.url]
        assert source(proxy)["left_out"] == [f"decode-a at {old.url}: a younger one is at {new.url}"]
        second.beat(new, age_s=2, leaves=True)
        await until(lambda: usable(proxy) == [old.url], "the return of the name")


async def test_a_worker_says_that_it_drains_and_that_it_leaves(decode: FakeWorker) -> None:
    async with joined() as (proxy, hall):
        joiner = hall.new()
        joiner.beat(decode)
        await until(lambda: usable(proxy) == [decode.url], "the worker")
        decode.status = "draining"  # a probe says it, too
        joiner.beat(decode)
        await until(lambda: usable(proxy) == [], "the drain")
        assert proxy.router.services.pools.all[0].state is State.DRAINING
        joiner.beat(decode, leaves=True)
        await until(lambda: proxy.router.services.pools.all == [], "its end")


async def test_a_proxy_that_stood_still_forgets_nobody(prefill: FakeWorker) -> None:
    silent: list[str] = []
    with joiners() as hall:
        async with followed() as (register, hearing):
            hall.address = register.address
            joiner, stop = hall.new(), threading.Event()

            def beats() -> None:
                while not stop.wait(0.05):
                    joiner.beat(prefill, beat_s=0.2)

            thread = threading.Thread(target=beats)
            thread.start()
            try:
                await until(lambda: len(register.roll) == 1, "the worker")
                time.sleep(1.0)  # noqa: ASYNC251  five beats
                count = hearing.num_heard
                await until(lambda: hearing.num_heard >= count + 10, "the beats since")
                silent = hearing.silences
            finally:
                stop.set()
                thread.join()
    assert silent == []


@pytest.mark.timeout(240)
async def test_after_a_restart_of_the_proxy_all_workers_are_back_in_few_lists() -> None:
    keys, num_workers = (PROXY, PREFILL), 200
    raise_descriptor_limit()
    with joiners() as hall:
        async with followed(knows(*keys)) as (register, _):
            hall.address = register.address
            workers = [hall.new(PREFILL) for _ in range(num_workers)]

            def beat_all() -> None:
                for number, joiner in enumerate(workers):
                    joiner.say(f"http://127.0.0.1:{number + 1}", health_of(number))

            beat_all()
            await until(lambda: len(register.roll) == num_workers, "all workers", STORM_S)
            port = int(register.address.partition("?")[0].rsplit(":", 1)[1])
        async with followed(knows(*keys), port) as (again, hearing):
            beat_all()
            await until(lambda: len(again.roll) == num_workers, "all of them again", STORM_S)
            await until(lambda: len(hearing.lists[-1].prefill) == num_workers, "the list")
            assert len(hearing.lists) < num_workers


def health_of(number: int) -> dict[str, Any]:
    return {
        **{"status": "ok", "name": f"prefill-a/{number}", "epoch": "e1", "role": "prefill", "model": "m"},
        **{"control": "tcp://127.0.0.1:1", "running": 1, "waiting": 0},
    }


class Noted:
    """What a register source says, with nothing behind it."""

    def __init__(self) -> None:
        self.num_heard = 0
        self.silences: list[str] = []
        self.lists: list[Members] = []

    def heard(self, _url: str, _health: Health) -> None:
        self.num_heard += 1

    def loaded(self, _url: str, _epoch: str, _load: WorkerLoad) -> None:
        self.num_heard += 1

    def heard_some(self) -> None:
        pass

    def silent(self, url: str, why: str) -> None:
        self.silences.append(f"{url}: {why}")

    def suspect(self, url: str) -> None:
        pass

    def well(self, _url: str) -> bool:
        return False

    def named(self, _url: str) -> str:
        return ""


@contextlib.asynccontextmanager
async def followed(
    credentials: Credentials | None = None, port: int = 0
) -> AsyncIterator[tuple[RegisterSource, Noted]]:
    hearing = Noted()
    register = RegisterSource(f"tcp://127.0.0.1:{port}", JoinRules(hearing, credentials))
    task = asyncio.create_task(register.follow(hearing.lists.append))
    try:
        await until(lambda: register.address != "" or task.done(), "the open door")
        yield register, hearing
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("register:127.0.0.1:80", "expected register:tcp://HOST:PORT"),
        ("register:tcp://127.0.0.1", "expected register:tcp://HOST:PORT"),
        ("register:tcp://127.0.0.1:65536", "expected register:tcp://HOST:PORT"),
        ("register:tcp://a b:1", "expected an IP address or a name"),
        ("register:tcp://0.0.0.0:1", "set key_file and allow_file"),
    ],
)
def test_a_wrong_address_is_refused_with_its_form(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source_of(text, DIALECTS["pdlink"], JoinRules(Noted()))


def test_settings_of_joining_belong_together() -> None:
    with pytest.raises(ConfigError, match="which alone know how to join"):
        source_of(HERE, DIALECTS["vllm"], JoinRules(Noted()))
    with pytest.raises(ValueError, match="key_file: is of workers that register"):
        ProxyConfig(key_file="a", allow_file="b")
    source_of("register:tcp://0.0.0.0:1", DIALECTS["pdlink"], JoinRules(Noted(), insecure=True))


async def test_a_port_that_is_taken_is_a_source_that_is_down() -> None:
    async with followed() as (register, _):
        text = f"register:{register.address}"
        async with proxy_of([], [], settled=False, discover=[text]) as proxy:
            await until(
                lambda: "cannot bind" in proxy.router.services.discovery.describe()[text]["reason"], "the reason"
            )
