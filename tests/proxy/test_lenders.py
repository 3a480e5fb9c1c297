"""A prompt that goes to a worker which lacks it is named the store that has most of it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from pdlink._index import HeldKV
from pdlink.api.legs import MAX_ADDRESS_CHARS
from pdlink.api.session import source_of
from pdlink.errors import ConfigError
from pdlink_proxy.lenders import LEAST_TOKENS, KVSource, Lenders
from pdlink_proxy.steps import Leg
from pdlink_proxy.table import WorkerState
from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import FakeServer, FakeWorker, proxy_of, until
from tests.proxy.policies.fleets import request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdlink_proxy.fleet import PlacementRequest
    from tests.proxy.fakes import Proxy, Received

PROMPT = "word " * 1000
SETTINGS: dict[str, Any] = {"policy": {"prefill": "cost", "decode": "least_loaded"}, "health_interval_s": 0.05}


def held(*shares: tuple[WorkerState, int]) -> PlacementRequest:
    return request(1, 2, held=HeldKV([(work.number, tokens, 0.0) for work, tokens in shares]))


def workers(*stores: str) -> tuple[Lenders, list[WorkerState]]:
    lenders = Lenders()
    works = [WorkerState(f"http://w{number}#1", f"prefill-{number}") for number in range(len(stores))]
    for work, store in zip(works, stores, strict=True):
        lenders.heard(work, store)
    return lenders, works


def test_the_source_is_the_store_with_most_of_the_prompt() -> None:
    lenders, (to, some, most) = workers("tcp://a:1", "tcp://b:1", "tcp://c:1")
    wanted = held((to, 512), (some, 1024), (most, 2048))
    assert lenders.source(wanted, to) == KVSource("tcp://c:1", "prefill-2", 2048)
    assert lenders.source(wanted, most) is None, "it has most itself"
    lenders.forget(most)
    assert lenders.source(wanted, to) == KVSource("tcp://b:1", "prefill-1", 1024)


@pytest.mark.parametrize(("more", "named"), [(LEAST_TOKENS - 1, False), (LEAST_TOKENS, True)])
def test_a_store_with_less_than_a_chunk_more_is_no_source(more: int, named: bool) -> None:
    lenders, (to, other) = workers("tcp://a:1", "tcp://b:1")
    assert (lenders.source(held((to, 512), (other, 512 + more)), to) is not None) == named


def test_a_store_that_workers_share_is_not_pulled_from_by_them() -> None:
    lenders, (to, beside, other) = workers("tcp://a:1", "tcp://a:1", "tcp://b:1")
    assert lenders.source(held((beside, 2048)), to) is None
    assert lenders.source(held((beside, 2048), (other, 2100)), to) is None, "its own store has nearly as much"


def test_only_a_worker_that_lends_can_borrow() -> None:
    lenders, (to, other) = workers("", "tcp://b:1")
    assert lenders.source(held((other, 2048)), to) is None
    lenders.heard(to, "tcp://a:1")
    assert lenders.source(held((other, 2048)), to) is not None
    lenders.heard(other, "")
    assert lenders.source(held((other, 2048)), to) is None, "it lends no more"
    lenders.heard(other, "x" * (MAX_ADDRESS_CHARS + 1))
    assert lenders.source(held((other, 2048)), to) is None, "no leg takes that"


def test_a_store_that_ends_with_its_worker_is_no_source_while_that_is_away() -> None:
    lenders, (to, other, live) = workers("tcp://a:1", "tcp://b:1", "tcp://c:1")
    wanted = held((to, 512), (other, 2048), (live, 1024))
    other.away = True
    assert lenders.source(wanted, to) == KVSource("tcp://c:1", "prefill-2", 1024)
    live.away = True
    assert lenders.source(wanted, to) is None
    lenders.heard(other, "tcp://b:1", stays=True)
    assert lenders.source(wanted, to) == KVSource("tcp://b:1", "prefill-1", 2048), "a process of its own"
    live.away = False
    assert lenders.source(wanted, to) == KVSource("tcp://b:1", "prefill-1", 2048)
    wanted = held((to, 512), (other, 2048), (live, 1800))
    assert lenders.source(wanted, to) == KVSource("tcp://c:1", "prefill-2", 1800), "the other may be gone, too"
    other.away = False
    assert lenders.source(wanted, to) == KVSource("tcp://b:1", "prefill-1", 2048)


def test_what_was_sent_to_a_worker_counts_where_no_events_tell() -> None:
    lenders, works = workers("tcp://a:1", "tcp://b:1")
    assert lenders.source(request(1, 2), works[0], [0.0, 1024.0], works) == KVSource("tcp://b:1", "prefill-1", 1024)
    assert lenders.source(request(1, 2), works[1], [0.0, 1024.0], works) is None


def test_a_store_of_another_cell_or_of_other_kv_is_no_source() -> None:
    lenders, (to, far, other, near) = workers("tcp://a:1", "tcp://b:1", "tcp://c:1", "tcp://d:1")
    for work, group in ((to, ("east", "bf16")), (far, ("west", "bf16")), (other, ("east", "fp8"))):
        work.group = group
    wanted = held((far, 4096), (other, 4096), (near, 1024))
    assert lenders.source(wanted, to) == KVSource("tcp://d:1", "prefill-3", 1024), "nothing is known of its group"
    near.group = ("east", "bf16")
    assert lenders.source(wanted, to) is not None
    near.group = ("west", "bf16")
    assert lenders.source(wanted, to) is None


class Lending(FakeWorker):
    store_stays = False

    def health(self) -> dict[str, Any]:
        return {**super().health(), "store": f"tcp://{self.name}:7000", "store_stays": self.store_stays}


@pytest.fixture
async def fleet() -> AsyncIterator[list[Lending]]:
    found = [
        await Lending(role=role, name=f"{role}{n}").start() for n, role in enumerate(("prefill", "prefill", "decode"))
    ]
    yield found
    for each in found:
        await each.stop()


async def ask(proxy: Proxy, **fields: Any) -> str:
    body = {"model": "m", "prompt": PROMPT, **fields}
    async with proxy.client.post(f"{proxy.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["X-Request-Id"]


async def computed(prefills: Sequence[FakeServer], count: int) -> None:
    """Prefill has so many requests: decode may have answered before."""
    await until(lambda: sum(len(each.received) for each in prefills) == count, "prefill's leg")


async def away(proxy: Proxy, worker: FakeWorker, leg: Leg) -> None:
    worker.status = "draining"
    await gone(proxy, worker, leg)


async def gone(proxy: Proxy, worker: FakeServer, leg: Leg) -> None:
    pools = proxy.router.services.pools
    await until(lambda: worker.url not in {each.url for each in pools.usable(leg)}, "it gets no more")


def params(received: Received) -> dict[str, Any]:
    found: dict[str, Any] = received.body.get("kv_transfer_params", {})
    return found


async def test_the_prefix_of_a_worker_that_drains_is_pulled_from_its_store(fleet: list[Lending]) -> None:
    one, two, decode = fleet
    async with proxy_of([one, two], [decode], **SETTINGS) as proxy:
        await ask(proxy)
        await computed([one, two], 1)
        first, other = (one, two) if one.received else (two, one)
        assert "source" not in params(first.received[0]), "nobody has it"
        await ask(proxy)
        await computed([one, two], 2)
        assert len(first.received) == 2, "where it is"
        assert "source" not in params(first.received[1])
        await away(proxy, first, Leg.PREFILL)
        request_id = await ask(proxy, kv_transfer_params={"source": "tcp://liar:1", "leg": "prefill"})
        await computed([one, two], 3)
        (received,) = other.received
        assert params(received)["source"] == f"tcp://{first.name}:7000"
        assert all("source" not in params(each) for each in decode.received), "prefill pushes all of it to decode"
        async with proxy.client.get(f"{proxy.url}/decisions?request={request_id}") as answer:
            placed = next(each for each in (await answer.json())["decisions"] if each["verdict"] == "placed")
        label = next(each.label for each in proxy.router.services.pools.workers[Leg.PREFILL] if each.url == first.url)
        assert placed["source"] == f"1024 tokens from {label}"


@pytest.mark.parametrize("stays", [False, True])
async def test_a_store_is_named_while_its_worker_is_away_if_it_is_a_process_of_its_own(
    fleet: list[Lending], stays: bool
) -> None:
    one, two, decode = fleet
    one.store_stays = two.store_stays = stays
    async with proxy_of([one, two], [decode], **SETTINGS) as proxy:
        await ask(proxy)
        await computed([one, two], 1)
        first, other = (one, two) if one.received else (two, one)
        await first.stop()
        await gone(proxy, first, Leg.PREFILL)
        await ask(proxy)
        await computed([other], 1)
        assert params(other.received[0]).get("source", "") == (f"tcp://{first.name}:7000" if stays else "")


async def test_decode_that_computes_a_prompt_alone_is_named_the_store_and_nothing_else(fleet: list[Lending]) -> None:
    one, two, decode = fleet
    async with proxy_of([one, two], [decode], **SETTINGS) as proxy:
        await ask(proxy)
        await computed([one, two], 1)
        first = one if one.received else two
        for each in (one, two):
            await away(proxy, each, Leg.PREFILL)
        await ask(proxy)
        assert params(decode.received[-1]) == {"leg": "alone", "source": f"tcp://{first.name}:7000"}
        await ask(proxy, prompt="another " * 600)
        assert params(decode.received[-1]) == {}


@pytest.fixture
async def vllms() -> AsyncIterator[list[FakeVllm]]:
    """Two prefill servers and one for decode."""
    found = [await FakeVllm().start() for _ in range(3)]
    yield found
    for each in found:
        await each.stop()


async def test_settings_name_the_stores_of_vllms_servers(vllms: list[FakeVllm]) -> None:
    one, two, decode = vllms
    stores = {each.url: f"tcp://127.0.0.1:{number}" for number, each in enumerate(vllms, 7000)}
    control = {each.url: ["tcp://127.0.0.1:4100"] for each in (one, two)}
    settings = {"dialect": "vllm", "control": control, "stores": stores, **SETTINGS}
    async with proxy_of([one, two], [decode], **settings) as proxy:
        await ask(proxy)
        await computed([one, two], 1)
        first, other = (one, two) if one.received else (two, one)
        assert "source" not in params(first.received[0]), "nobody has it"
        await first.stop()
        await gone(proxy, first, Leg.PREFILL)
        await ask(proxy, kv_transfer_params={"source": "tcp://liar:1"})
        await computed([one, two], 2)
        assert params(other.received[0])["source"] == stores[first.url]
        assert all("source" not in params(each) for each in decode.received), "prefill pushes all of it to decode"
        await other.stop()
        await gone(proxy, other, Leg.PREFILL)
        await ask(proxy)
        assert params(decode.received[-1]) == {"source": stores[first.url]}, "it computes alone"


async def test_prefill_of_sglang_is_named_the_store_in_its_session() -> None:
    servers = [FakeSglang("prefill"), FakeSglang("prefill"), FakeSglang("decode")]
    async with AsyncExitStack() as started:
        for each in servers:
            await each.start()
            started.push_async_callback(each.stop)
        one, two, decode = servers
        stores = {each.url: f"tcp://127.0.0.1:{number}" for number, each in enumerate(servers, 7000)}
        settings = {**SETTINGS, "dialect": "sglang", "stores": stores}
        async with proxy_of([one, two], [decode], **settings) as proxy:
            await ask(proxy)
            await computed([one, two], 1)
            first, other = (one, two) if one.received else (two, one)
            assert "session_id" not in first.received[0].body, "nobody has it"
            await first.stop()
            await gone(proxy, first, Leg.PREFILL)
            await ask(proxy)
            await computed([one, two], 2)
            assert source_of(other.received[0].body["session_id"]) == stores[first.url]
            assert all("session_id" not in each.body for each in decode.received)


async def test_plain_servers_pull_from_each_other(vllms: list[FakeVllm]) -> None:
    stores = {each.url: f"tcp://127.0.0.1:{number}" for number, each in enumerate(vllms, 7000)}
    settings = {**SETTINGS, "dialect": "vllm", "both": list(stores), "stores": stores, "policy": "prefix"}
    async with proxy_of([], [], **settings) as proxy:
        await ask(proxy)
        (first,) = [each for each in vllms if each.received]
        assert "source" not in params(first.received[0])
        await first.stop()
        await gone(proxy, first, Leg.DECODE)
        await ask(proxy)
        (other,) = [each for each in vllms if each.received and each is not first]
        assert params(other.received[0]) == {"source": stores[first.url]}


async def test_a_worker_that_is_not_listed_has_no_store() -> None:
    with pytest.raises(ConfigError, match=r"stores: got http://other:1; expected workers of this proxy"):
        async with proxy_of([], [], dialect="vllm", stores={"http://other:1": "tcp://other:2"}):
            pass
