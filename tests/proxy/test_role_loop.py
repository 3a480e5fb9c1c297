"""The loop that turns workers: what it asks of them, what it makes of their answers, and what it shows."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web

from pdlink.config import ProxyConfig, RolesConfig
from pdlink.errors import ConfigError
from pdlink_proxy.decisions import Decision
from pdlink_proxy.http_client import HttpClient
from pdlink_proxy.metrics import Metrics
from pdlink_proxy.steps import Leg
from pdlink_proxy.turning import loop as loop_module
from pdlink_proxy.turning.decide import Turn
from pdlink_proxy.turning.demand import Seen
from pdlink_proxy.turning.loop import RoleLoop, seen
from pdlink_proxy.worker import State
from tests.private import write_private
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdlink_proxy.pools import Pools


@contextlib.asynccontextmanager
async def asked(status: int, config: RolesConfig) -> AsyncIterator[tuple[RoleLoop, list[Any], str]]:
    """A loop, what a worker has been asked, and its URL."""
    got: list[Any] = []

    async def role(request: web.Request) -> web.Response:
        got.append((request.headers["Authorization"], await request.json()))
        return web.json_response({"error": {"message": "no"}}, status=status)

    app = web.Application()
    app.router.add_post("/role", role)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pools = cast("Pools", SimpleNamespace(workers={side: [] for side in Leg}))
    try:
        async with HttpClient(connect_timeout_s=2.0, max_connections=0) as client:
            loop = RoleLoop(config, pools, Metrics(), lambda: 0)
            loop.begin(client)
            yield loop, got, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def config(tmp_path: Path) -> RolesConfig:
    write_private(tmp_path / "keys", "sk-roles")
    return RolesConfig(mode="on", admin_key_file=str(tmp_path / "keys"), drain_s=7.0)


@pytest.mark.parametrize(("status", "outcome"), [(200, "taken"), (409, "refused")])
async def test_a_turn_is_asked_of_one_life_with_the_key_and_its_end_is_shown(
    status: int, outcome: str, config: RolesConfig
) -> None:
    async with asked(status, config) as (loop, got, url):
        await loop._make(Turn(url, "e1", "prefill", "because"))
        assert got == [("Bearer sk-roles", {"role": "prefill", "epoch": "e1", "deadline_s": 7.0})]
        (made,) = loop.describe()["turns"]
        assert (made.worker, made.role, made.outcome, made.why) == (url, "prefill", outcome, "because")
        assert bool(made.said) == (status != 200)
        assert loop._metrics.role_turns.values["prefill", outcome] == [1.0]
        lived = [Decision("r", at_s, "first", "placed", "", 1, 0.0) for at_s in (made.at_s - 1, made.at_s + 1)]
        assert loop.turns_beside(lived) == [made]
        assert loop.turns_beside([lived[1]]) == loop.turns_beside([]) == []


async def test_a_worker_that_is_gone_refuses_and_a_dry_run_asks_nobody(config: RolesConfig) -> None:
    async with asked(200, config) as (loop, _, _url):
        await loop._make(Turn("http://127.0.0.1:1", "e1", "prefill", "because"))
        assert loop.turns[-1].outcome == "refused"
    async with asked(200, config.model_copy(update={"mode": "dry_run"})) as (loop, got, url):
        await loop._make(Turn(url, "e1", "decode", "because"))
        assert (got, loop.turns[-1].outcome) == ([], "dry_run")


async def test_of_several_loops_that_decide_at_once_the_later_one_sees_the_first(
    config: RolesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for a time by chance, and makes no turn if a worker is not what it was."""
    quick = config.model_copy(update={"window_s": 0.01})
    workers: list[Seen] = []
    monkeypatch.setattr(loop_module, "seen", lambda _pools: iter(workers))
    async with asked(200, quick) as (loop, got, url):
        group, health = ("m", "", ""), cast("Any", None)
        workers += [Seen(each, "decode", group, True, True, health, 0.0) for each in (url, "http://a")]
        workers.append(Seen("http://b", "decode", ("other", "", ""), True, True, health, 0.0))
        turn = Turn(url, "e1", "prefill", "because")
        before = loop_module.standing(workers, url)
        assert len(before) == 2
        workers[2] = workers[2]._replace(settled=False)
        assert await loop._is_alone(turn, before), "another group"
        workers[1] = workers[1]._replace(settled=False)  # it drains: another proxy has turned it
        assert not await loop._is_alone(turn, before)
        workers[1] = workers[1]._replace(side="prefill", settled=True)
        assert not await loop._is_alone(turn, before)
        assert got == []
    async with asked(200, quick.model_copy(update={"mode": "dry_run"})) as (loop, _, url):
        assert await loop._is_alone(turn, before), "what would have been done is shown by each"


async def test_a_proxy_with_the_loop_shows_its_groups(prefill: FakeWorker, decode: FakeWorker) -> None:
    roles = RolesConfig(mode="dry_run", window_s=0.1)
    async with proxy_of([prefill], [decode], roles=roles) as proxy:
        loop = proxy.router.role_loop
        assert loop is not None
        await until(lambda: loop.decider.judged != [], "a window")
        async with proxy.client.get(f"{proxy.url}/health") as response:
            (group,) = (await response.json())["roles"]["groups"]
        assert (group["prefill"]["workers"], group["decode"]["workers"], group["worth"]) == (1, 1, None)
        async with proxy.client.get(f"{proxy.url}/pdlink/state") as response:
            assert (await response.json())["roles"]["mode"] == "dry_run"


async def test_only_workers_that_serve_one_role_and_answer_are_seen(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    async with proxy_of([prefill], decodes) as proxy:
        await until(lambda: all(worker.state is State.OK for worker in proxy.router.pools.all), "all")
        found = {each.url: each for each in seen(proxy.router.pools)}
        assert len(found) == 3
        assert {each.settled for each in found.values()} == {True}
        one, other = proxy.router.pools.workers[Leg.DECODE]
        one.listed_as_draining = True
        other.state = State.UNREACHABLE
        found = {each.url: each for each in seen(proxy.router.pools)}
        assert (other.url in found, found[one.url].settled) == (False, False)


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"roles\.admin_key_file: missing"):
        RolesConfig(mode="on")
    with pytest.raises(ValueError, match=r"roles\.drain_s = 700"):
        RolesConfig(mode="dry_run", drain_s=700.0)
    with pytest.raises(ValueError, match="roles: is for dialect: pdlink"):
        ProxyConfig(
            dialect="vllm-nixl", prefill=("http://a:1",), decode=("http://b:1",), roles=RolesConfig(mode="dry_run")
        )
    with pytest.raises(ConfigError, match=r"roles\.admin_key_file"):
        RoleLoop(
            RolesConfig(mode="on", admin_key_file=str(tmp_path / "none")),
            cast("Pools", None),
            Metrics(),
            lambda: 0,
        )
