"""The page for people: its sentence, its state and its files; a browser looks at it in `test_page_browser.py`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from pdlink_proxy.page import reports
from pdlink_proxy.page.report import Report
from pdlink_proxy.page.view import view
from pdlink_proxy.records import RequestRecord
from tests.pictures import NAMES, ROOT, is_of_this_page
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until

NOW_S = 1e9


def worker(label: str, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"state": "ok", "reason": "", "in_flight": 0, "plain": False, "fails": False}
    said["cell"] = ""
    said |= {"left_out": "", "no_kv_events": "", "health": {"name": label, "model": "m", "control": ""}}
    return {"label": label, "url": f"http://{label}", "side": label.partition("-")[0], **said, **more}


def record(number: int = 0, **more: Any) -> RequestRecord:
    said: dict[str, Any] = {"outcome": "ok", "kv": "transferred", "prompt_tokens": 9, "attempts": 1, "total_s": 1.0}
    said |= {
        "queued_s": 0.1,
        "prefill_s": 0.5,
        "decode_s": 0.7,
        "ttft_s": 0.6,
        "prefill": "prefill-0",
        "decode": "decode-0",
    }
    said |= {"request_id": f"r{number}", "transfer_id": f"t{number}", "at_s": NOW_S}
    return RequestRecord(**(said | more))


def sent(**more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"transfer_id": "t", "side": "sender", "peer": "decode-0", "lane": "mapped"}
    said |= {"state": "DONE", "reason": "", "nbytes": 4_000_000, "ended_s_ago": 1.0, "life_s": 1.0, "layers": 8}
    return said | {"moving_s": 0.002, "exposed_s": 0.0} | more


def report(**more: Any) -> Report:
    return msgspec.convert({"name": "prefill-0", **more}, Report)


WAS_AWAY = {"kind": "away", "now": False, "level": "warn", "text": "decode-0 was away for 9 s"}
IS_AWAY = {"kind": "away", "now": True, "level": "bad", "text": "decode-1 is away"}
FAILED = {"kind": "failed", "now": False, "level": "bad", "text": "1 request failed (broken)"}


def seen(**more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"now_s": NOW_S, "status": "ok", "reason": "", "refused_pairs": [], "records": [record()]}
    given |= {
        "mismatched": [],
        "workers": [worker("prefill-0"), worker("decode-0")],
        "reports": {},
        "reported_s": NOW_S,
        "running": 0,
        "queued": 0,
    }
    return view(**(given | more))


def test_engines_behind_one_url_have_a_name_and_pairs_each() -> None:
    engines = [
        worker(
            f"prefill-{number}",
            url="http://p",
            health={"name": "p", "model": "m", "control": ""},
            data_parallel_rank=number,
        )
        for number in range(2)
    ]
    refused = [{"prefill": "p/dp1", "decode": "decode-0", "factor": "model", "local": "a", "remote": "b"}]
    found = seen(workers=[*engines, worker("decode-0")], refused_pairs=refused)
    assert [each["name"] for each in found["workers"]] == ["p/dp0", "p/dp1", "decode-0"]
    assert [(each["prefill"], each["state"]) for each in found["pairs"]] == [
        ("prefill-0", "no session"),
        ("prefill-1", "refused"),
    ]


def test_pairs_of_a_thousand_workers_are_a_table_of_bounded_size() -> None:
    many = [worker(f"{side}-{number}") for side in ("prefill", "decode") for number in range(500)]
    shown = seen(workers=many)
    assert len(shown["workers"]) == 1000
    pairs = {(pair["prefill"], pair["decode"]) for pair in shown["pairs"]}
    assert pairs == {(f"prefill-{one}", f"decode-{other}") for one in range(32) for other in range(32)}


async def test_a_report_that_is_no_json_is_none(prefill: FakeWorker, decode: FakeWorker) -> None:
    prefill.report, decode.report = b'{"name":' + b"[" * 60_000, b'{"name":"\xe9"}'
    async with proxy_of([prefill], [decode]) as proxy, proxy.client.get(proxy.url + "/pdlink/state") as response:
        assert response.status == 200
        assert [each["requests"] for each in (await response.json())["workers"]] == [None, None]


@pytest.mark.parametrize(
    ("more", "level", "words"),
    [
        ({}, "ok", "KV of 100% was transferred"),
        ({"records": []}, "idle", "No request in the last five minutes"),
        ({"records": [record(at_s=NOW_S - 301)]}, "idle", "No request"),
        (
            {"status": "unavailable", "reason": "no healthy decode worker"},
            "bad",
            "No request can be served: no healt",
        ),
        ({"records": [record(), record(outcome="broken")]}, "bad", "50% of 2 requests ended as broken"),
        (
            {"workers": [worker("prefill-0", state="unreachable", reason="no answer"), worker("decode-0")]},
            "warn",
            "1 of 2 workers is away: prefill-0, http://prefill-0 is unreachable: no answer. What to do: start",
        ),
        ({"happened": [WAS_AWAY]}, "ok", "was transferred. In the last 15 minutes: decode-0 was away for 9 s."),
        (
            {"records": [record(), record(outcome="broken")], "happened": [FAILED, WAS_AWAY, IS_AWAY]},
            "bad",
            "tells of the newest. In the last 15 minutes: decode-0 was away for 9 s.",
        ),
    ],
)
def test_sentence_on_top_names_the_worst_what_to_do_and_what_happened(
    more: dict[str, Any], level: str, words: str
) -> None:
    verdict = seen(**more)["verdict"]
    assert verdict["level"] == level
    assert words in verdict["text"]


def test_pair_shows_its_lane_and_the_speed_while_kv_moves() -> None:
    session = {"peer": "decode-0", "state": "ready", "transport": "tcp", "lane": "tcp/eth0"}
    reports = {"http://prefill-0": report(peers=[session], ended=[sent(), sent(moving_s=0.006)])}
    (pair,) = seen(reports=reports)["pairs"]
    assert (pair["state"], pair["lane"], pair["gb_per_s"]) == ("ready", "tcp/eth0", pytest.approx(1.0))


def test_a_pair_of_an_engine_with_names_of_its_own_shows_its_lane_if_it_can_be_no_other() -> None:
    session = {"peer": "decode/0", "state": "ready", "transport": "mapped", "lane": "mapped"}
    reports = {"http://prefill-0": report(peers=[session], held=0.5)}
    (pair,) = seen(reports=reports)["pairs"]
    assert (pair["state"], pair["lane"]) == ("ready", "mapped")
    several = [worker("prefill-0"), worker("decode-0"), worker("decode-1")]
    assert {pair["state"] for pair in seen(reports=reports, workers=several)["pairs"]} == {"not told"}
    assert {pair["state"] for pair in seen(workers=several)["pairs"]} == {"no session"}


def test_causes_are_counted_with_the_newest_request_of_each() -> None:
    odd = [
        record(1, kv="recomputed;reason=lease"),
        record(2, kv="recomputed;reason=lease"),
        record(3, outcome="failed"),
    ]
    assert seen(records=[record(), *odd])["errors"] == [
        {"kind": "recomputed", "cause": "lease", "count": 2, "newest": "r2"},
        {"kind": "request", "cause": "failed", "count": 1, "newest": "r3"},
    ]


async def state_of(proxy: Proxy, **headers: str) -> dict[str, Any]:
    async with proxy.client.get(f"{proxy.url}/pdlink/state", headers=headers) as response:
        assert response.status == 200
        found: dict[str, Any] = await response.json()
        return found


async def test_workers_are_asked_only_while_somebody_looks(prefill: FakeWorker, decode: FakeWorker) -> None:
    prefill.report = json.dumps({"name": prefill.name, "requests": {"running": 3}, "unknown": 1}).encode()
    decode.report = b'{"name": 7}'  # not a report
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.post(prompt="x", max_tokens=1) as response:
            request_id = response.headers["X-Request-Id"]
            await response.read()
        await proxy.stream(prompt="y")
        assert prefill.reported == decode.reported == 0
        states = await asyncio.gather(*(state_of(proxy) for _ in range(5)))
        assert prefill.reported == 1, "five who look cost a worker as much as one"
    newest, oldest = states[0]["requests"]
    assert oldest["request_id"] == request_id
    assert (newest["outcome"], newest["kv"], newest["prefill"], newest["decode"]) == (
        "ok",
        "transferred",
        "prefill-0",
        "decode-0",
    )
    assert 0 <= newest["queued_s"] <= newest["ttft_s"] <= newest["total_s"]
    assert [one["requests"] for one in states[0]["workers"]] == [{"running": 3}, None]
    assert (states[0]["engine"], newest["model"]) == ("built-in", "m")


async def test_tokens_of_a_prompt_are_a_guess_unless_the_answer_or_the_client_has_counted_them(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        await proxy.stream(prompt="x" * 40)
        await proxy.stream(prompt=[1, 2, 3])
        decode.cached_tokens = 0
        await proxy.stream(prompt="x" * 40, stream_options={"include_usage": True})
        told = [(each["prompt_tokens"], each["estimated"]) for each in (await state_of(proxy))["requests"]]
    assert told[1:] == [(3, False), (11, True)]
    assert told[0][1] is False


async def test_rates_are_of_seconds_and_of_workers_that_were_heard_at_both_ends(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one second they came and went, and a late report made a figure 0."""
    monkeypatch.setattr(reports, "_FRESH_S", 0.0)

    def said(worker: FakeWorker, sampled: int, nbytes: int) -> None:
        totals = {"transfer_bytes": {"mapped": nbytes}}
        worker.report = json.dumps({"name": worker.name, "sampled": sampled, "totals": totals}).encode()

    async with proxy_of([prefill], [decode]) as proxy:
        said(prefill, 0, 1000)
        said(decode, 100, 0)
        assert (await state_of(proxy))["rates"] is None
        said(prefill, 0, 3000)
        said(decode, 150, 0)
        await state_of(proxy)
        prefill.report = None
        said(decode, 200, 0)
        rates = (await state_of(proxy))["rates"]
        past = [at_s for at_s, _ in proxy.router.services.reports._past]
        assert rates["tokens_per_s"] == pytest.approx(100 / (past[-1] - past[0]))
        said(prefill, 0, 5000)
        said(decode, 10, 0)
        rates = (await state_of(proxy))["rates"]
        took_s = proxy.router.services.reports._past[-1][0] - past[0]
    assert rates["tokens_per_s"] == pytest.approx(10 / took_s), "another life counts from its start"
    assert rates["kv_bytes_per_s"] == {"mapped": pytest.approx(4000 / took_s)}


async def test_page_holds_no_data_and_its_state_wants_the_key(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode], api_keys=["secret"]) as proxy:
        for name in ("", "page.js", "page.css", "draw.js"):
            async with proxy.client.get(f"{proxy.url}/pdlink/{name}") as response:
                assert response.status == 200
                assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
        async with proxy.client.get(f"{proxy.url}/pdlink/state") as response:
            assert response.status == 401
        assert (await state_of(proxy, Authorization="Bearer secret"))["verdict"]["level"] == "idle"
        async with proxy.client.get(f"{proxy.url}/pdlink", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, "pdlink/")


async def test_a_record_has_the_tokens_that_the_usage_says_and_the_time_of_each_further_one(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    usage = b'"usage":{"prompt_tokens":25,"completion_tokens":8,"total_tokens":33}'
    decode.answer_override = b'{"choices":[{"index":0,"text":"a"}],%b}' % usage
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.post(prompt="x") as response:
            assert response.status == 200
        (record,) = (await state_of(proxy))["requests"]
    assert (record["prompt_tokens"], record["estimated"]) == (25, False)
    assert record["per_token_s"] == pytest.approx((record["total_s"] - record["ttft_s"]) / 7)


@pytest.mark.parametrize(("prompt", "estimated"), [("some text", True), ([5, 6, 7], False)])
async def test_a_record_says_where_the_tokens_of_a_prompt_are_a_guess(
    prefill: FakeWorker, decode: FakeWorker, prompt: Any, estimated: bool
) -> None:
    """Streams have no usage unless their client asks for it."""
    async with proxy_of([prefill], [decode]) as proxy:
        await proxy.stream(prompt=prompt)
        await until(lambda: not proxy.router.services.requests, "the end of the request")
        (record,) = (await state_of(proxy))["requests"]
    assert (record["prompt_tokens"], record["estimated"]) == (3, estimated)


def test_pictures_in_the_docs_are_of_this_page() -> None:
    for name in NAMES:
        assert is_of_this_page((ROOT / "docs" / name).read_bytes()), (
            f"docs/{name}: the page has changed; make pictures"
        )


async def test_page_can_be_switched_off(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode], page=False) as proxy:
        for path in ("", "state", "page.js"):
            async with proxy.client.get(f"{proxy.url}/pdlink/{path}") as response:
                assert response.status == 404
