"""What every `WorkerSource` owes: whole lists, at once and after each change, and nobody lost while it is down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.discovery.sources import WORLDS, World, followed
from tests.proxy.fakes import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(params=list(WORLDS))
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """It lists worker 1 of prefill and worker 2 of decode."""
    async with WORLDS[request.param](tmp_path) as world:
        world.put("prefill", 1)
        world.put("decode", 2)
        yield world


def urls(world: World, *numbers: int) -> list[str]:
    return [world.url(number) for number in numbers]


async def test_all_workers_are_told_without_a_change(world: World) -> None:
    async with followed(world.source) as seen:
        await until(lambda: seen.urls == urls(world, 1, 2), "the workers")
        assert [each.url for each in seen.lists[-1].prefill] == urls(world, 1)
        assert not seen.stale


async def test_each_change_brings_a_list_of_all(world: World) -> None:
    async with followed(world.source) as seen:
        await until(lambda: seen.urls == urls(world, 1, 2), "the workers")
        before = len(seen.lists)
        world.put("decode", 3)
        await until(lambda: seen.urls == urls(world, 1, 2, 3), "one more")
        world.remove("decode", 2)
        await until(lambda: seen.urls == urls(world, 1, 3), "one less")
        for listed in seen.lists[before:]:
            found = [each.url for each in (*listed.prefill, *listed.decode)]
            assert found in (urls(world, 1, 2), urls(world, 1, 2, 3), urls(world, 1, 3))


async def test_who_follows_anew_is_told_all_again(world: World) -> None:
    for _ in range(2):
        async with followed(world.source) as seen:
            await until(lambda seen=seen: seen.urls == urls(world, 1, 2), "the workers")  # type: ignore[misc]


async def test_a_source_that_is_down_from_the_start_says_why_and_tells_all_when_it_is_back(world: World) -> None:
    world.go_down()
    async with followed(world.source) as seen:
        told = seen.discovery.describe
        await until(lambda: "has not answered" not in told()["it"]["reason"], "the reason")
        assert seen.stale
        assert told()["it"]["reason"]
        assert seen.lists == []
        world.come_back()
        await until(lambda: seen.urls == urls(world, 1, 2) and not seen.stale, "the workers")


async def test_a_source_that_goes_down_loses_nobody_and_tells_what_changed_when_it_is_back(world: World) -> None:
    async with followed(world.source) as seen:
        await until(lambda: seen.urls == urls(world, 1, 2), "the workers")
        before = len(seen.lists)
        world.go_down()
        await until(lambda: seen.stale, "the mark")
        assert len(seen.lists) == before
        assert seen.discovery.members() == seen.lists[-1]
        world.put("decode", 3)
        world.come_back()
        await until(lambda: seen.urls == urls(world, 1, 2, 3) and not seen.stale, "the change")
