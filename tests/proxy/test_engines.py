"""Several data-parallel engines behind the port of one prefill server: each is a worker of its own, and a leg names
its engine to the server and to decode."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from pdlink.api.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from pdlink.config import ProxyConfig
from pdlink.errors import ConfigError
from pdlink_proxy.app import build_app
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.discovery.joined import joined, source_of
from pdlink_proxy.discovery.kubernetes import EndpointSlice, KubernetesSource, members_of
from pdlink_proxy.engines import HEADER
from pdlink_proxy.members import ListedWorker, Members
from pdlink_proxy.membership import parse
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import State
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import proxy_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.proxy.fakes import Proxy, Received

CONTROL = "tcp://10.0.0.1:8101-8104"
"""Of two engines with two ranks each."""
OF_ENGINE = (["tcp://10.0.0.1:8101", "tcp://10.0.0.1:8102"], ["tcp://10.0.0.1:8103", "tcp://10.0.0.1:8104"])


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[list[FakeVllm]]:
    """A prefill server, and two for decode."""
    found = [await FakeVllm().start() for _ in range(3)]
    yield found
    for server in found:
        await server.stop()
        assert server.strange == [], "vLLM has no such route"


@contextlib.asynccontextmanager
async def in_front(servers: list[FakeVllm], **more: Any) -> AsyncIterator[Proxy]:
    prefill, *decodes = servers
    settings: dict[str, Any] = {"control": {prefill.url: CONTROL}, "data_parallel": {prefill.url: 2}, **more}
    async with proxy_of([prefill], decodes, dialect="vllm", **settings) as proxy:
        yield proxy


def engine_of(leg: Received) -> int:
    """Of a prefill leg, to the server and to its connector."""
    engine = int(leg.headers[HEADER])
    assert leg.body["kv_transfer_params"].get("data_parallel_rank", 0) == engine
    return engine


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
async def test_a_leg_names_its_engine_and_decode_is_told_the_addresses_of_that_one(
    servers: list[FakeVllm], path: str, streaming: bool
) -> None:
    prefill, *decodes = servers
    body: dict[str, Any] = {"stream": streaming, "max_tokens": 2}
    if path != COMPLETIONS:
        body["messages"] = [{"role": "user", "content": "hello"}]
    async with in_front(servers, policy="round_robin") as proxy:
        for _ in range(4):
            headers = {HEADER: "7"}  # a client's own counts for nothing
            async with proxy.post(path, headers=headers, **body) as response:
                assert response.status == 200, await response.read()
                await response.read()
        await until(lambda: len(prefill.received) == 4)
    legs = {leg.transfer_id: engine_of(leg) for leg in prefill.received}
    assert sorted(legs.values()) == [0, 0, 1, 1]
    told = [leg for decode in decodes for leg in decode.received]
    assert len(told) == 4
    for leg in told:
        engine = legs[leg.transfer_id]
        assert leg.body["kv_transfer_params"]["prefill"] == {
            "name": f"127.0.0.1:{prefill.port}",
            "control": OF_ENGINE[engine],
            "data_parallel_rank": engine,
        }
        assert HEADER not in leg.headers, "a decode server shares its requests out by itself"


async def test_a_server_that_is_one_worker_is_named_no_engine(servers: list[FakeVllm]) -> None:
    async with in_front(servers, data_parallel={}, control={servers[0].url: CONTROL}) as proxy:
        async with proxy.post(COMPLETIONS) as response:
            assert response.status == 200
        await until(lambda: bool(servers[0].received))
    (leg,) = servers[0].received
    assert HEADER not in leg.headers
    assert "data_parallel_rank" not in leg.body["kv_transfer_params"]


async def test_the_engine_with_less_to_do_gets_the_next_request(servers: list[FakeVllm]) -> None:
    prefill = servers[0]
    prefill.gate = gate = asyncio.Event()
    async with in_front(servers, policy="least_loaded") as proxy:
        running = []
        for prompt in ([1] * 900, [2] * 100, [3] * 100, [4] * 100):
            running.append(asyncio.create_task(proxy.stream(prompt=prompt)))
            await until(lambda: len(prefill.received) == len(running))
        gate.set()
        await asyncio.gather(*running)
    first, *others = map(engine_of, prefill.received)
    assert others == [1 - first] * 3


async def test_a_prompt_seen_before_goes_to_the_engine_that_saw_it(servers: list[FakeVllm]) -> None:
    prefill = servers[0]
    prompts = [[number] * 2048 for number in range(6)]
    async with in_front(servers, policy={"prefill": "prefix"}) as proxy:
        for prompt in [*prompts, *prompts]:
            async with proxy.post(COMPLETIONS, prompt=prompt, max_tokens=1) as response:
                assert response.status == 200
        await until(lambda: len(prefill.received) == 12)
    engines: dict[int, set[int]] = {leg.body["prompt"][0]: set() for leg in prefill.received}
    for leg in prefill.received:
        engines[leg.body["prompt"][0]].add(engine_of(leg))
    assert all(len(found) == 1 for found in engines.values()), engines
    assert set.union(*engines.values()) == {0, 1}


async def test_what_vllm_computes_at_an_engine_of_its_own_choice_decode_serves_alone(
    servers: list[FakeVllm],
) -> None:
    """POST /v1/responses takes no X-data-parallel-rank (0.24 to 0.32): decode would wait for the wrong engine."""
    async with in_front(servers) as proxy, proxy.post(RESPONSES, input="hello", max_output_tokens=2) as response:
        assert response.status == 200, await response.read()
        assert response.headers["X-Pdlink-KV"] == "recomputed;reason=prompt_only_decode"
    assert servers[0].received == []
    async with in_front(servers, data_parallel={}) as proxy:
        async with proxy.post(RESPONSES, input="hello", max_output_tokens=2) as response:
            assert response.status == 200
        await until(lambda: len(servers[0].received) == 1)


async def test_a_leg_that_finds_the_server_gone_takes_out_all_of_its_engines(servers: list[FakeVllm]) -> None:
    """They are one process: a second attempt at another of them would fail, too."""
    prefill = servers[0]
    async with in_front(servers, health_interval_s=600) as proxy:
        await prefill.stop()
        async with proxy.post(COMPLETIONS) as response:
            assert response.status == 200
            assert response.headers["X-Pdlink-KV"].startswith("recomputed")
        assert [worker.state for worker in proxy.router.services.pools.workers[Leg.PREFILL]] == [
            State.UNREACHABLE
        ] * 2
        assert len([each for each in proxy.router.services.decisions_of() if each.verdict == "failed"]) == 1
        await prefill.start()
        for worker in proxy.router.services.pools.workers[Leg.PREFILL]:
            worker.poke.set()
        await until(lambda: len(proxy.router.services.pools.usable(Leg.PREFILL)) == 2, "both engines")


async def test_the_health_of_a_server_is_asked_once_and_is_that_of_all_its_engines(servers: list[FakeVllm]) -> None:
    prefill = servers[0]
    async with in_front(servers, health_interval_s=0.01) as proxy:
        engines = proxy.router.services.pools.workers[Leg.PREFILL]
        assert prefill.models_asked == 1
        prefill.dead = True
        await until(lambda: all(worker.state is State.FAILED for worker in engines), "the answer 503")
        prefill.dead = False
        await until(lambda: all(worker.state is State.OK for worker in engines), "the answer 200")
        prefill.api_key = "another"
        engines[1].fault("a request's connection failed")
        await until(lambda: all(worker.state is State.BARRED for worker in engines), "the refusal of our key")
        entry = {"url": prefill.url, "control": [CONTROL], "data_parallel": 4}
        members = parse({"prefill": [entry], "decode": [servers[1].url]}, "workers", dialect=DIALECTS["vllm"])
        prefill.api_key = ""
        proxy.router.services.membership.replace(members)
        await until(lambda: len(proxy.router.services.pools.usable(Leg.PREFILL)) == 4, "two more engines")
        assert proxy.router.services.pools.workers[Leg.PREFILL][:2] == engines


async def test_engines_are_told_apart_in_health_and_metrics(servers: list[FakeVllm]) -> None:
    url = servers[0].url
    async with in_front(servers) as proxy:
        async with proxy.client.get(f"{proxy.url}/health") as response:
            shown = (await response.json())["prefill"]
        assert [(one["label"], one["url"], one["data_parallel_rank"]) for one in shown] == [
            ("prefill-0", url, 0),
            ("prefill-1", url, 1),
        ]
        assert [one["health"]["control"] for one in shown] == list(OF_ENGINE)
        for engine in (0, 1):
            named = {"worker": f"{url}?data_parallel_rank={engine}", "leg": "prefill"}
            assert proxy.counted("worker_healthy", **named) == 1


async def test_a_server_for_both_legs_is_two_workers_for_prefill_and_one_for_decode(
    servers: list[FakeVllm],
) -> None:
    one = servers[0]
    settings: dict[str, Any] = {"control": {one.url: CONTROL}, "data_parallel": {one.url: 2}}
    async with proxy_of([one], [one], dialect="vllm", **settings) as proxy:
        workers = [(worker.label, worker.engine, worker.url) for worker in proxy.router.services.pools.all]
        assert workers == [("prefill-0", 0, one.url), ("prefill-1", 1, one.url), ("decode-0", None, one.url)]
        async with proxy.post(COMPLETIONS, max_tokens=2) as response:
            assert response.status == 200
        await until(lambda: len(one.received) == 2)
    legs = {leg.body["kv_transfer_params"]["leg"]: leg for leg in one.received}
    assert legs["decode"].body["kv_transfer_params"]["prefill"]["control"] == OF_ENGINE[engine_of(legs["prefill"])]
    assert HEADER not in legs["decode"].headers


async def test_a_probe_asks_the_engine_that_it_is_to_measure(servers: list[FakeVllm]) -> None:
    asked = {"prefill": "prefill-1", "decode": "decode-0", "num_tokens": 8}
    async with (
        in_front(servers) as proxy,
        proxy.client.post(f"{proxy.url}/pdlink/probe", json=asked) as response,
    ):
        assert response.status == 200, await response.text()
    assert [engine_of(leg) for leg in servers[0].received] == [1]


async def test_kv_events_of_each_engine_are_its_own(servers: list[FakeVllm]) -> None:
    sources = ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    async with in_front(servers, kv_events={servers[0].url: sources}) as proxy:
        found = proxy.router.services.pools.kv_events.sources
        assert [found[f"{servers[0].url}?data_parallel_rank={engine}"] for engine in (0, 1)] == [
            (one,) for one in sources
        ]


async def test_an_operator_drains_all_engines_of_a_server_and_keeps_them_apart(servers: list[FakeVllm]) -> None:
    entry = {"url": servers[0].url, "control": [CONTROL], "data_parallel": 2}
    decodes = [server.url for server in servers[1:]]
    async with in_front(servers) as proxy:
        before = proxy.router.services.pools.workers[Leg.PREFILL]
        members = parse({"prefill": [entry], "decode": decodes}, "workers", dialect=DIALECTS["vllm"])
        proxy.router.services.membership.replace(members)
        assert proxy.router.services.pools.workers[Leg.PREFILL] == before, "they keep their state"
        drained = parse({"prefill": [{**entry, "drain": True}], "decode": decodes}, "w", dialect=DIALECTS["vllm"])
        proxy.router.services.membership.replace(drained)
        assert not proxy.router.services.pools.usable(Leg.PREFILL)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"control": {"http://p:1": ["tcp://p:2"]}}, r"control: got 1 for http://p:1 with data_parallel 2; expected"),
        ({"kv_events": {"http://p:1": "tcp://p:9"}}, r"kv_events: got 1 for http://p:1 with data_parallel 2"),
        ({"control": {"http://p:1": "tcp://p:9-8"}}, r"control\n.*got 'tcp://p:9-8'; expected ports from 1 to 65535"),
        ({"data_parallel": {"http://d:1": 2}}, r"data_parallel: got http://d:1; expected prefill workers"),
        ({"data_parallel": {"http://p:1": 0}}, r"data_parallel\.http://p:1"),
        ({"dialect": "vllm-nixl", "control": {}}, r"data_parallel: is for dialect: vllm, and dialect is vllm-nixl"),
        ({"control": {"http://p:1": "tcp://p:1-2"}}, r"control: tcp://p:1, given for http://p:1, is the HTTP port"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_engines_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {
        "dialect": "vllm",
        "prefill": ["http://p:1"],
        "decode": ["http://d:1"],
        "control": {"http://p:1": "tcp://p:8101-8102"},
        "data_parallel": {"http://p:1": 2},
    }
    build_app(ProxyConfig.model_validate(usual))
    with pytest.raises((ConfigError, ValueError), match=words):
        build_app(ProxyConfig.model_validate(usual | settings))


@pytest.mark.parametrize(
    ("document", "dialect", "words"),
    [
        ({"prefill": [{"url": "http://p:1", "data_parallel": 2, "control": ["tcp://p:2"]}]}, "vllm",
         "control: got 1 for http://p:1 with data_parallel 2"),
        ({"decode": [{"url": "http://d:1", "data_parallel": 2}]}, "vllm", "expected prefill workers of dialect"),
        ({"both": [{"url": "http://d:1", "data_parallel": 2}]}, "vllm", "got it for http://d:1"),
        ({"prefill": [{"url": "http://p:1", "data_parallel": 2}]}, "sglang", "expected prefill workers of dialect"),
        ({"prefill": [{"url": "http://p:1", "control": ["tcp://p:2-70000"]}]}, "vllm", "expected ports from 1 to"),
        ({"prefill": [{"url": "http://p:1", "data_parallel": 0}]}, "vllm", "data_parallel"),
    ],
)  # fmt: skip
def test_a_list_of_workers_that_does_not_fit_the_engines_is_refused(
    document: dict[str, Any], dialect: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(document, "workers", dialect=DIALECTS[dialect])


def test_ports_of_pods_belong_to_the_engines_in_turn() -> None:
    said = {
        "metadata": {"labels": {"kubernetes.io/service-name": "pre"}},
        "ports": [{"name": "http", "port": 8100}, *({"name": f"kv-{port}", "port": port} for port in (8101, 8102))],
        "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}}],
    }
    found = members_of({"p": msgspec.convert(said, EndpointSlice)}, {"pre": "prefill"}, "http", "kv", data_parallel=2)
    addresses = ("tcp://10.0.0.1:8101", "tcp://10.0.0.1:8102")
    assert found.prefill == (ListedWorker("http://10.0.0.1:8100", control=addresses, data_parallel=2),)
    source = source_of("kubernetes:prefill=pre,control=kv,data_parallel=2", DIALECTS["vllm"])
    assert isinstance(source, KubernetesSource)
    for text in ("prefill=pre,control=kv,data_parallel=0", "prefill=pre,data_parallel=2", "decode=d,data_parallel=x"):
        with pytest.raises(ConfigError, match=r"got data_parallel=.*; expected 1 to 4096, beside control=NAME"):
            source_of(f"kubernetes:{text}", DIALECTS["vllm"])


def test_a_server_of_two_sources_has_the_engines_that_its_addresses_are_of() -> None:
    one = Members(prefill=(ListedWorker("http://a:1"),))
    other = Members(prefill=(ListedWorker("http://a:1", control=("tcp://a:2", "tcp://a:3"), data_parallel=2),))
    for lists in ([one, other], [other, one]):
        assert joined(lists).prefill == other.prefill
