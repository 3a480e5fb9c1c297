"""The page in a real browser: what it shows, behind a prefix, with keys, in both schemes, by keyboard and by ear."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from pdlink_proxy.page import routes
from pdlink_proxy.worker import State
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until
from tests.proxy.test_page import record, report, seen, sent, worker

pytest.importorskip("playwright")
from playwright.async_api import Browser, Page, async_playwright, expect

if TYPE_CHECKING:
    from collections.abc import Sequence

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "<img src=x>[red]"
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)
TABS = 40
"""More than the page has stops."""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: make test unpacks one"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """One for all tests of this file; each opens a window of its own, without a past."""
    home = {"HOME": str(tmp_path_factory.mktemp("home"))}
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], env=home
        )
        yield chromium
        await chromium.close()


@asynccontextmanager
async def shown(browser: Browser, url: str, **more: Any) -> AsyncIterator[Page]:
    """The page in a fresh window. No error in its code, and no request that nobody answers, is let pass."""
    window = await browser.new_context(**({"viewport": {"width": 1240, "height": 1700}} | more))
    troubles: list[str] = []
    try:
        page = await window.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("response", lambda got: troubles.append(got.url) if got.status == 404 else None)
        await page.goto(url)
        yield page
        assert troubles == []
    finally:
        await window.close()


async def verdict(page: Page, words: str) -> None:
    """Wait until the sentence on top has these words."""
    await expect(page.locator("#verdict")).to_contain_text(words)


@asynccontextmanager
async def fleet(num_prefill: int, num_decode: int) -> AsyncIterator[tuple[list[FakeWorker], list[FakeWorker]]]:
    async with AsyncExitStack() as stack:
        found: list[list[FakeWorker]] = []
        for role, number in (("prefill", num_prefill), ("decode", num_decode)):
            found.append([await FakeWorker(role).start() for _ in range(number)])
            for one in found[-1]:
                stack.push_async_callback(one.stop)
        yield found[0], found[1]


def reported(worker: FakeWorker, peer: str) -> bytes:
    """A worker with one session, one live transfer in all four states and one that ended badly."""
    session: dict[str, Any] = {"peer": peer, "state": "ready", "transport": "mapped", "lane": "mapped"}
    live: dict[str, Any] = {
        "transfer_id": "xfer-1",
        "side": "sender",
        "state": "writing",
        "peer": peer,
        "lane": "mapped",
    }
    live |= {"num_tokens": 9, "nbytes": 1_500_000, "age_s": 0.25, "layers": "llfw.."}
    ended: dict[str, Any] = {"transfer_id": "t", "side": "sender", "peer": peer, "lane": "mapped", "state": "FAILED"}
    ended |= {"reason": "lease_expired", "nbytes": 4_000_000, "ended_s_ago": 1.0, "life_s": 1.0, "layers": 8}
    ended |= {"moving_s": 0.002, "exposed_s": 0.0}
    said: dict[str, Any] = {
        "name": worker.name,
        "blocks": {"free": 25, "total": 100},
        "peers": [session],
        "live": [live],
    }
    return json.dumps({**said, "ended": [ended]}).encode()


@asynccontextmanager
async def small(browser: Browser, **more: Any) -> AsyncIterator[tuple[Page, Proxy]]:
    """The page of a proxy that has served three requests."""
    async with fleet(1, 1) as (prefill, decode):
        prefill[0].report = reported(prefill[0], decode[0].name)
        async with proxy_of(prefill, decode) as proxy:
            for _ in range(3):
                await proxy.stream(prompt="x")
            async with shown(browser, f"{proxy.url}/pdlink/", **more) as page:
                await verdict(page, "3 requests")
                yield page, proxy


async def state_of(proxy: Proxy) -> dict[str, Any]:
    async with proxy.client.get(f"{proxy.url}/pdlink/state") as response:
        found: dict[str, Any] = await response.json()
        return found


async def cells(page: Page) -> list[list[str]]:
    """Of every row of every table."""
    found: list[list[str]] = await page.evaluate(
        "() => [...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


async def test_page_shows_what_the_state_says_also_with_a_dead_worker(browser: Browser) -> None:
    async with fleet(2, 3) as (prefill, decode):
        decode[0].name = HOSTILE
        prefill[0].report = reported(prefill[0], HOSTILE)
        async with proxy_of(prefill, decode, health_interval_s=0.1) as proxy:
            for _ in range(20):
                await asyncio.gather(*(proxy.stream(prompt="x") for _ in range(50)))
            await decode[2].stop()
            await until(lambda: proxy.router.services.pools.all[4].state is State.UNREACHABLE)
            assert len(proxy.router.services.records) == 1000
            async with shown(browser, f"{proxy.url}/pdlink/") as page:
                await verdict(page, "1 of 5 workers is away: decode-2")
                rows, state = await cells(page), await state_of(proxy)
                assert await page.locator("#verdict").text_content() == state["verdict"]["text"]
                assert await page.locator("img").count() == 0, "what others say is text"
    for one in state["workers"]:
        assert [f"{one['label']} ({one['name']})", one["state"]] in [row[:2] for row in rows]
    assert ["prefill-0", "mapped 2.0 GB/s", "no session now", "no session now"] in rows
    (transfer,) = [row for row in rows if row[0] == "xfer-1"]
    assert transfer[1:6] == [prefill[0].name, HOSTILE, "mapped", "██▓▒░░", "1.5 MB"]
    requests = [row for row in rows if row[0].startswith("req-")]
    assert len(requests) == 20
    newest = state["requests"][0]
    assert requests[0][1:5] == [newest["outcome"], newest["kv"], f"≈ {newest['prompt_tokens']}", newest["prefill"]]
    assert any("lease_expired" in row for row in rows)


async def test_page_shows_what_happened_before_it_was_opened(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "STEP_S", 0.1)
    async with fleet(1, 2) as (prefill, decode), proxy_of(prefill, decode, health_interval_s=0.1) as proxy:
        memory = proxy.router.services.memory
        await until(lambda: len(memory.steps) > 0)
        await proxy.stream(prompt="x")
        await decode[1].stop()
        await until(lambda: len(memory.happenings) > 0 and any(step.requests_per_s for step in memory.steps))
        async with shown(browser, f"{proxy.url}/pdlink/") as page:
            await expect(page.locator("#happened li")).to_contain_text("decode-1 is away")
            await expect(page.locator("#happened li")).to_have_attribute("data-level", "bad")
            rate = page.get_by_role("img", name="requests a second, over the last 15 minutes")
            await expect(rate.locator("path.one")).to_have_attribute("d", re.compile(r"^M[\d.]+ [\d.]+L"))
            await expect(rate.locator("path.mark.bad")).to_have_count(1)
            await expect(page.get_by_role("img", name="prompt tokens found, a second")).to_be_hidden()


async def test_a_chart_has_round_numbers_and_no_line_where_nothing_was_measured(browser: Browser) -> None:
    step = {"requests_per_s": 1, "failed_per_s": 0, "running": 0, "queued": 0, "kv_bytes_per_s": 0, "sources": {}}
    ttft_ms = (10, 1730, None, 20, None)
    async with small(browser) as (page, proxy):
        state = await state_of(proxy)
        state["history"] = [
            {**step, "at_s": 1000 + 10 * at, "ttft_p50_ms": value, "ttft_p95_ms": None}
            for at, value in enumerate(ttft_ms)
        ]
        body = json.dumps(state)
        await page.route("**/pdlink/state", lambda asked: asked.fulfill(body=body, content_type="application/json"))
        await page.reload()
        chart = page.get_by_role("img", name="TTFT, ms, over the last 15 minutes")
        await expect(chart.locator("path.one")).to_have_attribute(
            "d", re.compile(r"^(M[\d.]+ [\d.]+(L[\d.]+ [\d.]+)+){2}$")
        )
        await expect(chart.locator("path.two")).to_have_attribute("d", "")
        assert (await chart.locator("text").all_text_contents())[:5] == ["0", "500", "1000", "1500", "2000"]
        assert await page.get_by_role("img", name="requests now").count() == 0, "there were none"


@asynccontextmanager
async def behind(prefix: str, url: str) -> AsyncIterator[str]:
    """A reverse proxy that serves what is at the URL below a prefix, and nothing else; its own URL."""

    async def hand_on(request: web.Request) -> web.Response:
        target = url + request.path_qs.removeprefix(prefix)
        async with client.request(request.method, target, allow_redirects=False) as got:
            kept = {name: got.headers[name] for name in ("Content-Type", "Location") if name in got.headers}
            return web.Response(status=got.status, body=await got.read(), headers=kept)

    app = web.Application()
    app.router.add_route("*", prefix + "/{rest:.*}", hand_on)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession() as client:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}"
        finally:
            await runner.cleanup()


async def test_page_works_behind_a_prefix_also_without_the_last_slash(browser: Browser) -> None:
    async with fleet(1, 1) as (prefill, decode), proxy_of(prefill, decode) as proxy:
        await proxy.stream(prompt="x")
        async with behind("/team/llm", proxy.url) as url, shown(browser, f"{url}/pdlink") as page:
            await verdict(page, "1 request in")
            assert page.url == f"{url}/pdlink/"
            await page.locator("button.id").first.click()
            await expect(page.locator("#requests pre")).to_contain_text("decode on decode-0")


async def test_page_asks_for_a_key_and_keeps_it_for_its_window_only(browser: Browser) -> None:
    async with fleet(1, 1) as (prefill, decode), proxy_of(prefill, decode, api_keys=["secret"]) as proxy:
        async with shown(browser, f"{proxy.url}/pdlink/") as page:
            await verdict(page, "This proxy wants a key")
            key = page.get_by_label("This proxy wants a key")
            await key.fill("wrong")
            await key.press("Enter")
            await expect(page.locator("#door")).to_contain_text("not one of this proxy's keys")
            await key.fill("secret")
            await key.press("Enter")
            await verdict(page, "No request in the last five minutes")
            await expect(page.locator("#door")).to_be_hidden()
            await page.reload()
            await verdict(page, "No request in the last five minutes")
            assert "secret" not in page.url
        async with shown(browser, f"{proxy.url}/pdlink/") as page:
            await verdict(page, "This proxy wants a key")


CONTRASTS = """() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((c) => c.nodeType === Node.TEXT_NODE).map((c) => c.data.trim()).join("");
    if (!own || !node.checkVisibility() || node.closest(".cells, option, noscript")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    found.push([own, (a + 0.05) / (b + 0.05)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_text_can_be_read_in_both_schemes(browser: Browser, scheme: str) -> None:
    async with small(browser, color_scheme=scheme) as (page, _):
        await expect(page.locator("#requests button").first).to_be_visible()
        back: str = await page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") is (scheme == "light")
        found: list[tuple[str, float]] = await page.evaluate(CONTRASTS)
    assert len(found) > 60
    assert [each for each in found if each[1] < 4.5] == [], "WCAG 2, AA"


CUT = """() => {
  const over = (node) => node.getBoundingClientRect().right > innerWidth + 1;
  const hidden = (node) => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display === "block";
  const all = [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility());
  const ours = all.filter((node) => !node.closest("thead, select"));
  return ours.filter((node) => over(node) || hidden(node)).map((node) => node.outerHTML.slice(0, 200));
}"""
"""What has more in it than can be seen, or goes over the edge."""


async def test_nothing_is_cut_on_a_phone(browser: Browser) -> None:
    async with small(browser, viewport={"width": 390, "height": 844}) as (page, _):
        await page.locator("#requests button").first.click()
        await expect(page.locator("#story pre")).to_be_visible()
        assert await page.evaluate("() => document.documentElement.scrollWidth") <= 390
        assert await page.evaluate(CUT) == []


MANY = 1000
LOOK_CPU_S = 0.1
"""Most of the CPU that one look may cost the browser, in a single task or several."""


@asynccontextmanager
async def of_many(browser: Browser, **more: Any) -> AsyncIterator[Page]:
    """The page of a thousand workers, 12 of which are away, in a state document that a proxy would make of them."""
    workers = [
        worker(
            f"{side}-{number}",
            url=f"http://10.{len(side)}.{number % 16}.{number // 16}:8100",
            cell=f"rack-{number % 8}",
            **({"state": "unreachable", "reason": "connection refused"} if number % 97 == 5 else {}),
        )
        for side in ("prefill", "decode")
        for number in range(MANY // 2)
    ]
    reports = {
        each["url"]: report(
            name=each["label"],
            requests={"running": at % 5, "awaiting_kv": 1, "waiting": at % 3},
            blocks={"free": 100 - at % 90, "total": 100},
            peers=[{"peer": "decode-1", "state": "ready", "transport": "mapped", "lane": "mapped"}],
            ended=[sent(peer="decode-1", moving_s=0.001 + at * 1e-5)],
        )
        for at, each in enumerate(workers[: MANY // 2])
        if each["state"] == "ok"
    }
    state = seen(workers=workers, reports=reports, records=[record(number) for number in range(50)])
    body = msgspec.json.encode(state | {"history": [], "happened": [], "sessions": []})
    async with fleet(1, 1) as (prefill, decode), proxy_of(prefill, decode) as proxy:
        window = await browser.new_context(**({"viewport": {"width": 1240, "height": 900}} | more))
        try:
            page = await window.new_page()
            await page.route(
                "**/pdlink/state", lambda asked: asked.fulfill(body=body, content_type="application/json")
            )
            await page.goto(f"{proxy.url}/pdlink/")
            await verdict(page, f"12 of {MANY} workers are away: prefill-5")
            yield page
        finally:
            await window.close()


async def test_one_look_takes_in_a_thousand_workers_with_the_worst_first(browser: Browser) -> None:
    async with of_many(browser) as page:
        groups, worst = (
            page.get_by_role("table", name="Groups of workers"),
            page.get_by_role("table", name="The worst"),
        )
        await expect(groups.locator("tbody tr")).to_have_count(2)
        await expect(groups.locator("tbody tr").first).to_contain_text("6 unreachable, 494 ok")
        assert await worst.locator("tbody tr").count() == 12
        assert set(await worst.locator("tbody td:nth-child(2)").all_text_contents()) == {"unreachable"}
        await expect(page.get_by_role("table", name="Pairs").locator("tbody tr")).to_have_count(12)
        for by, number in (("cell", 8), ("host", 30), ("model", 1)):
            await page.get_by_label("Group by").select_option(by)
            await expect(groups.locator("tbody tr")).to_have_count(number)
        await page.get_by_label("Group by").select_option("cell")
        first = groups.get_by_role("button").first
        await first.click()
        await expect(first).to_have_attribute("aria-expanded", "true")
        opened = page.get_by_role("table", name=f"Workers of {await first.text_content()}")
        await expect(opened.locator("tbody td:nth-child(2)").first).to_have_text("unreachable")
        assert await opened.locator("tbody tr").count() == 20
        assert await page.evaluate("() => document.querySelectorAll('*').length") < 5000


async def test_a_look_at_a_thousand_workers_costs_a_browser_little(browser: Browser) -> None:
    """By the CPU of the page's thread: what passes beside it is the machine's."""
    async with of_many(browser) as page:
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable", {"timeDomain": "threadTicks"})

        async def cpu_s() -> float:
            found = (await session.send("Performance.getMetrics"))["metrics"]
            return float(next(each["value"] for each in found if each["name"] == "TaskDuration"))

        took_s = []
        for _ in range(3):
            before_s = await cpu_s()
            async with page.expect_response("**/pdlink/state"), page.expect_response("**/pdlink/state"):
                pass
            took_s.append(await cpu_s() - before_s)
        assert min(took_s) < LOOK_CPU_S, took_s


async def test_nothing_of_a_thousand_workers_is_cut_on_a_phone(browser: Browser) -> None:
    async with of_many(browser, viewport={"width": 390, "height": 844}) as page:
        assert await page.evaluate("() => document.documentElement.scrollWidth") <= 390
        assert await page.evaluate(CUT) == []
        empty = "() => [...document.querySelectorAll('td:empty')].filter((cell) => cell.checkVisibility()).length"
        assert await page.evaluate(empty) == 0, "a name without a value"


async def test_what_a_client_chose_as_an_id_is_quoted_in_the_command_that_the_page_shows(browser: Browser) -> None:
    async with small(browser) as (page, proxy):
        chosen = "a'; echo b"
        body = {"model": "m", "prompt": "x"}
        async with proxy.client.post(
            f"{proxy.url}/v1/completions", json=body, headers={"X-Request-Id": chosen}
        ) as answer:
            assert answer.status == 200
        await verdict(page, "4 requests")
        await page.locator("#requests button").first.click()
        await expect(page.locator("#story pre")).to_contain_text(f"pdlink explain {shlex.quote(chosen)}  says more")


async def test_workers_and_requests_show_model_and_version_where_they_are_not_all_alike(browser: Browser) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    async with fleet(1, 2) as (prefill, decode):
        for worker in (*prefill, *decode):
            worker.version, worker.revision = "pdlink 0.1.0", commit
        async with proxy_of(prefill, decode) as proxy:
            for _ in range(4):
                await proxy.stream(prompt="x")
            async with shown(browser, f"{proxy.url}/pdlink/") as page:
                await verdict(page, "4 requests")
                workers, requests = (page.get_by_role("table", name=name) for name in ("Workers", "Requests"))
                await expect(page.locator("#figures")).to_contain_text("pdlink 0.1.0 · m")
                assert "version" not in await workers.locator("th").all_text_contents()
                assert "model" not in await requests.locator("th").all_text_contents()
                decode[1].version, decode[1].revision = "pdlink 0.2.0", "next"
                row = workers.locator("tr", has_text="decode-1")
                await expect(row).to_contain_text("m @ next")
                await expect(row).to_contain_text("pdlink 0.2.0")
                await expect(page.locator("#figures")).to_contain_text("built-in · 2 models")
                await expect(requests.locator("tr", has_text="m @ next")).to_have_count(2)


async def test_a_request_opens_below_its_row_where_it_is_seen(browser: Browser) -> None:
    async with small(browser, viewport={"width": 1240, "height": 300}) as (page, proxy):
        second = page.locator("#requests button").nth(1)
        await second.click()
        second_id = proxy.router.services.records[-2].request_id
        await expect(page.locator("#story pre")).to_contain_text(second_id)
        below = "node => node.closest('tr').previousElementSibling.querySelector('button').textContent"
        assert await page.locator("#story").evaluate(below) == await second.text_content()
        await expect(page.locator("#story")).to_be_in_viewport(ratio=0.9)
        await expect(page.locator("#story pre")).to_contain_text("an estimate by its text")
        await expect(page.locator("#story pre")).to_contain_text("model m, engine built-in")
        for _ in range(60):
            await proxy.stream(prompt="x")
        await expect(page.locator("#requests tbody > tr")).to_have_count(22)
        await expect(page.locator("#story pre")).to_contain_text(second_id)
        await page.locator("#requests").get_by_role("button", expanded=True).click()
        await expect(page.locator("#story")).to_have_count(0)


async def test_parts_of_a_bar_add_up_to_the_time_to_the_first_token(browser: Browser) -> None:
    async with small(browser) as (page, proxy):
        state = await state_of(proxy)
        ends = [each["ttft_s"] for each in state["requests"]]
        assert [sum(each["parts"].values()) for each in state["requests"]] == pytest.approx(ends)
        widths: list[list[float]] = await page.evaluate(
            "() => [...document.querySelectorAll('.bar')].map("
            "bar => [...bar.children].map(part => parseFloat(part.style.width)))"
        )
        assert [sum(each) for each in widths] == pytest.approx([100 * end / max(ends) for end in ends], abs=0.1)


FOCUSED = """() => {
  const at = document.activeElement, style = getComputedStyle(at);
  if (at === document.body) return null;
  const box = at.getBoundingClientRect();
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return { name: at.id || at.textContent, seen, y: box.y };
}"""


async def test_everything_is_reached_by_keyboard_in_order_and_the_focus_is_seen_and_stays(browser: Browser) -> None:
    async with small(browser) as (page, proxy):
        stops: list[dict[str, Any]] = []
        for _ in range(TABS):
            await page.keyboard.press("Tab")
            at = await page.evaluate(FOCUSED)
            if at is None or (stops and at["name"] == stops[0]["name"]):
                break
            stops.append(at)
        assert all(stop["seen"] for stop in stops), stops
        assert [stop["y"] for stop in stops] == sorted(stop["y"] for stop in stops), "as the page reads"
        newest = proxy.router.services.records[-1].request_id
        names = [stop["name"] for stop in stops]
        assert names.index("filter") < [name.rstrip("…") in newest for name in names].index(True)
        request = page.locator("#requests button").first
        await request.focus()
        await page.keyboard.press("Enter")
        await expect(request).to_have_attribute("aria-expanded", "true")
        await expect(page.locator("#story pre")).to_contain_text(newest)
        then = await page.locator("#age").text_content()
        await expect(page.locator("#age")).not_to_have_text(then or "")
        await expect(request).to_be_focused()
        await page.keyboard.press("Space")
        await expect(page.locator("#story")).to_have_count(0)
        await page.locator("#filter").focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("ArrowDown")
        await expect(page.locator("#requests")).to_contain_text("None.")


async def test_a_screen_reader_finds_its_way_by_names_and_hears_the_sentence_once(browser: Browser) -> None:
    async with small(browser) as (page, _):
        tree = await page.locator("body").aria_snapshot()
        heads: Sequence[str] = await page.get_by_role("heading").all_text_contents()
        assert heads == [
            "pdlink",
            *(
                "Workers",
                "Pairs",
                "Transfers now",
                "Requests",
                "Transfers that ended",
                "Failures and fallbacks",
                "Tiers",
            ),
        ]
        for name in (*heads[1:], "Figures of five minutes"):
            await expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)
        for name in ("Workers", "Pairs", "Transfers now", "Requests", "Transfers that ended"):
            await expect(page.get_by_role("table", name=name, exact=True)).to_have_count(1)
        assert "- banner:" in tree
        assert "- main:" in tree
        await expect(page.get_by_role("status")).to_contain_text("3 requests")
        await expect(
            page.get_by_role("img", name="2 of 6 layers landed, 1 in flight, 1 waits for the link")
        ).to_have_count(1)
        await expect(page.get_by_role("img", name="queue").first).to_be_visible()
        await expect(page.get_by_role("combobox", name="Show")).to_have_count(1)
        await expect(page.get_by_role("rowheader", name="prefill-0").first).to_be_visible()
        unnamed: int = await page.evaluate(
            "() => [...document.querySelectorAll('button, select, input, svg')].filter(each =>"
            " !each.closest('[aria-label], label, [role=img]') && !each.textContent.trim()).length"
        )
        assert unnamed == 0
        await page.evaluate(
            "() => { window.said = 0; new MutationObserver((found) => { window.said += found.length; })"
            ".observe(document.getElementById('verdict'), { childList: true, characterData: true, subtree: true }); }"
        )
        for _ in range(2):
            then = await page.locator("#age").text_content()
            await expect(page.locator("#age")).not_to_have_text(then or "")
        assert await page.evaluate("() => window.said") == 0, "a sentence that stays is not read out each second"
