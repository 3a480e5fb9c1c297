"""The page for people: its sentence, its state, its files, and what a real browser makes of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdlink_proxy.page.reports import Report
from pdlink_proxy.page.view import view
from pdlink_proxy.records import RequestRecord
from pdlink_proxy.worker import State
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until

NOW_S = 1e9
HOSTILE = "<img src=x>[red]"


def worker(label: str, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"state": "ok", "reason": "", "in_flight": 0, "health": {"name": label, "model": "m"}}
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


def seen(**more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"now_s": NOW_S, "status": "ok", "reason": "", "refused_pairs": [], "records": [record()]}
    given |= {
        "workers": [worker("prefill-0"), worker("decode-0")],
        "reports": {},
        "reported_s": NOW_S,
        "running": 0,
        "queued": 0,
    }
    return view(**(given | more))


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
        ({"status": "unavailable", "reason": "no healthy decode worker"}, "bad", "no healthy decode worker"),
        ({"records": [record(), record(outcome="broken")]}, "bad", "50% of 2 requests failed"),
        (
            {"workers": [worker("prefill-0", state="unreachable", reason="no answer"), worker("decode-0")]},
            "warn",
            "1 of 2 workers are away, first prefill-0: no answer",
        ),
        (
            {"records": [record(), record(kv="recomputed;reason=peer_lost")]},
            "warn",
            "50% of 2 requests computed their prompt on decode, most of them for peer_lost",
        ),
        (
            {
                "refused_pairs": [
                    {"prefill": "prefill-0", "decode": "decode-0", "factor": "dtype", "local": "f16", "remote": "f32"}
                ]
            },
            "warn",
            "prefill-0 and decode-0: dtype differs",
        ),
    ],
)
def test_sentence_on_top_names_the_worst_and_where(more: dict[str, Any], level: str, words: str) -> None:
    verdict = seen(**more)["verdict"]
    assert verdict["level"] == level
    assert words in verdict["text"]


def test_sentence_blames_the_link_only_if_prefill_does_not_hide_it() -> None:
    slow = {"http://prefill-0": report(ended=[sent(moving_s=0.1, exposed_s=0.05)] * 10)}
    assert "50% of the time in which KV moves comes after" in seen(reports=slow)["verdict"]["text"]
    fast = {"http://prefill-0": report(ended=[sent(exposed_s=0.0001)] * 10)}
    assert seen(reports=fast)["verdict"]["level"] == "ok"
    tiny = {"http://prefill-0": report(ended=[sent(moving_s=0.002, exposed_s=0.001)] * 10)}
    assert seen(reports=tiny)["verdict"]["level"] == "ok", "1 ms of 600 until the first token"
    few = {"http://prefill-0": report(ended=[sent(moving_s=0.1, exposed_s=0.05)] * 9)}
    assert seen(reports=few)["verdict"]["level"] == "ok"


def test_pair_shows_its_lane_and_the_speed_while_kv_moves() -> None:
    session = {"peer": "decode-0", "state": "ready", "transport": "tcp", "lane": "tcp/eth0"}
    reports = {"http://prefill-0": report(peers=[session], ended=[sent(), sent(moving_s=0.006)])}
    (pair,) = seen(reports=reports)["pairs"]
    assert (pair["state"], pair["lane"], pair["gb_per_s"]) == ("ready", "tcp/eth0", pytest.approx(1.0))


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


async def test_page_can_be_switched_off(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode], page=False) as proxy:
        for path in ("", "state", "page.js"):
            async with proxy.client.get(f"{proxy.url}/pdlink/{path}") as response:
                assert response.status == 404


class _Cells(HTMLParser):
    """Texts of the table cells and of the elements with an id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.verdict, self._in_cell, self._in_verdict = "", False, False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        self._in_cell = tag == "td" or (self._in_cell and tag in ("i", "button", "span"))
        self._in_verdict = dict(attrs).get("id") == "verdict"

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag != "td"
        self._in_verdict &= tag != "p"

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data
        if self._in_verdict:
            self.verdict += data


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


async def browser(url: str, folder: Path, wanted: str = "--dump-dom") -> str:
    """The page as a real browser has it after it was shown for some seconds."""
    assert CHROMIUM is not None
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--window-size=1240,1700",
    ]
    command = [CHROMIUM, *flags, "--virtual-time-budget=4000", wanted, url]
    home = {**os.environ, "HOME": str(folder)}
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=nowhere, env=home)
    try:
        async with asyncio.timeout(50):
            page, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return page.decode()


@pytest.fixture
async def fleet() -> AsyncIterator[tuple[list[FakeWorker], list[FakeWorker]]]:
    async with AsyncExitStack() as stack:
        found: dict[str, list[FakeWorker]] = {"prefill": [], "decode": []}
        for role, number in (("prefill", 2), ("decode", 3)):
            for _ in range(number):
                one = await FakeWorker(role).start()
                stack.push_async_callback(one.stop)
                found[role].append(one)
        yield found["prefill"], found["decode"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to show the page in")
async def test_browser_shows_what_the_state_says_also_with_a_dead_worker(
    fleet: tuple[list[FakeWorker], list[FakeWorker]], tmp_path: Path
) -> None:
    prefill, decode = fleet
    session = {"peer": HOSTILE, "state": "ready", "transport": "mapped", "lane": "mapped"}
    decode[0].name = HOSTILE
    live: dict[str, Any] = {
        "transfer_id": "xfer-1",
        "side": "sender",
        "state": "writing",
        "peer": HOSTILE,
        "lane": "mapped",
    }
    live |= {"num_tokens": 9, "nbytes": 1_500_000, "age_s": 0.25, "layers": "llfw.."}
    said = {"name": prefill[0].name, "blocks": {"free": 25, "total": 100}, "peers": [session], "live": [live]}
    prefill[0].report = json.dumps({**said, "ended": [sent(peer=HOSTILE, reason="lease_expired")]}).encode()
    async with proxy_of(prefill, decode, health_interval_s=0.1) as proxy:
        for _ in range(20):
            await asyncio.gather(*(proxy.stream(prompt="x") for _ in range(50)))
        await decode[2].stop()
        await until(lambda: proxy.router.pools.all[4].state is State.UNREACHABLE)
        page = await browser(f"{proxy.url}/pdlink/", tmp_path)
        state = await state_of(proxy)
        assert len(proxy.router.records) == 1000
        if folder := os.environ.get("SCREENSHOTS"):
            await browser(f"{proxy.url}/pdlink/", tmp_path, f"--screenshot={folder}/page.png")
    cells = _Cells(page)
    assert cells.verdict == state["verdict"]["text"]
    assert "1 of 5 workers are away, first decode-2" in cells.verdict
    for one in state["workers"]:
        assert [one["label"], one["name"], one["state"]] in [row[:3] for row in cells.rows]
    assert ["prefill-0", "mapped 2.0 GB/s", "no session yet", "no session yet"] in cells.rows
    (transfer,) = [row for row in cells.rows if row and row[0] == "xfer-1"]
    assert transfer[1:6] == [prefill[0].name, HOSTILE, "mapped", "██▓▒░░", "1.5 MB"]
    requests = [row for row in cells.rows if row and row[0].startswith("req-")]
    assert len(requests) == 20
    newest = state["requests"][0]
    assert requests[0][1:5] == [newest["outcome"], newest["kv"], str(newest["prompt_tokens"]), newest["prefill"]]
    assert any("lease_expired" in row for row in cells.rows)
    assert "<img" not in page, "what others say is text"
