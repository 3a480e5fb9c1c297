"""Sessions of agents at a worker: their KV outlives prompts of others between two turns, until they end."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from pdlink.api.fields import BadField
from pdlink.api.keys import owner_of
from pdlink.api.session import DEFAULT_TTL_S, AskedSession, asked_session, decode_session, encode_session
from pdlink.config.tiers import MAX_SESSION_CHARS, MAX_SESSION_TTL_S
from pdlink.errors import RequestAborted
from pdlink.serve.app import build_app
from pdlink.serve.tiers import KeptTurn
from tests.waiting import WAIT_S, until

from .test_shared_store import listening, worker
from .tiered import CHUNK, SAMPLING, Computed, answers, opened, prompt_of, settle, store_of

if TYPE_CHECKING:
    from pathlib import Path

    from pdlink.serve.worker import Worker

OTHERS = [prompt_of(4 * CHUNK, 100 + seed) for seed in range(12)]


def take_turn(of: Worker, prompt: tuple[int, ...], name: str) -> int | None:
    """A turn of the agent's; how many tokens its session keeps."""
    turn = KeptTurn(AskedSession("agent", 60.0))

    async def answer() -> None:
        async for _ in of.start(name, prompt, SAMPLING, None, turn=turn):
            pass

    asyncio.run(answer())
    settle(of)
    return turn.kept_tokens


@pytest.mark.parametrize("disk", [False, True])
def test_the_next_turn_computes_only_what_is_new(
    *, disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prompt_of(3 * CHUNK, 1)
    below = {"local_disk": str(tmp_path), "max_local_disk_size": 0.01} if disk else None
    with opened(records=16, below=below) as one:
        computed = Computed(one, monkeypatch)
        assert take_turn(one, first, "first") == 3 * CHUNK
        answers(one, OTHERS, at_once=False)
        computed.take()
        assert take_turn(one, first + prompt_of(7, 2), "second") == 3 * CHUNK
        assert computed.take() == 7
        state = store_of(one).state()
        assert [(each.name, each.records, each.waits) for each in state.sessions] == [("agent", 3, True)]
        store_of(one).check()


def test_a_session_waits_though_its_turn_ends_before_the_store_hears_that_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, may_hear = threading.Event(), threading.Event()
    with opened(records=16) as one:
        store, tiers = store_of(one), one.tiers
        assert tiers is not None
        hold = store.hold

        def late(*held: Any, waits: bool) -> int:
            if not waits:
                told.set()
                assert may_hear.wait(WAIT_S)
            return hold(*held, waits=waits)

        monkeypatch.setattr(store, "hold", late)

        async def leave() -> None:
            stream = one.start(
                "r", prompt_of(3 * CHUNK, 1), SAMPLING, None, turn=KeptTurn(AskedSession("agent", 60.0))
            )
            assert await asyncio.to_thread(told.wait, WAIT_S)
            one.engine.abort("r")
            with pytest.raises(RequestAborted):
                async for _ in stream:
                    pass

        asyncio.run(leave())
        until(lambda: not tiers._requests, "the engine has heard that it has ended")
        settle(one)
        assert [each.waits for each in store.state().sessions] == [True]
        may_hear.set()
        tiers._lookers.submit(lambda: None, alone=True).result(WAIT_S)
        assert [each.waits for each in store.state().sessions] == [True]


def test_without_a_session_the_same_turn_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    first = prompt_of(3 * CHUNK, 1)
    with opened(records=16) as one:
        answers(one, [first, *OTHERS], at_once=False)
        computed = Computed(one, monkeypatch)
        answers(one, [first + prompt_of(7, 2)], at_once=False)
        assert computed.take() == 3 * CHUNK + 7


def test_the_kv_of_answers_is_kept_for_the_session_where_it_is_stored() -> None:
    with opened(records=16, below={"save_decode_cache": True}) as one:
        take_turn(one, prompt_of(3 * CHUNK - 3, 1), "first")
        assert [each.records for each in store_of(one).state().sessions] == [3]


def test_a_session_in_a_store_process_is_kept_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prompt_of(3 * CHUNK, 1)
    record_nbytes = 4096 + CHUNK * 2 * 2 * 512
    with listening(tmp_path, 16 * record_nbytes) as listener, worker(tmp_path, "w") as one:
        assert one.source is not None
        assert take_turn(one, first, "first") == 3 * CHUNK
        answers(one, OTHERS, at_once=False)
        computed = Computed(one, monkeypatch)
        take_turn(one, first + prompt_of(7, 2), "second")
        assert computed.take() == 7
        assert [each.name for each in listener._store.state().sessions] == ["agent"]
        assert one.source.store.end_session("agent", "")
        assert not one.source.store.end_session("agent", "")


def test_an_engine_of_another_model_leaves_a_session_in_a_store_process_what_it_has(tmp_path: Path) -> None:
    prompt = prompt_of(3 * CHUNK, 1)
    with (
        listening(tmp_path, 32 * (4096 + CHUNK * 2 * 2 * 512)) as listener,
        worker(tmp_path, "a") as one,
        worker(tmp_path, "b") as other,
    ):
        assert other.source is not None
        other.source.rename("era")
        for number, engine in enumerate((one, other)):
            assert take_turn(engine, prompt, f"turn {number}") == 3 * CHUNK
        assert [each.records for each in listener._store.state().sessions] == [3, 3]
        assert other.source.store.end_session("agent", "")
        assert listener._store.state().sessions == []


def test_a_request_names_its_session_in_the_body_or_in_headers_and_ends_it_over_http() -> None:
    async def of_client(url: str, model: str) -> None:
        async with aiohttp.ClientSession(url) as client:

            async def post(path: str, body: dict[str, Any], **headers: str) -> Any:
                said = {name.replace("_", "-"): value for name, value in headers.items()}
                async with client.post(path, json=body, headers=said) as answer:
                    return answer.status, answer.headers.get("X-Pdlink-Session"), await answer.json()

            prompt = list(prompt_of(3 * CHUNK + 1, 1))
            body = {"model": model, "prompt": prompt, "max_tokens": 1}
            assert (await post("/v1/completions", body))[:2] == (200, None)
            kept = f"kept={3 * CHUNK} of={len(prompt)}"
            assert (await post("/v1/completions", body, X_Session_ID="a", X_Session_TTL="9"))[:2] == (200, kept)
            assert (await post("/v1/completions", body | {"session_id": "b"}, X_Session_ID="a"))[:2] == (200, kept)
            for name, known in (("a", True), ("b", True), ("a", False)):
                ended = await post("/pdlink/cache/end_session", {"session_id": name})
                assert ended == (200, None, {"ended": known})
            first, second = owner_of("key"), owner_of("other")
            for sent in (first, second, second):
                headers = {"X_Session_ID": "a", "X_Pdlink_Session_Owner": sent}
                assert (await post("/v1/completions", body, **headers))[:2] == (200, kept)
            for owner, known in (("", False), (first, True), (first, False), (None, True), (second, False)):
                ended = await post("/pdlink/cache/end_session", {"session_id": "a", "owner": owner})
                assert ended == (200, None, {"ended": known}), owner
            status, _, error = await post("/v1/completions", body, X_Session_ID="a", X_Pdlink_Session_Owner="me")
            assert (status, "X-Pdlink-Session-Owner" in error["error"]["message"]) == (400, True)
            status, _, error = await post("/v1/completions", body, X_Session_ID="x" * 129)
            assert (status, "X-Session-ID" in error["error"]["message"]) == (400, True)
            status, _, error = await post("/v1/completions", body | {"session_id": "a", "session_ttl_s": -1})
            assert (status, "session_ttl_s" in error["error"]["message"]) == (400, True)

    async def serve(of: Worker) -> None:
        server = TestServer(build_app(of))
        await server.start_server()
        try:
            async with asyncio.timeout(2 * WAIT_S):
                await of_client(str(server.make_url("")).rstrip("/"), of.model.name)
        finally:
            await server.close()

    with opened(records=64) as one:
        asyncio.run(serve(one))


def test_fields_come_before_headers_and_have_limits() -> None:
    assert asked_session(None, None, {}) is None
    assert asked_session("a", None, {"x-session-id": "b"}) == AskedSession("a", DEFAULT_TTL_S)
    assert asked_session(None, None, {"x-session-id": "b", "x-session-ttl": "2.5"}) == AskedSession("b", 2.5)
    assert asked_session("a", 7.0, {"x-session-ttl": "2.5"}) == AskedSession("a", 7.0)
    times = ("0", "-1", "nan", "inf", "soon", str(MAX_SESSION_TTL_S + 1))
    wrong = [{"x-session-id": "b", "x-session-ttl": text} for text in times]
    for said in ({"x-session-id": "b" * (MAX_SESSION_CHARS + 1)}, *wrong):
        with pytest.raises(BadField, match="X-Session"):
            asked_session(None, None, said)
    with pytest.raises(BadField, match="session_ttl_s"):
        asked_session(None, 5.0, {})


def test_an_id_that_no_answer_could_show_is_refused() -> None:
    assert asked_session("caf\u00e9", None, {}) == AskedSession("caf\u00e9", DEFAULT_TTL_S)
    for name in ("a\nb", "\x1b[2J", "\udcff"):
        with pytest.raises(BadField, match="session_id: got"):
            asked_session(name, None, {})
    for name in ("caf\u00e9", "\udcff", "a\tb"):
        with pytest.raises(BadField, match="X-Session-ID: got"):
            asked_session(None, None, {"x-session-id": name})


def test_an_id_that_looks_like_one_of_the_proxys_own_names_no_other_owner() -> None:
    asked = AskedSession("pdlink:0f:60.0:a", DEFAULT_TTL_S, "")
    assert decode_session(encode_session(*asked)) == asked


def test_a_session_goes_through_one_field_and_an_id_of_a_client_stays_one() -> None:
    for asked in (AskedSession("a: b", 0.5, "0f"), AskedSession("a", 86400.0, ""), AskedSession("x" * 128, 1e-05)):
        assert decode_session(encode_session(*asked)) == asked
    assert encode_session("a", DEFAULT_TTL_S, "") == "a"
    assert decode_session("pdlink:no") == AskedSession("pdlink:no", DEFAULT_TTL_S)
    for wrong in ("", "x" * 129, "a\nb", encode_session("a", 90000.0, "")):
        assert decode_session(wrong) is None
