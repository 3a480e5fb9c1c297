"""Sessions of agents at the proxy: turns go where the last one was, operators see them, and a call ends one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web
from yarl import URL

from pdlink.api.keys import owner_of
from pdlink.api.legs import PrefillAddress
from pdlink.api.openai import parse
from pdlink.api.session import DEFAULT_TTL_S, AskedSession, decode_session, encode_session, source_of
from pdlink.integrations.vllm_parts.versions import session_of
from pdlink_proxy.dialects import DIALECTS, TransferTerms
from pdlink_proxy.fleet import Fleet
from pdlink_proxy.placement import Pair, Placer
from pdlink_proxy.sessions import MAX_SESSIONS, KnownSessions, SessionTurn
from pdlink_proxy.siblings import SiblingPlace, Siblings
from pdlink_proxy.table import WorkerState
from tests.private import write_private
from tests.proxy.fake_sglang import TERMS, FakeSglang
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of
from tests.proxy.policies.fleets import request
from tests.proxy.test_tenants import asked

if TYPE_CHECKING:
    from pathlib import Path

TURN = SessionTurn("key", "agent", "salt", "m", 60.0)
BODY = {"model": "m", "prompt": "hello"}


def pool(side: str, *loads: int) -> list[WorkerState]:
    found = [WorkerState(f"http://{side}{number}#1", f"{side}-{number}") for number in range(len(loads))]
    for each, load in zip(found, loads, strict=True):
        each.sent(load, 0.0)
    return found


@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_loaded", "prefix", "session"])
def test_a_turn_goes_where_the_last_one_was_whatever_the_policy(policy: str) -> None:
    placer, fleet = Placer(policy, policy), Fleet(pool("prefill", 0, 0, 0), pool("decode", 0, 0, 0))
    for number in range(6):
        pinned = {"prefill": f"prefill-{number % 3}", "decode": f"decode-{number // 2}"}
        placed = placer.place(request(1, 2, pinned=pinned), fleet)
        assert isinstance(placed, Pair)
        assert placed.prefill is not None
        assert {"prefill": placed.prefill.label, "decode": placed.decode.label} == pinned


def test_a_worker_that_is_gone_or_has_too_much_to_do_gets_no_turn() -> None:
    placer = Placer("least_loaded", "least_loaded")
    pinned = {"prefill": "prefill-0", "decode": "decode-9"}
    for load, expected in ((200, "prefill-0"), (201, "prefill-1")):
        placed = placer.place(request(1, 2, pinned=pinned), Fleet(pool("prefill", load, 0), pool("decode", 0, 0)))
        assert isinstance(placed, Pair)
        assert placed.prefill is not None
        assert placed.prefill.label == expected


def test_what_is_known_of_a_session_ends_with_its_time_after_the_last_turn() -> None:
    known = KnownSessions()
    workers = {"prefill": "prefill-0", "decode": "decode-1"}
    assert known.placed(TURN, workers, 100, 0.0, again=False) == "turn 1 of session agent"
    assert known.where(TURN, 1000.0) == workers, "it runs"
    known.ended(TURN, 1000.0)
    assert known.where(TURN, 1059.0) == workers
    assert known.where(TURN._replace(owner="other"), 1059.0) == {}
    assert known.where(TURN, 1060.0) == {}
    assert known.shown(1060.0) == []
    assert known.placed(TURN, workers, 100, 1060.0, again=False) == "turn 1 of session agent"


def test_people_are_told_which_turn_it_is_and_when_it_moves() -> None:
    known = KnownSessions()
    known.placed(TURN, {"prefill": "prefill-0", "decode": "decode-1"}, 100, 0.0, again=False)
    assert known.placed(TURN, {"decode": "decode-1"}, 10, 1.0, again=False).endswith(", where the last one was")
    told = known.placed(TURN, {"prefill": "prefill-1", "decode": "decode-1"}, 10, 2.0, again=False)
    assert told == "turn 3 of session agent, not where the last one was: prefill-0 gone or too busy"
    (shown,) = known.shown(3.0)
    assert (shown.turns, shown.moved, shown.running, shown.tokens) == (3, 1, 3, 10)
    known.placed(TURN, {"prefill": "prefill-1"}, 10, 2.0, again=True)
    assert (shown.turns, shown.running) == (3, 3), "a retry is no turn"
    assert known.end("other", "agent") == []
    assert known.end("key", "agent") == ["salt"]


@pytest.mark.parametrize("other", [TURN._replace(salt="other"), TURN._replace(model="other")])
def test_one_id_with_two_salts_or_models_is_two_sessions_which_one_call_ends(other: SessionTurn) -> None:
    known = KnownSessions()
    known.placed(TURN, {"prefill": "prefill-0"}, 100, 0.0, again=False)
    assert known.where(other, 1.0) == {}, "its KV is another one"
    known.placed(other, {"prefill": "prefill-1"}, 100, 1.0, again=False)
    assert known.where(TURN, 2.0) == {"prefill": "prefill-0"}
    assert known.end("key", "agent") == [TURN.salt, other.salt]


def test_there_is_a_most_of_sessions() -> None:
    known = KnownSessions()
    for number in range(MAX_SESSIONS + 5):
        known.placed(TURN._replace(id=str(number)), {}, 1, 0.0, again=False)
    assert len(known._known) == MAX_SESSIONS
    assert known.where(TURN._replace(id="4"), 0.0) == {}


class Keeper(FakeWorker):
    """A worker that keeps KV of sessions."""

    def routes(self) -> list[web.RouteDef]:
        self.ended: list[Any] = []
        self.owners: set[str] = set()
        """Of sessions that it keeps."""

        async def end(request: web.Request) -> web.Response:
            self.ended.append(await request.json())
            owner = self.ended[-1]["owner"]
            is_known = owner in {None, *self.owners}
            self.owners.discard(owner)
            return web.json_response({"ended": is_known})

        return [*super().routes(), web.post("/pdlink/cache/end_session", end)]


async def turn(proxy: Proxy, **headers: str) -> tuple[str, str]:
    said = {name.replace("_", "-"): value for name, value in headers.items()}
    async with proxy.client.post(f"{proxy.url}/v1/completions", json=BODY, headers=said) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["X-Pdlink-Prefill"], answer.headers["X-Request-Id"]


async def test_turns_stay_at_their_workers_until_the_session_ends_by_a_call() -> None:
    workers = [Keeper(role=role) for role in ("prefill", "prefill", "prefill", "decode")]
    for each in workers:
        await each.start()
    try:
        async with proxy_of(workers[:3], workers[3:]) as proxy:
            first, _ = await turn(proxy, X_Session_ID="agent", X_Session_TTL="30")
            assert {(await turn(proxy))[0] for _ in range(3)} == {f"prefill-{n}" for n in range(3)}
            for _ in range(4):
                where, request_id = await turn(proxy, X_Session_ID="agent")
                assert where == first
                await turn(proxy)
            received = next(one for each in workers[:3] for one in each.received if "X-Session-ID" in one.headers)
            assert (received.headers["X-Session-ID"], received.headers["X-Session-TTL"]) == ("agent", "30")
            async with proxy.client.get(f"{proxy.url}/decisions?request={request_id}") as answer:
                placed = next(each for each in (await answer.json())["decisions"] if each["verdict"] == "placed")
                assert placed["session"] == "turn 5 of session agent, where the last one was"
            async with proxy.client.get(f"{proxy.url}/pdlink/sessions") as answer:
                (shown,) = (await answer.json())["sessions"]
                assert (shown["id"], shown["turns"], shown["workers"]["prefill"]) == ("agent", 5, first)
            async with proxy.client.get(f"{proxy.url}/pdlink/state") as answer:
                assert (await answer.json())["sessions"] == [shown]
            async with proxy.client.delete(f"{proxy.url}/pdlink/sessions/agent") as answer:
                assert (await answer.json()) == {"session_id": "agent", "ended": 4, "of": 4}
            ended = {"session_id": "agent", "cache_salt": "", "owner": None}
            assert [each.ended for each in workers] == [[ended]] * 4
            async with proxy.client.get(f"{proxy.url}/pdlink/sessions") as answer:
                assert (await answer.json())["sessions"] == []
    finally:
        for each in workers:
            await each.stop()


async def test_a_key_ends_its_own_sessions_alone(tmp_path: Path) -> None:
    prefill, decode = Keeper(role="prefill"), Keeper(role="decode")
    await prefill.start()
    await decode.start()
    more: dict[str, Any] = {"api_keys": ["a", "b"], "admin_key_file": str(write_private(tmp_path / "admin", "boss"))}
    places = [Siblings(SiblingPlace(str(tmp_path), number, 2)) for number in range(2)]
    try:
        async with (
            proxy_of([prefill], [decode], siblings=places[0], **more) as proxy,
            proxy_of([prefill], [decode], siblings=places[1], **more) as other,
        ):
            body = BODY | {"session_id": "mine", "cache_salt": "s"}
            forged = {"X_Pdlink_Session_Owner": owner_of("b")}
            assert (await asked(proxy, "POST", "/v1/completions", "a", body, **forged))[0] == 200
            assert prefill.received[-1].headers["X-Pdlink-Session-Owner"] == owner_of("a")
            prefill.owners = {owner_of("a")}
            decode.owners = {owner_of("a")}
            assert (await asked(proxy, "DELETE", "/pdlink/sessions/mine", "b"))[0] == 404
            prefill.ended.clear()
            assert (await asked(proxy, "DELETE", "/pdlink/sessions/mine", "nobody"))[0] == 401
            assert (await asked(proxy, "GET", "/pdlink/sessions", "a"))[0] == 403
            assert (await asked(proxy, "GET", "/pdlink/sessions", "boss"))[1]["of"] == 1
            assert prefill.ended == []
            assert (await asked(other, "DELETE", "/pdlink/sessions/mine", "a"))[1]["ended"] == 2, "from any process"
            assert prefill.ended == [{"session_id": "mine", "cache_salt": "s", "owner": owner_of("a")}]
            assert (await asked(proxy, "DELETE", "/pdlink/sessions/mine", "a"))[0] == 404
            assert (await asked(proxy, "DELETE", "/pdlink/sessions/x?cache_salt=t", "boss"))[0] == 200
            assert prefill.ended[-1] == {"session_id": "x", "cache_salt": "t", "owner": None}
            for key in ("a", "b"):
                assert (await asked(proxy, "POST", "/v1/completions", key, body))[0] == 200
                prefill.owners.add(owner_of(key))
                decode.owners.add(owner_of(key))
            assert (await asked(proxy, "DELETE", "/pdlink/sessions/mine", "b"))[1]["ended"] == 2
            assert prefill.ended[-1] == {"session_id": "mine", "cache_salt": "s", "owner": owner_of("b")}
            assert (await asked(proxy, "GET", "/pdlink/sessions", "boss"))[1]["of"] == 1, "that of the other key"
    finally:
        await prefill.stop()
        await decode.stop()


async def test_a_key_ends_its_session_after_a_restart_of_the_proxy(tmp_path: Path) -> None:
    prefill, decode = Keeper(role="prefill"), Keeper(role="decode")
    await prefill.start()
    await decode.start()
    prefill.owners = {owner_of("a")}
    more: dict[str, Any] = {"api_keys": ["a", "b"], "admin_key_file": str(write_private(tmp_path / "admin", "boss"))}
    try:
        async with proxy_of([prefill], [decode], **more) as proxy:
            where = "/pdlink/sessions/mine?cache_salt=s"
            assert (await asked(proxy, "DELETE", where, "b"))[0] == 404
            assert (await asked(proxy, "DELETE", where, "a"))[1] == {"session_id": "mine", "ended": 1, "of": 2}
            assert prefill.ended[-1] == {"session_id": "mine", "cache_salt": "s", "owner": owner_of("a")}
            assert (await asked(proxy, "DELETE", where, "a"))[0] == 404
    finally:
        await prefill.stop()
        await decode.stop()


async def test_servers_of_sglang_are_told_and_count_if_they_have_the_plugin() -> None:
    prefill, decode = FakeSglang("prefill"), FakeSglang("decode", has_plugin=False)
    for each in (prefill, decode):
        await each.start()
    try:
        async with (
            proxy_of([prefill], [decode], dialect="sglang") as proxy,
            proxy.client.delete(f'{proxy.url}/pdlink/sessions/a%20"b"?cache_salt=s') as answer,
        ):
            assert await answer.json() == {"session_id": 'a "b"', "ended": 1, "of": 2}
        assert prefill.ended == decode.ended == [{"session_id": 'a "b"', "cache_salt": "s", "owner": None}]
    finally:
        for each in (prefill, decode):
            await each.stop()


async def test_a_session_id_that_is_too_long_is_refused_by_name(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        for body, headers, named in (
            ({"session_id": "x" * 129}, {}, "session_id"),
            ({"session_id": 5}, {}, "session_id"),
            ({}, {"X-Session-ID": "x" * 129}, "X-Session-ID"),
            ({}, {"X-Session-ID": "caf\u00e9"}, "X-Session-ID"),
            ({"session_id": "a"}, {"X-Session-TTL": "for ever"}, "X-Session-TTL"),
            ({"session_ttl_s": 5}, {}, "session_ttl_s"),
        ):
            async with proxy.client.post(f"{proxy.url}/v1/completions", json=BODY | body, headers=headers) as answer:
                assert answer.status == 400
                assert named in (await answer.json())["error"]["message"]
        assert prefill.received == []


async def test_two_session_headers_are_refused(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        two = [("X-Session-ID", "a"), ("X-Session-ID", "b")]
        async with proxy.client.post(f"{proxy.url}/v1/completions", json=BODY, headers=two) as answer:
            assert answer.status == 400
            assert "X-Session-ID: got several" in (await answer.json())["error"]["message"]
        assert prefill.received == []


async def test_a_turn_whose_legs_cannot_begin_does_not_run_for_ever(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("a dialect has failed")

    monkeypatch.setattr("pdlink_proxy.request.Attempt", broken)
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.client.post(f"{proxy.url}/v1/completions", json=BODY | {"session_id": "a"}) as answer:
            assert answer.status == 500
        async with proxy.client.get(f"{proxy.url}/pdlink/sessions") as answer:
            (shown,) = (await answer.json())["sessions"]
            assert (shown["turns"], shown["running"]) == (1, 0)


async def test_bytes_that_are_no_text_name_no_session(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        body = msgspec.json.encode(BODY)
        head = f"Host: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(proxy.url).port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nX-Session-ID: \xff\r\n" + head.encode() + b"\r\n" + body)
        answer = await reader.read()
        writer.close()
        async with proxy.client.get(f"{proxy.url}/pdlink/sessions") as shown:
            assert (shown.status, await shown.json()) == (200, {"sessions": [], "of": 0})
        assert answer.split()[1] == b"400"


def test_both_legs_of_vllm_name_the_session_to_its_connector() -> None:
    call = parse("/v1/completions", b'{"model":"m","prompt":"x"}')
    terms = TransferTerms(
        transfer_id="xfer-1", created=1, seed=0, prefill=PrefillAddress("tcp://127.0.0.1:1"), turn=TURN
    )
    for body in DIALECTS["vllm"].legs(call, terms):
        params = msgspec.json.decode(body)["kv_transfer_params"]
        assert (params["session_id"], params["session_ttl_s"]) == ("agent", 60.0)
        request = SimpleNamespace(kv_transfer_params=params)
        assert session_of(request) == AskedSession("agent", 60.0, "key")
    for body in DIALECTS["vllm"].legs(call, msgspec.structs.replace(terms, turn=None)):
        assert "session_id" not in msgspec.json.decode(body)["kv_transfer_params"]


def test_vllm_hands_its_connector_the_session_of_a_client_from_0_33_on() -> None:
    assert session_of(SimpleNamespace(kv_transfer_params=None, session_id="a")) == AskedSession("a", DEFAULT_TTL_S)
    for params in (
        None,
        {},
        {"session_id": 5},
        {"session_id": "x" * 129},
        {"session_id": "\udcff"},
        {"session_id": "a", "session_ttl_s": -1},
        {"session_id": "a", "session_owner": 5},
        {"session_id": "a", "session_owner": "x" * 33},
    ):
        assert session_of(SimpleNamespace(kv_transfer_params=params)) is None


def test_both_legs_of_sglang_name_the_session_unless_it_is_one_of_its_own() -> None:
    turn = TURN._replace(owner="0a", id="agent: 7")
    terms = msgspec.structs.replace(TERMS, turn=turn)
    call = parse("/v1/completions", b'{"model":"m","prompt":"x","session_id":"agent: 7"}')
    for body in DIALECTS["sglang"].legs(call, terms):
        assert decode_session(msgspec.json.decode(body)["session_id"]) == AskedSession("agent: 7", 60.0, "0a")
    named = msgspec.structs.replace(terms, source="tcp://127.0.0.1:7")
    for each, session in (
        (named, AskedSession("agent: 7", 60.0, "0a")),
        (msgspec.structs.replace(named, turn=None), None),
    ):
        prefill, decode = (
            msgspec.json.decode(body).get("session_id", "") for body in DIALECTS["sglang"].legs(call, each)
        )
        assert (source_of(prefill), decode_session(prefill)) == ("tcp://127.0.0.1:7", session)
        assert source_of(decode) == "", "it computes no prompt"
    assert source_of(encode_session("pdlink@tcp://127.0.0.1:9 agent", DEFAULT_TTL_S, "")) == "", "a client names none"
    call = parse("/v1/completions", b'{"model":"m","prompt":"x","session_params":{"id":"theirs"}}')
    for body in DIALECTS["sglang"].legs(call, terms):
        assert "session_id" not in msgspec.json.decode(body)
