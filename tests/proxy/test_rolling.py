"""A rolling update, cell by cell, behind two proxies under load: no request is lost, and old never meets new."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

from pdlink_proxy.steps import Leg
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.proxy.fakes import Proxy

CELLS = ("rack-a", "rack-b")
CLIENTS = 3
"""Of each proxy."""
ENOUGH = 20
"""Answers between two steps."""


async def worker(cell: str, role: str, fingerprint: str) -> FakeWorker:
    return await FakeWorker(role, f"{role} {fingerprint} {cell}", fingerprint=fingerprint).start()


async def test_a_rolling_update_cell_by_cell_pairs_no_old_with_new_and_loses_no_request(tmp_path: Path) -> None:
    """The steps of docs/deploy.md: take a cell out, update both sides, let it come back, go on with the next."""
    now = {(cell, role): await worker(cell, role, "old") for cell in CELLS for role in ("prefill", "decode")}
    everybody = [(cell, each) for (cell, _), each in now.items()]
    answers: list[bytes] = []

    def list_all(out: str = "") -> None:
        for (cell, role), each in now.items():
            hidden = tmp_path / f".{role}-{cell}"
            hidden.write_text(json.dumps({"role": role, "url": each.url, "cell": cell, "drain": cell == out}))
            hidden.rename(tmp_path / f"{role}-{cell}.json")

    async def ask(proxy: Proxy) -> None:
        while True:
            answers.append(await proxy.stream())

    async def more() -> None:
        wanted = len(answers) + ENOUGH
        await until(lambda: len(answers) >= wanted or any(task.done() for task in clients), "answers")

    list_all()
    async with contextlib.AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(
                proxy_of([], [], settled=False, discover=[f"file:{tmp_path}"], health_interval_s=0.05)
            )
            for _ in range(2)
        ]

        def used(proxy: Proxy) -> set[str]:
            return {each.url for leg in Leg for each in proxy.router.services.pools.usable(leg)}

        def in_hand(urls: set[str]) -> int:
            return sum(
                each.in_flight for proxy in proxies for url in urls for each in proxy.router.services.pools.at(url)
            )

        await until(lambda: all(len(used(proxy)) == 4 for proxy in proxies), "four workers each")
        clients = [asyncio.create_task(ask(proxy)) for proxy in proxies for _ in range(CLIENTS)]
        for cell in CELLS:
            await more()
            list_all(out=cell)
            away = {each.url for (name, _), each in now.items() if name == cell}
            await until(lambda away=away: not any(used(proxy) & away for proxy in proxies), "the cell is out")  # type: ignore[misc]
            await until(lambda away=away: in_hand(away) == 0, "its requests have ended")  # type: ignore[misc]
            await more()  # the other cell serves
            for role in ("prefill", "decode"):
                await now[cell, role].stop()
                now[cell, role] = new = await worker(cell, role, "new")
                everybody.append((cell, new))
            list_all()
            new_urls = {now[cell, role].url for role in ("prefill", "decode")}
            await until(lambda urls=new_urls: all(urls <= used(proxy) for proxy in proxies), "the cell is back")  # type: ignore[misc]
        await more()
        assert not any(task.done() for task in clients), [task.exception() for task in clients if task.done()]
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        assert {answer.count(b"two") for answer in answers} == {1}
        by_name = {each.name: (cell, each) for cell, each in everybody if each.role == "prefill"}
        for cell, decode in [each for each in everybody if each[1].role == "decode"]:
            assert len(decode.received) >= 1, "it has served"
            for received in decode.received:
                its_cell, prefill = by_name[received.body["kv_transfer_params"]["prefill"]["name"]]
                assert its_cell == cell, "KV stays within a cell"
                assert prefill.fingerprint == decode.fingerprint, "old never meets new"
        assert all(proxy.router.services.pools.mismatches == [] for proxy in proxies)
        for each in now.values():
            stack.push_async_callback(each.stop)
