"""The page of real workers in a real browser, while KV crosses and after one of them was killed.

`make pictures` keeps what it looked like in docs/.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import NAMES, stamped
from tests.waiting import until

from .deployment import Deployment, prompt_of, request, worker_settings

pytest.importorskip("playwright")
from playwright.sync_api import Browser, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)
_PICTURED_STEPS = 12
"""Of 10 s each, in the charts of the pictures."""
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
LENGTHS = (700, 1500, 90, 400, 1000, 1200)
"""Tokens of prompts that have ended when somebody looks."""
LATER = (1800, 300, 1000, 80)
"""Of those whose layers are seen on their way."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: make test unpacks one"),
]


class Load:
    """Prompts, one after the other, until it is left."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment, self._over = deployment, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for seed, length in enumerate(itertools.cycle(LATER), 1000):
            if self._over.is_set():
                return
            self._deployment.complete(prompt_of(length, seed), max_tokens=2)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


_CELLS = "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"


def looked_at(browser: Browser, url: str, scheme: Any, looks: int) -> tuple[bytes, list[list[str]]]:
    """The page down to its requests, in this scheme and while a transfer runs, and the cells of all tables.

    looks: of the page at the proxy before that; figures of rates need two.
    """
    window = browser.new_context(viewport={"width": 1160, "height": 1000}, color_scheme=scheme)
    try:
        page = window.new_page()
        page.set_default_timeout(PATIENCE_MS)
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda line: troubles.append(line.text) if line.type == "error" else None)
        page.goto(url + "/pdlink/")
        expect(page.locator("#verdict")).to_contain_text("1 of 5 workers is away: decode-2")
        expect(page.locator("#happened")).to_contain_text("decode-2 is away")
        page.locator("#requests button").last.click()
        expect(page.locator("#story pre")).to_contain_text("placed, prefill on prefill-")
        for _ in range(looks):
            at = page.locator("#age").text_content() or ""
            expect(page.locator("#age")).not_to_have_text(at)
        # A transfer may end at any moment, so its row is read as it is found.
        rows = page.wait_for_function(f"() => document.querySelector('#live .cells .l') && {_CELLS}")
        cells: list[list[str]] = rows.json_value()
        below = page.evaluate(
            "() => document.querySelector('#ended').parentElement.getBoundingClientRect().top + scrollY"
        )
        clip: Any = {"x": 0, "y": 0, "width": 1160, "height": below}
        shot = page.screenshot(full_page=True, clip=clip)
        assert troubles == []
        return shot, cells
    finally:
        window.close()


def test_page_of_real_workers_shows_lanes_layers_on_their_way_and_who_is_gone(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    keep = pytestconfig.getoption("--pictures")
    store = {"tiers": {"max_local_cpu_size": 0.05}, "cache": {"num_blocks": 600}}
    workers = {name: worker_settings(name.partition("-")[0], **store) for name in WORKERS}
    with Deployment.launch(workers) as deployment, sync_playwright() as playwright:
        url = deployment.url("proxy")
        for number, length in enumerate(LENGTHS):
            answers = deployment.complete_all(
                [prompt_of(length, number), prompt_of(length, number % 3)], max_tokens=6
            )
            assert {answer.status for answer in answers} == {200}
        seeds = itertools.count(100)

        def all_met() -> bool:
            deployment.complete_all([prompt_of(60, next(seeds)) for _ in range(4)], max_tokens=4)
            return all(pair["lane"] for pair in request(url + "/pdlink/state").body["pairs"])

        until(all_met, "every pair has moved KV")
        deployment.kill("decode-2")
        until(lambda: request(url + "/health").body["decode"][2]["state"] != "ok", "the proxy misses decode-2")
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], env={"HOME": str(tmp_path)}
        )
        with Load(deployment):
            until(
                lambda: request(url + "/pdlink/state").body["totals"].get("store_records", {}).get("evicted", 0) > 0,
                "memory is too small for all prompts",
            )
            if keep is not None:
                until(lambda: len(request(url + "/pdlink/state").body["history"]) > _PICTURED_STEPS, "a past", 180)
            shot, cells = looked_at(chromium, url, "light", 2)
            if keep is not None:
                Path(keep, NAMES[0]).write_bytes(stamped(shot))
                Path(keep, NAMES[1]).write_bytes(stamped(looked_at(chromium, url, "dark", 2)[0]))
        chromium.close()
        state = request(url + "/pdlink/state").body
    pairs = {row[0]: row[1:] for row in cells if row[0].startswith("prefill-") and len(row) == 4}
    assert pairs.keys() == {"prefill-0", "prefill-1"}
    assert all(lane.startswith("mapped ") and lane.endswith(" GB/s") for row in pairs.values() for lane in row[:2])
    (live,) = (row for row in cells if row[0].startswith("xfer-") and len(row) == 7)
    assert set(live[4]) <= set("█▓▒░")
    assert len(live[4]) == 8, "a cell for each layer"
    served = [row for row in cells if row[0].startswith("req-")]
    known = {(each["request_id"][:14], str(each["prompt_tokens"])) for each in state["requests"]}
    seen = {(row[0][:14], row[3]) for row in served if row[1] == "ok"}
    newest = {name for name, _ in known}  # the proxy has forgotten some that the page had shown
    assert seen, served
    assert {each for each in seen if each[0] in newest} <= known
    (memory,) = (row for row in cells if row[0] == "memory")
    assert int(memory[1]) > 0, "prompts came again"
    assert int(memory[4].partition(" ")[0]) > 0, "and memory is too small for all of them"
    assert state["summary"]["per_token_p50_ms"] > 0
