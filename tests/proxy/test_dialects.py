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

from pdlink.api.health import Health
from pdlink.config.proxy import DialectName
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.dialects.base import KnownHealth
from pdlink_proxy.dialects.vllm import _without_params
from pdlink_proxy.upstream import Asking, Reply
from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fake_vllm import FakeVllm
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


ENTRIES = [
    Entry("pdlink", lambda leg: FakeWorker(leg)),
    Entry("vllm", _vllm("pdlink"), control=_of_prefills("tcp")),
    Entry("vllm-nixl", _vllm("nixl"), at_once=False),
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
            yield Bench(proxy, prefills, decodes)
        for each in (*prefills, *decodes):
            assert getattr(each, "strange", []) == []


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


def entry_of(dialect: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.dialect == dialect)


async def test_two_requests_of_one_id_get_transfers_of_their_own_from_nixl() -> None:
    """vLLM pairs prompt and registration by X-Request-Id: with a client's id one would get the other's KV."""
    async with bench(entry_of("vllm-nixl")) as it:
        headers, body = {"X-Request-Id": "same"}, {"model": "m", "prompt": "x"}
        for _ in range(2):
            async with it.proxy.client.post(it.proxy.url + "/v1/completions", json=body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "same"
        ids = [got.headers["X-Request-Id"] for got in it.prefills[0].received]
        assert len(set(ids)) == 2
        assert ids == [got.headers["X-Request-Id"] for got in it.decodes[0].received]


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
        pools = it.proxy.router.services.pools
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


async def test_sglang_leg_of_messages_that_is_given_up_ends_with_its_connection() -> None:
    """`AnthropicMessagesRequest` has no `rid` (0.5.23), so nothing can be aborted by one."""
    async with bench(entry_of("sglang"), num=2) as it:
        it.prefills[0].fail_with = 503
        for each in it.decodes:
            each.gate = asyncio.Event()
        said = [{"role": "user", "content": "hello"}]
        asked = [asyncio.create_task(it.ask("/v1/messages", messages=said, max_tokens=3)) for _ in range(2)]
        await until(lambda: any(got.aborted for each in it.decodes for got in each.received), "its end")
        for each in it.decodes:
            assert each.gate is not None
            each.gate.set()
        assert [(await each)[0] for each in asked] == [200, 200]
        servers = [each for each in (*it.prefills, *it.decodes) if isinstance(each, FakeSglang)]
        assert [each.aborts for each in servers] == [[], [], [], []]
        assert not any("rid" in got.body for each in servers for got in each.received)


async def test_sglang_request_of_several_answers_is_refused_without_a_plain_server() -> None:
    """The KV of its prompt reaches one of them, and decode can compute no prompt."""
    async with bench(entry_of("sglang")) as it:
        status, answer = await it.ask(n=2)
        assert status == 400
        assert b"n, echo with logprobs" in answer
        assert it.prefills[0].received == it.decodes[0].received == []


async def test_only_a_life_that_was_not_well_is_asked_whether_it_takes_our_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def well(epoch: str) -> Health:
        return Health("ok", name="w", epoch=epoch, role=None, model="m", control=None)

    asked: list[str] = []

    async def ask(_asking: Asking, path: str) -> Reply:
        asked.append(path)
        return Reply(200, msgspec.json.encode(well("1")))

    monkeypatch.setattr("pdlink_proxy.dialects.own.ask", ask)
    asking, look = Asking(None, "http://w", 1.0), DIALECTS["pdlink"].look  # type: ignore[arg-type]
    for last, was_well, paths in (
        (None, False, 2),
        (well("1"), True, 1),
        (well("1"), False, 2),
        (well("0"), True, 2),
    ):
        asked.clear()
        assert isinstance(await look(asking, KnownHealth(last, well=was_well)), Health)
        assert asked == ["/health", "/v1/models"][:paths]


@pytest.mark.parametrize("dialect", ["vllm", "vllm-nixl", "sglang"])
async def test_a_well_engine_that_answers_its_legs_is_not_asked_whether_it_lives(dialect: str) -> None:
    last = Health("ok", name="w", epoch="1", role=None, model="m", control=None)
    asking, look = Asking(None, "http://w", 1.0), DIALECTS[dialect].look  # type: ignore[arg-type]
    assert await look(asking, KnownHealth(last, well=True, spoke=True)) is last
    for known in (KnownHealth(last, well=True), KnownHealth(last, well=False, spoke=True)):
        with pytest.raises(AttributeError):  # there is nobody to ask
            await look(asking, known)


def test_an_event_of_vllm_that_is_no_json_passes_as_it_is() -> None:
    for event in (b'data: {"kv_transfer_params":{"x": }\n\n', b"[1]", b'{"kv_transfer_params":{' + b"[" * 9000):
        assert _without_params(event) == event
