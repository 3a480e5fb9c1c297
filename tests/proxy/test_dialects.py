"""Every dialect by one suite: what goes to each leg, what comes back, and what follows when a leg fails or is left.

The servers are stand-ins that speak as the engines do (`fake_vllm.py`, `fake_sglang.py`, `fakes.py`) and note what
the engine would not understand.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import msgspec
import pytest
import zmq
import zmq.asyncio

from pdlink.config import ProxyConfig
from pdlink.config.proxy import DialectName
from pdlink.errors import ConfigError
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.membership import from_settings
from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fake_vllm import HELD, FakeVllm
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.proxy.fakes import Received

Fake: TypeAlias = FakeVllm | FakeSglang | FakeWorker
Controls: TypeAlias = dict[str, list[str]]


def _none(_prefills: list[Fake], _decodes: list[Fake]) -> Controls:
    return {}


@dataclass(frozen=True)
class Entry:
    """A dialect and servers of its engine."""

    dialect: str
    make: Callable[[str], Fake]
    """A server for a leg."""
    at_once: bool = True
    control: Callable[[list[Fake], list[Fake]], Controls] = _none
    alone: bool = True
    """Decode can compute a prompt itself."""
    more: dict[str, Any] = field(default_factory=dict)


def _vllm(connector: str) -> Callable[[str], Fake]:
    return lambda _leg: FakeVllm(connector)


def _of_prefills(scheme: str, *, own: bool = False) -> Callable[[list[Fake], list[Fake]], Controls]:
    return lambda prefills, _: {each.url: [f"{scheme}://127.0.0.1:{each.port if own else 4100}"] for each in prefills}


def _of_both(prefills: list[Fake], decodes: list[Fake]) -> Controls:
    of_prefill = {each.url: ["tcp://10.0.0.1:6301,tcp://10.0.0.1:61005"] for each in prefills}
    return of_prefill | {each.url: ["tcp://10.0.0.2:6302,tcp://10.0.0.2:61006"] for each in decodes}


def _of_decodes(_: list[Fake], decodes: list[Fake]) -> Controls:
    return {each.url: ["tcp://10.0.0.2:8300,tcp://10.0.0.2:8400"] for each in decodes}


ENTRIES = [
    Entry("pdlink", lambda leg: FakeWorker(leg)),
    Entry("vllm", _vllm("pdlink"), control=_of_prefills("tcp")),
    Entry("vllm-nixl", _vllm("nixl"), at_once=False),
    Entry("vllm-nixl-push", _vllm("push"), at_once=False),
    Entry("vllm-mooncake", _vllm("mooncake"), control=_of_prefills("http", own=True)),
    Entry("vllm-moriio", _vllm("moriio"), at_once=False),
    Entry("vllm-moriio-write", _vllm("moriio"), control=_of_both),
    Entry("lmcache", _vllm("lmcache"), at_once=False, control=_of_decodes, more={"notify": "tcp://127.0.0.1:0"}),
    Entry("sglang", lambda leg: FakeSglang(leg), alone=False),
]
ALL = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.dialect)


def test_the_suite_and_the_settings_have_every_dialect() -> None:
    assert [entry.dialect for entry in ENTRIES] == list(DIALECTS) == list(get_args(DialectName))


@dataclass
class Bench:
    proxy: Proxy
    prefills: list[Fake]
    decodes: list[Fake]

    async def ask(self, path: str = "/v1/completions", **body: Any) -> tuple[int, bytes]:
        if "chat" in path:
            body = {"messages": [{"role": "user", "content": "hello"}], **body}
        async with self.proxy.post(path, **body) as response:
            return response.status, await response.read()

    def legs(self) -> tuple[Received, Received]:
        """What the only request sent."""
        (prefill,) = (got for each in self.prefills for got in each.received)
        (decode,) = (got for each in self.decodes for got in each.received)
        return prefill, decode


@contextlib.asynccontextmanager
async def bench(entry: Entry, num: int = 1, **more: Any) -> AsyncIterator[Bench]:
    """A proxy and so many workers of each leg; at the end none of them has been asked for what its engine lacks."""
    prefills = [entry.make("prefill") for _ in range(num)]
    decodes = [entry.make("decode") for _ in range(num)]
    async with contextlib.AsyncExitStack() as stack:
        for each in (*prefills, *decodes):
            await each.start()
            stack.push_async_callback(each.stop)
        settings = {"dialect": entry.dialect, "control": entry.control(prefills, decodes), **entry.more, **more}
        async with proxy_of(prefills, decodes, **settings) as proxy:
            if entry.dialect == "lmcache":
                await stack.enter_async_context(_telling(proxy, prefills))
            yield Bench(proxy, prefills, decodes)
        for each in (*prefills, *decodes):
            assert getattr(each, "strange", []) == []


@contextlib.asynccontextmanager
async def _telling(proxy: Proxy, prefills: list[Fake]) -> AsyncIterator[None]:
    """Prefill tells the proxy when its KV has arrived, as each rank of LMCache does."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUSH)
    socket.linger = 0
    shared = proxy.router._shared
    assert shared is not None
    assert shared.arrivals is not None
    socket.connect(shared.arrivals.address)

    async def tell(spec: dict[str, Any]) -> None:
        for _ in spec["receiver_init_port"]:
            await socket.send(msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": spec["req_id"]}))

    for each in prefills:
        assert isinstance(each, FakeVllm)
        each.told = tell
    try:
        yield
    finally:
        socket.close()
        context.term()


def _texts(answer: bytes) -> str:
    """The text of a whole answer or of a stream."""
    documents = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith((b"data: {", b"{"))]
    found = ""
    for document in documents:
        for choice in msgspec.json.decode(document)["choices"]:
            found += choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
    return found


@ALL
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_client_gets_decodes_answer(entry: Entry, streaming: bool, path: str) -> None:
    async with bench(entry) as it:
        status, answer = await it.ask(path, stream=streaming)
    assert status == 200, answer
    assert _texts(answer) in ("0.0 0.1 0.2 ", "zeroonetwo")


@ALL
async def test_unknown_fields_and_the_clients_headers_reach_both_legs(entry: Entry) -> None:
    headers = {
        "Authorization": "Bearer theirs",
        "X-Request-Id": "one",
        "traceparent": "00-1-2-01",
        "tracestate": "a=b",
    }
    async with bench(entry) as it:
        body = {"model": "m", "prompt": "hello", "some_new_field": {"a": 1.50}}
        async with it.proxy.client.post(it.proxy.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            assert response.headers["X-Request-Id"] == "one"
            transfer_id = response.headers["X-Pdlink-Transfer"]
        for leg in it.legs():
            assert leg.body["some_new_field"] == {"a": 1.5}
            named = transfer_id if entry.dialect.startswith("vllm-nixl") else "one"
            assert leg.headers["X-Request-Id"] == named
            assert {name: leg.headers[name] for name in headers if name != "X-Request-Id"} == {
                name: said for name, said in headers.items() if name != "X-Request-Id"
            }


@ALL
async def test_legs_start_at_once_where_the_engine_lets_them(entry: Entry) -> None:
    async with bench(entry) as it:
        it.prefills[0].gate = asyncio.Event()
        answer = asyncio.create_task(it.ask())
        await until(lambda: bool(it.prefills[0].received), "prefill's leg")
        if entry.at_once:
            await until(lambda: bool(it.decodes[0].received), "decode's leg")
        else:
            assert it.decodes[0].received == []
        it.prefills[0].gate.set()
        assert (await answer)[0] == 200
        assert len(it.decodes[0].received) == 1


@ALL
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_worker_that_fails_is_passed_over(entry: Entry, side: str) -> None:
    """With another transfer id: the first one may still be known to the workers."""
    async with bench(entry, num=2) as it:
        failing = (it.prefills if side == "prefill" else it.decodes)[0]
        failing.fail_with = 503
        for _ in range(4):
            status, answer = await it.ask()
            assert status == 200, answer
        assert failing.received


@ALL
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_leg_that_rejects_the_request_decides_it(entry: Entry, side: str) -> None:
    async with bench(entry) as it:
        (it.prefills if side == "prefill" else it.decodes)[0].fail_with = 400
        assert (await it.ask())[0] == 400


@ALL
async def test_a_client_that_leaves_ends_the_legs_that_run(entry: Entry) -> None:
    async with bench(entry) as it:
        it.prefills[0].gate = it.decodes[0].gate = asyncio.Event()
        asked = asyncio.create_task(it.ask())
        running = [it.prefills[0], *([it.decodes[0]] if entry.at_once else [])]
        await until(lambda: all(each.received for each in running), "the legs")
        asked.cancel()
        await until(lambda: all(each.received[0].aborted for each in running), "their end")
        assert sum(len(each.received) for each in (*it.prefills, *it.decodes)) == len(running)


@ALL
async def test_prefill_gone_leaves_decode_alone_where_it_can_compute(entry: Entry) -> None:
    async with bench(entry) as it:
        it.prefills[0].fail_with = 503
        status, _ = await it.ask()
        assert status == (200 if entry.alone else 502)


# ---- what each is told


async def _told(entry: Entry, **body: Any) -> tuple[dict[str, Any], dict[str, Any], str, Bench]:
    async with bench(entry) as it, it.proxy.post(**body) as response:
        await response.read()
        prefill, decode = it.legs()
        params = (each.body.get("kv_transfer_params") or {} for each in (prefill, decode))
        return *params, response.headers["X-Pdlink-Transfer"], it


def entry_of(dialect: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.dialect == dialect)


TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TO_DECODE = {"do_remote_decode": False, "do_remote_prefill": True}


async def test_mooncake_decode_is_told_prefills_bootstrap_server_and_engine() -> None:
    prefill, decode, transfer_id, it = await _told(entry_of("vllm-mooncake"))
    transfer = {"transfer_id": transfer_id}
    assert prefill == TO_PREFILL | transfer
    address = f"http://127.0.0.1:{it.prefills[0].port}"
    assert decode == TO_DECODE | transfer | {"remote_bootstrap_addr": address, "remote_engine_id": "engine-0"}


async def test_mooncake_prefill_of_several_ranks_is_sent_to_the_one_that_decode_is_told() -> None:
    async with bench(entry_of("vllm-mooncake")) as it:
        worker = it.proxy.router.pools.all[0]
        assert worker.health is not None
        worker.health.link["engines"] = {"0": "engine-0", "1": "engine-1"}
        for _ in range(8):
            await it.ask()
        (prefill,), (decode,) = it.prefills, it.decodes
        ranks = [got.headers["X-data-parallel-rank"] for got in prefill.received]
        engines = [got.body["kv_transfer_params"]["remote_engine_id"] for got in decode.received]
        assert [f"engine-{rank}" for rank in ranks] == engines
        assert all("X-data-parallel-rank" not in got.headers for got in decode.received)


async def test_push_sends_both_legs_at_once_when_it_knows_the_prefill_worker() -> None:
    entry = entry_of("vllm-nixl-push")
    async with bench(entry) as it:
        assert (await it.ask())[0] == 200
        assert it.decodes[0].received[0].body["kv_transfer_params"]["remote_block_ids"] == HELD["remote_block_ids"]
        it.prefills[0].gate = asyncio.Event()
        async with it.proxy.post(stream=True) as response:
            transfer_id = response.headers["X-Pdlink-Transfer"]
            it.prefills[0].gate.set()
            await response.read()
        decode = it.decodes[0].received[1]
        assert decode.body["kv_transfer_params"] == {
            **TO_DECODE,
            "remote_engine_id": "e",
            "remote_host": "10.0.0.1",
            "remote_port": HELD["remote_port"],
            "tp_size": 2,
            "pp_size": 1,
            "dcp_size": 1,
            "remote_request_id": transfer_id,
            "transfer_id": transfer_id,
        }
        assert it.prefills[0].received[1].body["kv_transfer_params"] == TO_PREFILL | {"transfer_id": transfer_id}


@pytest.mark.parametrize("dialect", ["vllm-nixl", "vllm-nixl-push"])
async def test_push_gives_two_requests_of_one_id_transfers_of_their_own(dialect: str) -> None:
    """vLLM pairs prompt and registration by X-Request-Id: with a client's id one would get the other's KV."""
    async with bench(entry_of(dialect)) as it:
        headers, body = {"X-Request-Id": "same"}, {"model": "m", "prompt": "x"}
        for _ in range(2):
            async with it.proxy.client.post(it.proxy.url + "/v1/completions", json=body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "same"
        ids = [got.headers["X-Request-Id"] for got in it.prefills[0].received]
        assert len(set(ids)) == 2
        assert ids == [got.headers["X-Request-Id"] for got in it.decodes[0].received]


async def test_moriio_read_gives_decode_what_prefill_handed_out() -> None:
    prefill, decode, transfer_id, _ = await _told(entry_of("vllm-moriio"))
    nothing = {"remote_engine_id": None, "remote_block_ids": None}
    assert prefill == TO_PREFILL | nothing | {"transfer_id": transfer_id}
    assert decode["remote_notify_port"] == 61005
    assert decode["remote_block_ids"] == HELD["remote_block_ids"]


async def test_moriio_write_tells_each_leg_the_ports_of_the_other() -> None:
    prefill, decode, transfer_id, _ = await _told(entry_of("vllm-moriio-write"))
    common = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": transfer_id}
    ports = {"remote_host": "10.0.0.2", "remote_handshake_port": 6302, "remote_notify_port": 61006}
    assert prefill == TO_PREFILL | common | ports
    ports = {"remote_host": "10.0.0.1", "remote_handshake_port": 6301, "remote_notify_port": 61005}
    assert decode == TO_DECODE | common | ports


async def test_lmcache_prefill_is_told_decodes_ports_and_decode_nothing() -> None:
    prefill, decode, transfer_id, _ = await _told(entry_of("lmcache"))
    assert prefill == {
        "disagg_spec": {
            "req_id": transfer_id,
            "receiver_host": "10.0.0.2",
            "receiver_init_port": [8300],
            "receiver_alloc_port": [8400],
        }
    }
    assert decode == {}


async def test_lmcache_decode_starts_when_every_rank_has_told_that_its_kv_is_there() -> None:
    async with bench(entry_of("lmcache")) as it:
        arrivals = it.proxy.router._shared.arrivals  # type: ignore[union-attr]
        assert arrivals is not None
        held: list[dict[str, Any]] = []

        async def keep(spec: dict[str, Any]) -> None:
            held.append(spec)

        it.prefills[0].told = keep  # type: ignore[union-attr]
        asked = asyncio.create_task(it.ask())
        await until(lambda: bool(it.prefills[0].received) and it.prefills[0].received[0].answered, "prefill's answer")
        assert it.decodes[0].received == []
        arrivals._heard("another")
        assert it.decodes[0].received == []
        arrivals._heard(held[0]["req_id"])
        assert (await asked)[0] == 200
        await until(lambda: not arrivals._left, "nobody waits")


async def test_lmcache_decode_computes_what_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink_proxy.dialects.arrivals.PATIENCE_S", 0.01)
    async with bench(entry_of("lmcache")) as it:
        it.prefills[0].told = None  # type: ignore[union-attr]
        assert (await it.ask())[0] == 200


async def test_sglang_legs_meet_in_one_room_at_prefills_bootstrap_server() -> None:
    async with bench(entry_of("sglang")) as it, it.proxy.post(stream=True, top_k=3) as response:
        await response.read()
        prefill, decode = it.legs()
        room = prefill.body["bootstrap_room"]
        assert 0 <= room < 2**63
        wanted = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9123, "bootstrap_room": room}
        wanted |= {"rid": response.headers["X-Pdlink-Transfer"], "top_k": 3, "model": "m", "prompt": "hello"}
        assert prefill.body == wanted
        assert decode.body == wanted | {"stream": True}


async def test_sglang_says_in_its_server_info_where_its_events_are() -> None:
    said = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "", "block_size": 16}
    said |= {"dp_size": 2, "replay_endpoint_port_base": 5657}

    def made(leg: str) -> FakeSglang:
        return FakeSglang(leg, kv_events=said if leg == "prefill" else None)

    async with bench(replace(entry_of("sglang"), make=made)) as it:
        pools = it.proxy.router.pools
        assert [worker.work.publishes for worker in pools.all] == [True, False]
        assert {(each.endpoint, each.replay) for each, _ in pools.kv_events._listening} == {
            ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"),
            ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658"),
        }


async def test_sglang_prompts_of_a_batch_get_a_room_each() -> None:
    async with bench(entry_of("sglang")) as it:
        status, answer = await it.ask(prompt=["a", "b", "c"])
        assert status == 200
        assert _texts(answer).count(".0") == 3
        prefill, decode = it.legs()
        assert len(set(prefill.body["bootstrap_room"])) == 3
        assert prefill.body["bootstrap_room"] == decode.body["bootstrap_room"]
        assert prefill.body["bootstrap_host"] == ["127.0.0.1"] * 3


async def test_sglang_leg_that_is_given_up_is_aborted_by_its_id_at_once() -> None:
    """Else it would wait for its other leg for minutes (sglang#9726)."""
    async with bench(entry_of("sglang"), num=2) as it:
        it.prefills[0].fail_with = 503
        for each in it.decodes:
            each.gate = asyncio.Event()
        asked = [asyncio.create_task(it.ask()) for _ in range(2)]
        decodes = [each for each in it.decodes if isinstance(each, FakeSglang)]
        await until(lambda: sum(len(each.aborts) for each in decodes) == 1, "the abort")
        (aborted,) = (rid for each in decodes for rid in each.aborts)
        rids = [got.body["rid"] for each in decodes for got in each.received]
        assert aborted in rids
        for each in it.decodes:
            assert each.gate is not None
            each.gate.set()
        assert [(await each)[0] for each in asked] == [200, 200]


async def test_sglang_request_of_several_answers_is_refused_without_a_plain_server() -> None:
    """The KV of its prompt reaches one of them, and decode can compute no prompt."""
    async with bench(entry_of("sglang")) as it:
        status, answer = await it.ask(n=2)
        assert status == 400
        assert b"n, echo with logprobs" in answer
        assert it.prefills[0].received == it.decodes[0].received == []


@pytest.mark.parametrize("dialect", ["lmcache", "vllm-moriio-write"])
@pytest.mark.parametrize("text", ["tcp://x:1", "tcp://x:1,y", "tcp://x,tcp://y:2", "tcp://x:1,tcp://y:99999", ""])
def test_addresses_that_are_no_addresses_are_refused(dialect: str, text: str) -> None:
    workers = {"prefill": ["http://p:1"], "decode": ["http://d:1"], "control": {"http://d:1": [text]}}
    config = ProxyConfig.model_validate({"dialect": dialect, **workers})
    with pytest.raises(ConfigError, match="control: got .*; expected tcp://HOST"):
        from_settings(config, DIALECTS[dialect])


def test_lmcache_decode_worker_without_addresses_is_refused() -> None:
    with pytest.raises(ValueError, match="control: no address for the decode worker http://d:1"):
        ProxyConfig.model_validate({"dialect": "lmcache", "prefill": ["http://p:1"], "decode": ["http://d:1"]})
